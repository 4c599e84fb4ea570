"""Which Modules of a model are its layers."""

from collections import Counter
from collections.abc import Iterator, Set

import equinox as eqx
import jax.tree_util as jtu

from ..._core.tree import is_array
from .calls import Path


def repeated_in(module: object, iterated: Set[str]) -> tuple[type, ...]:
    """The classes of Modules that repeat: several in one list or tuple, or stacked, which is so if
    all their arrays are among the paths in `iterated`. Those inside others are left out.
    """
    # How many of a class are in each list or tuple.
    members: Counter[tuple[str, type]] = Counter()
    nodes: list[tuple[Path, eqx.Module]] = []

    def note(path: Path, node: object) -> bool:
        if isinstance(node, eqx.Module) and path:
            nodes.append((path, node))
            if isinstance(path[-1], jtu.SequenceKey):
                members[jtu.keystr(path[:-1]), type(node)] += 1
        return False

    jtu.tree_flatten_with_path(module, is_leaf=note, is_leaf_takes_path=True)
    outermost: list[tuple[Path, type]] = []
    for path, node in nodes:
        arrays = _paths(node, jtu.keystr(path))
        repeats = members[jtu.keystr(path[:-1]), type(node)] > 1
        is_inside = any(path[: len(outer)] == outer for outer, _ in outermost)
        if arrays and not is_inside and (repeats or arrays <= iterated):
            outermost.append((path, type(node)))
    return tuple(dict.fromkeys(cls for _, cls in outermost))


def _paths(module: object, name: str) -> set[str]:
    leaves = jtu.tree_flatten_with_path(module)[0]
    return {name + jtu.keystr(path) for path, x in leaves if is_array(x, abstract=True)}


def weights_of(module: object, layers: tuple[type, ...]) -> Iterator[set[str]]:
    """For each layer of these classes the paths of its arrays."""
    nodes = jtu.tree_flatten_with_path(module, is_leaf=lambda node: isinstance(node, layers))[0]
    for path, node in nodes:
        if isinstance(node, layers):
            yield _paths(node, jtu.keystr(path))


def layers_in(module: object, layers: tuple[type, ...]) -> tuple[type, ...]:
    """Which of these classes the outermost layers of a Module have; it may be one itself."""
    leaves = jtu.tree_leaves(module, is_leaf=lambda node: isinstance(node, layers))
    return tuple(cls for cls in layers if any(isinstance(node, cls) for node in leaves))
