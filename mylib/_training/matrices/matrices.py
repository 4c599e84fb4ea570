"""Which leaves are matrices, or stacks of them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..._core.errors import Fault, PlacementError, because
from ..._core.placement import PASS, AnyMesh, ask, leaf_at
from ..._core.rules import dimensions_in_front, has_names
from ..._core.tree import Leaf, Leaves

Matrices = Callable[[Leaf], Any]


@dataclass(frozen=True)
class MatrixDims:
    """The dimensions of a leaf that count its matrices, and those of their rows and columns."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        return self.batch + self.rows + self.columns

    def of_matrix(self, shape: Sequence[int]) -> tuple[int, int]:
        """The shape of one matrix of a leaf."""
        rows, columns = (math.prod(shape[d] for d in dims) for dims in (self.rows, self.columns))
        return rows, columns


def matrices_in(
    leaves: Leaves, rule: Matrices | None, mesh: AnyMesh | None
) -> list[MatrixDims | None]:
    """The dimensions of each leaf; None for leaves that are no matrices."""
    found: list[MatrixDims | None] = []
    faults: list[Fault] = []
    for i in range(len(leaves.arrays)):
        leaf = leaf_at(leaves, i, mesh)
        answer = PASS if rule is None else ask(rule, leaf)
        dims = _usual(leaf) if answer is PASS else _checked(answer, leaf)
        found.append(None if isinstance(dims, Fault) else dims)
        if isinstance(dims, Fault):
            faults.append(leaves.at(i, dims))
    if faults:
        raise PlacementError(faults)
    return found


def _usual(leaf: Leaf) -> MatrixDims | Fault | None:
    stacked = dimensions_in_front(leaf)
    if leaf.ndim - stacked == 2:
        return MatrixDims(tuple(range(stacked)), (stacked,), (stacked + 1,))
    if leaf.ndim > 2 and not has_names(leaf):
        return because(
            f"by_matrix can't tell which of the {leaf.ndim} dimensions are those of matrices",
            "give `matrices=lambda leaf: (batch, rows, columns)`, such as ((0,), (1,), (2,)) for a "
            "stack of matrices, or None for a leaf that is not one",
            "by_matrix",
        )
    return None


def _checked(answer: Any, leaf: Leaf) -> MatrixDims | Fault | None:
    """What `matrices=` says of a leaf, if it names each dimension once."""
    if answer is None:
        return None
    try:
        named = [tuple(dims) if isinstance(dims, Sequence) else (dims,) for dims in answer]
        batch, rows, columns = (tuple(d % leaf.ndim for d in dims) for dims in named)
        dims = MatrixDims(batch, rows, columns)
    except (TypeError, ValueError, ZeroDivisionError):
        dims = None
    if (
        dims is None
        or sorted(dims.order) != [*range(leaf.ndim)]
        or not (dims.rows and dims.columns)
    ):
        return because(
            f"matrices= must name each of the {leaf.ndim} dimensions once",
            "return (batch, rows, columns), such as ((0,), (1,), (2,)), None or rules.PASS",
            f"matrices= returned {answer!r}",
        )
    return dims
