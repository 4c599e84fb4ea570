"""Optax's `MuonDimensionNumbers`, which count the dimensions of weights, not of matrices."""

from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import jax
import jax.tree_util as jtu

from ..._core.tree import KeyPath
from .transform import Transform, Tree


def check_numbers(
    transform: Transform, params: Tree, matrices: Mapping[KeyPath, jax.ShapeDtypeStruct]
) -> None:
    """Raises if Muon is told of dimensions that a matrix does not have: it would take others.
    `matrices` are what the transform sees of the weights at these paths.
    """
    for numbers in _dimension_numbers(transform.update, set()):
        numbers = numbers(params) if callable(numbers) else numbers
        for path, node in jtu.tree_leaves_with_path(numbers, is_leaf=_is_numbers):
            axes = jtu.tree_leaves(tuple(node)) if _is_numbers(node) else []
            beyond = [axis for axis in axes if not -2 <= axis < 2]
            at = next((below for below in matrices if below[: len(path)] == path), None)
            if beyond and at is not None:
                raise ValueError(
                    "by_matrix: give MuonDimensionNumbers(0, 1) for a stack of matrices, as the "
                    f"transform sees one matrix {matrices[at].shape} of {jtu.keystr(at)} at a "
                    f"time: it has no dimension {beyond[0]} of {node}. The stack's dimensions "
                    "are those of matrices="
                )


def _is_numbers(node: object) -> bool:
    return getattr(node, "_fields", None) == ("reduction_axis", "output_axis")


def _dimension_numbers(holder: Any, known: set[int]) -> Iterator[Any]:
    """What a function holds under this name, and all functions that it holds."""
    if isinstance(holder, partial):
        holder = holder.func, holder.args, holder.keywords
    if isinstance(holder, FunctionType) and id(holder) not in known:
        known.add(id(holder))
        cells = [cell.cell_contents for cell in holder.__closure__ or ()]
        holder = dict(zip(holder.__code__.co_freevars, cells, strict=True))
    if isinstance(holder, dict):
        named = [held for name, held in holder.items() if str(name).endswith(_NUMBERS)]
        yield from named
        holder = [*holder.values()]
    if isinstance(holder, tuple | list) and not _is_numbers(holder):
        for held in holder:
            yield from _dimension_numbers(held, known)


_NUMBERS = "weight_dimension_numbers"
