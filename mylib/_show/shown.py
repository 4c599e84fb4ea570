"""The common base of `show` and `explain`: a table in a terminal, and a page in a notebook."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from .fold import LINES, body_of, fold
from .meshes import Meshes
from .page import overview_page
from .rows import Row
from .text import BOLD, Paint, columns, for_stdout, paint_for_stdout


class Shown:
    """Something with `rows`, and the `bytes_by_device` to draw as bars."""

    _header: ClassVar[tuple[str, ...]]
    rows: Any
    bytes_by_device: Any

    @property
    def _listed(self) -> Sequence[Any]:
        """The rows of the table."""
        return self.rows

    @abstractmethod
    def _cells(self, label: str, alike: Sequence[Any]) -> tuple[str, ...]:
        """The line of some that are alike."""

    @abstractmethod
    def _notes(self) -> list[str]:
        """The lines below the table."""

    def _code_of(self, item: Any, column: str) -> str:
        """The colour of a cell."""
        return ""

    def _below(self, paint: Paint) -> list[str]:
        """The end of the text."""
        return []

    def _notes_of_page(self) -> list[str]:
        return self._notes()

    @cached_property
    def _meshes(self) -> Meshes:
        return Meshes(self.rows)

    def __repr__(self) -> str:
        return self._text(LINES)

    def whole(self) -> str:
        """The text with all lines, however many. By default, leaves after the first 200 lines share
        a line if they are alike.
        """
        return self._text(None)

    def _text(self, most: int | None) -> str:
        paint, groups = paint_for_stdout(), fold(self._listed, most)

        def code_of(row: int, column: int) -> str:
            return self._code_of(groups[row - 1][1][0], self._header[column]) if row else BOLD

        table = [self._header, *body_of(groups, self._cells, most)]
        lines = [*columns(table, paint, code_of), ""] if groups else []
        return for_stdout([*lines, *self._notes(), *self._below(paint)])

    def _repr_html_(self) -> str:
        body = body_of(fold(self._listed), self._cells)
        notes, loads = self._notes_of_page(), self.bytes_by_device
        return overview_page(notes, self.rows, self._header, body, loads, self._meshes)

    def _place_of(self, row: Row | None) -> str:
        """Where a row is, and on which mesh, if there are several."""
        return "" if row is None else row.spec + self._meshes.suffix(row.place)
