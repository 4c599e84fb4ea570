"""The common base of `show` and `explain`: a table in a terminal, and a page in a notebook."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from .fold import LINES, body_of, fold
from .meshes import Meshes
from .page import SIZES, overview_page
from .rows import Row
from .text import BOLD, Paint, columns, for_stdout, paint_for_stdout, wrapped


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
        """The text with all lines, however many. By default, leaves after the first 200 lines are
        only counted.
        """
        return self._text(None)

    def _text(self, most: int | None) -> str:
        paint, groups = paint_for_stdout(), fold(self._listed, most)
        body = body_of(self._listed, groups, self._cells)
        shared = _shared(self._header, body)
        kept = [i for i, name in enumerate(self._header) if name not in shared]
        header, *rows = ([cells[i] for i in kept] for cells in (self._header, *body))

        def code_of(row: int, column: int) -> str:
            if row == 0:
                return BOLD
            # The last line, which counts what is left out, has no group.
            return self._code_of(groups[row - 1][1][0], header[column]) if groups[row - 1 :] else ""

        lines = [*columns([header, *rows], paint, code_of), ""] if groups else []
        alike = ", ".join(f"{name} {text}" for name, text in shared.items() if text)
        notes = [*self._notes(), *([f"all of them: {alike}"] if alike else [])]
        return for_stdout([*lines, *wrapped(notes), *self._below(paint)])

    def _repr_html_(self) -> str:
        body = body_of(self._listed, fold(self._listed, LINES), self._cells)
        notes, loads = self._notes_of_page(), self.bytes_by_device
        return overview_page(notes, self.rows, self._header, body, loads, self._meshes)

    def _place_of(self, row: Row | None) -> str:
        """Where a row is, and on which mesh, if there are several."""
        return "" if row is None else row.spec + self._meshes.suffix(row.place)


def _shared(header: Sequence[str], body: Sequence[Sequence[str]]) -> dict[str, str]:
    """The columns in which all lines of a table have the same text, with that text. The line that
    counts what is left out has none.
    """
    full = [cells for cells in body if any(cells[1:])]
    return {
        name: texts[0]
        for name, *texts in list(zip(header, *full, strict=True))[1:]
        if len(texts) > 1 and len({*texts}) == 1 and name not in SIZES
    }
