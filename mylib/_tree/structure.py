"""Describes a tree without its arrays, as text that is equal in all processes."""

import dataclasses
import hashlib
from collections.abc import Iterator
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
    named = _walk(leaves.tree, (), arrays)
    return {leaves.naming(path) or "the tree": text for path, text in named}


def _walk(x: Any, path: KeyPath, arrays: set[int]) -> Iterator[tuple[KeyPath, str]]:
    children, treedef = jtu.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    node = treedef.node_data()
    if node is None:
        yield path, "an array" if id(x) in arrays else shortened(_text(x))
        return
    kind, held = node
    keys = {path[0] for path, _ in children}
    fields = dataclasses.fields(x) if dataclasses.is_dataclass(x) else ()
    yield path, kind.__qualname__ if fields else shortened(f"{kind.__qualname__} {_text(held)}")
    for field in fields:
        key = jtu.GetAttrKey(field.name)
        if key not in keys:
            yield (*path, key), shortened(_text(getattr(x, field.name, None)))
    for (key, *_), child in children:
        yield from _walk(child, (*path, key), arrays)


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
