"""What is known of a tree before its arrays are moved: its form, and what must not change."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer

from .._tree import KeyPath, Leaves, Split, split


@dataclass(frozen=True, eq=False)
class Form:
    """A tree of arrays of which only shapes, dtypes and shardings are known."""

    outline: Split
    structs: tuple[jax.ShapeDtypeStruct, ...]


def split_as(tree: Any, name: str) -> Leaves:
    def named(path: KeyPath) -> str:
        return f"{name}{jtu.keystr(path)}"

    return split(tree, naming=named)


def fixed_of(leaves: Leaves) -> Split:
    """What must not change in a tree."""
    places = set(leaves.positions)
    flags = tuple(i in places for i in range(len(leaves.all)))
    static = tuple(x for i, x in enumerate(leaves.all) if i not in places)
    return Split(leaves.treedef, flags, static)


def refuse_tracers(*trees: Any) -> None:
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(trees)):
        raise TypeError(
            "a pipeline runs programs on several meshes, so it can't be called inside jax.jit, "
            "jax.grad or jax.vmap: it returns the loss and the gradients, and compiles itself"
        )
