"""Which Modules of a model are its layers."""

from collections import Counter
from collections.abc import Iterator, Set
from typing import Any

import equinox as eqx
import jax.tree_util as jtu

from .._tree import is_array


def repeated_in(module: Any, iterated: Set[str]) -> tuple[type, ...]:
    """The classes of Modules that repeat: several in one list or tuple, or stacked, which is so if
    all their arrays are among the paths in `iterated`. Those inside others are left out.
    """
    # How many of a class are in each list or tuple.
    members: Counter[tuple[str, type]] = Counter()
    nodes: list[tuple[Any, Any]] = []

    def note(path: Any, x: Any) -> bool:
        if isinstance(x, eqx.Module) and path:
            nodes.append((path, x))
            if isinstance(path[-1], jtu.SequenceKey):
                members[jtu.keystr(path[:-1]), type(x)] += 1
        return False

    jtu.tree_flatten_with_path(module, is_leaf=note, is_leaf_takes_path=True)
    outermost: list[tuple[Any, type]] = []
    for path, x in nodes:
        arrays = _paths(x, jtu.keystr(path))
        repeats = members[jtu.keystr(path[:-1]), type(x)] > 1
        is_inside = any(path[: len(outer)] == outer for outer, _ in outermost)
        if arrays and not is_inside and (repeats or arrays <= iterated):
            outermost.append((path, type(x)))
    return tuple(dict.fromkeys(cls for _, cls in outermost))


def _paths(module: Any, name: str) -> set[str]:
    leaves = jtu.tree_flatten_with_path(module)[0]
    return {name + jtu.keystr(path) for path, x in leaves if is_array(x, abstract=True)}


def weights_of(module: Any, layers: tuple[type, ...]) -> Iterator[set[str]]:
    """For each layer of these classes the paths of its arrays."""
    nodes = jtu.tree_flatten_with_path(module, is_leaf=lambda x: isinstance(x, layers))[0]
    for path, x in nodes:
        if isinstance(x, layers):
            yield _paths(x, jtu.keystr(path))


def layers_in(module: Any, layers: tuple[type, ...]) -> tuple[type, ...]:
    """Which of these classes the outermost layers of a Module have; it may be one itself."""
    leaves = jtu.tree_leaves(module, is_leaf=lambda x: isinstance(x, layers))
    return tuple(cls for cls in layers if any(isinstance(x, cls) for x in leaves))
