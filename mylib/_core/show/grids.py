"""The grids of a drawing: rows and columns of cells. Large grids leave some of them out."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..placement import Bounds, Shape, Span
from .parts import Partition, show_span

ROWS, COLUMNS, PANELS = 16, 8, 8
"""How many rows, columns and grids are drawn."""
LEFT_OUT = "…"


class Grid(NamedTuple):
    """A grid with the names of its rows and columns. Its cells are the parts of an array; those
    that are left out are None.
    """

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[Bounds | None]]


def grid_of(cut: Partition, panel: tuple[Span, ...], shape: Shape) -> Grid:
    """A grid of an array, whose cells are its parts."""
    rows, columns = shortened(cut.along(cut.down), ROWS), shortened(cut.along(cut.across), COLUMNS)
    cells = [
        [None if ... in (row, column) else cut.cell(panel, row, column) for column in columns]
        for row in rows
    ]
    where = zip(cut.panels, panel, strict=True)
    return Grid(
        ", ".join(f"dimension {dim} at {start}:{stop}" for dim, (start, stop) in where),
        [_name(row, cut.down, shape) for row in rows],
        [_name(column, cut.across, shape) for column in columns],
        cells,
    )


def shortened(items: Sequence[Any], most: int) -> list[Any]:
    """The items that are drawn: `...` in place of those in the middle, if there are too many."""
    if len(items) <= most:
        return list(items)
    return [*items[: most - 2], ..., items[-1]]


def _name(span: Any, dim: int | None, shape: Shape) -> str:
    if span is ...:
        return LEFT_OUT
    return "" if dim is None else show_span(span, shape[dim])
