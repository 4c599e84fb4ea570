"""The grids of a drawing: rows and columns of cells. Large grids leave some of them out."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from .._placement import Bounds, Shape, Span
from .parts import Partition, show_span

ROWS, COLUMNS, PANELS = 16, 8, 8
"""How many rows, columns and grids are drawn."""
LEFT_OUT = "…"

T = TypeVar("T")
U = TypeVar("U")


class Grid(NamedTuple, Generic[T]):
    """A grid with the names of its rows and columns. Cells that are left out are None."""

    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[T | None]]

    def map(self, change: Callable[[T], U]) -> "Grid[U]":
        """A grid with other cells."""
        cells = [[None if cell is None else change(cell) for cell in row] for row in self.cells]
        return Grid(self.title, self.rows, self.columns, cells)


def grids_of(cut: Partition, shape: Shape) -> list[Grid[Bounds]]:
    """The first grids of an array, whose cells are its parts."""
    return [_grid(cut, panel, shape) for panel in cut.all_panels()[:PANELS]]


def _grid(cut: Partition, panel: tuple[Span, ...], shape: Shape) -> Grid[Bounds]:
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


def more(grids: int) -> list[str]:
    """A line about the grids that are not drawn, if there are any."""
    return [f"and {grids - PANELS} more like these"] * (grids > PANELS)
