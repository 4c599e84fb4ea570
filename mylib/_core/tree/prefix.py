"""Spreads a PyTree prefix over the array leaves of a tree."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.tree_util as jtu

from ..errors import Fault, PlacementError, because
from .leaves import KeyPath, Leaves, is_placed

IsLeaf = Callable[[object], bool]
MISFIT = object()
"""The entry of a leaf at which the prefix doesn't fit."""


def is_none(x: object) -> bool:
    return x is None


def broadcast_prefix(prefix: object, leaves: Leaves, is_leaf: IsLeaf) -> list[Any]:
    """One entry of `prefix` for every array leaf, or a `PlacementError` that names every node at
    which the prefix doesn't fit.
    """
    entries, faults = spread_prefix(prefix, leaves, is_leaf)
    if faults:
        raise PlacementError(faults)
    return entries


def spread_prefix(prefix: object, leaves: Leaves, is_leaf: IsLeaf) -> tuple[list[Any], list[Fault]]:
    """One entry of `prefix` for every array leaf, and a fault for every node at which the prefix
    doesn't fit; the entries there are MISFIT. An entry (`is_leaf`) that is a node itself, such as a
    rule that is a Module, stands for a subtree whose structure it doesn't have.
    """
    if prefix is None or (jtu.all_leaves([prefix]) and is_leaf(prefix)):
        return [prefix] * len(leaves.positions), []
    spreading = _Spreading(is_leaf, leaves.naming)
    entries = list(spreading.spread(prefix, leaves.tree))
    return [entries[i] for i in leaves.positions], spreading.faults


@dataclass
class _Spreading:
    # Functions inside a function that call each other are a cycle, which would keep the arrays
    # until garbage is looked for.
    is_leaf: IsLeaf
    naming: Callable[[KeyPath], str]
    faults: list[Fault] = dataclasses.field(default_factory=list)

    def spread(self, prefix: object, tree: object, path: KeyPath = ()) -> Iterator[object]:
        entries, prefix_def = jtu.tree_flatten(prefix, is_leaf=is_none)
        try:
            subtrees = prefix_def.flatten_up_to(tree)
        except (ValueError, TypeError, KeyError):
            yield from self._one_level(prefix, tree, path)
            return
        for entry, subtree in zip(entries, subtrees, strict=True):
            yield from _for_each_leaf(entry, subtree)

    def _one_level(self, prefix: object, tree: object, path: KeyPath) -> Iterator[object]:
        # JAX stops at the first mismatch; going down level by level finds them all.
        prefixes, prefix_def = _children(prefix)
        subtrees, tree_def = _children(tree)
        if prefixes and prefix_def == tree_def:
            for (key, inner), (_, subtree) in zip(prefixes, subtrees, strict=True):
                yield from self.spread(inner, subtree, (*path, key))
            return
        if not self.is_leaf(prefix):
            self.faults.append(_misfit(prefix, tree, self.naming(path) or "the tree"))
        yield from _for_each_leaf(prefix if self.is_leaf(prefix) else MISFIT, tree)


def _for_each_leaf(entry: object, tree: object) -> list[object]:
    return [entry] * jtu.tree_structure(tree).num_leaves


def _misfit(prefix: object, tree: object, path: str) -> Fault:
    expected, actual = _outline(prefix), _outline(tree)
    reason = f"the tree has {actual}" if expected != actual else _static_difference(prefix, tree)
    fix = "give one placement for the whole subtree, or a prefix of the tree's own structure"
    if callable(prefix) and type(prefix) is not type(tree):
        fix += ". A rule that is a Module keeps its placements and arrays in static fields"
    return because(reason, fix, f"a prefix that has {expected} here", path)


def first_difference(old: object, new: object, path: KeyPath = ()) -> tuple[str, str, str]:
    """The path of the first node at which the structures of two trees differ, and both nodes as
    text.
    """
    (old_children, old_def), (new_children, new_def) = _children(old), _children(new)
    if old_children and old_def == new_def:
        for (key, x), (_, y) in zip(old_children, new_children, strict=True):
            if jtu.tree_structure(x) != jtu.tree_structure(y):
                return first_difference(x, y, (*path, key))
    was, now = _outline(old), _outline(new)
    if was == now and (field := _static_field(old, new)):
        path = (*path, jtu.GetAttrKey(field))
        was, now = repr(getattr(old, field)), repr(getattr(new, field))
    return jtu.keystr(path), was, now


def _static_difference(prefix: object, tree: object) -> str:
    field = _static_field(prefix, tree)
    if field is None:
        return "its static fields are not the tree's"
    return f"its {field} is {getattr(prefix, field)!r}, and the tree's is {getattr(tree, field)!r}"


def _static_field(old: object, new: object) -> str | None:
    """The name of the first static field that two dataclasses of one type hold differently."""
    if not dataclasses.is_dataclass(old) or type(old) is not type(new):
        return None
    for field in dataclasses.fields(old):
        if field.metadata.get("static") and getattr(old, field.name) != getattr(new, field.name):
            return field.name
    return None


def _children(node: object) -> tuple[list[tuple[Any, object]], Any]:
    children, treedef = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(path[0], child) for path, child in children if path], treedef


def _outline(node: Any) -> str:
    if is_placed(node):
        return f"an array of shape {tuple(node.shape)}"
    if isinstance(node, dict):
        return f"a {type(node).__name__} with keys {list(node)}"
    if isinstance(node, list | tuple) and not hasattr(node, "_fields"):
        return f"a {type(node).__name__} of {len(node)}"
    return "None" if node is None else f"a leaf or node of type {type(node).__name__}"
