"""Describes a tree without its arrays, as text that is equal in all processes."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import jax.tree_util as jtu

from .leaves import KeyPath, Leaves

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Longer texts are cut off, and end with a checksum.
_LONG = 200


def texts_of(leaves: Leaves) -> list[str]:
    """The types of a tree's nodes, their static data, and the static leaves, in an order that is
    the same for equal trees.
    """
    texts: list[str] = []
    queue = [leaves.treedef]
    while queue:
        treedef = queue.pop()
        node = treedef.node_data()
        if node is not None:
            kind, held = node
            texts.append(f"{kind.__qualname__} {_text(held)}")
            queue += treedef.children()
        elif treedef.num_leaves:
            texts.append("*")
    arrays = set(leaves.positions)
    return texts + [f"{i} {_text(x)}" for i, x in enumerate(leaves.all) if i not in arrays]


def named_texts_of(leaves: Leaves) -> dict[str, str]:
    """The same, by the names of the nodes and leaves. It is slower."""
    arrays = set(map(id, leaves.arrays))
    texts: dict[str, str] = {}
    for path, x, node in walk(leaves.tree):
        if node is None:
            text = "an array" if id(x) in arrays else shortened(_text(x))
        else:
            kind, held = node
            whole = f"{kind.__qualname__} {_text(held)}"
            text = kind.__qualname__ if _fields_of(x) else shortened(whole)
        texts[leaves.naming(path) or "the tree"] = text
    return texts


def walk(
    x: object, path: KeyPath = ()
) -> Iterator[tuple[KeyPath, object, tuple[type, object] | None]]:
    """The leaves and static fields of a tree with None, and its nodes with their types and data."""
    children, treedef = jtu.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    node = treedef.node_data()
    yield path, x, node
    if node is None:
        return
    keys = {path[0] for path, _ in children}
    for field in _fields_of(x):
        key = jtu.GetAttrKey(field.name)
        if key not in keys:
            yield (*path, key), getattr(x, field.name, None), None
    for (key, *_), child in children:
        yield from walk(child, (*path, key))


def _fields_of(x: object) -> Sequence[dataclasses.Field[object]]:
    return dataclasses.fields(x) if dataclasses.is_dataclass(x) else ()


def _text(x: Any) -> str:
    """Numbers and strings in full, and containers of them; only the type of anything else. The
    `repr` of a user's own type may contain addresses, or differ between processes.
    """
    kind = type(x)
    if kind in _PLAIN:
        return repr(x)
    if kind in (tuple, list):
        inner = ", ".join(map(_text, x))
        return f"({inner})" if kind is tuple else f"[{inner}]"
    if kind is dict:
        items = sorted(f"{_text(key)}: {_text(value)}" for key, value in x.items())
        return f"{{{', '.join(items)}}}"
    if kind in (set, frozenset):
        return f"{kind.__name__} of {', '.join(sorted(map(_text, x)))}"
    if isinstance(x, Enum):
        return f"{kind.__qualname__}.{x.name}"
    return f"a {kind.__module__}.{kind.__qualname__}"


def shortened(text: str) -> str:
    if len(text) <= _LONG:
        return text
    checksum = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[:_LONG]}… (checksum {checksum})"
