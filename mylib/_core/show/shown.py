"""The common base of `show` and `explain`: a table in a terminal, and a page in a notebook."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from .fold import LINES, fold, merged
from .meshes import Meshes
from .page import SIZES, overview_page
from .rows import Row
from .text import Paint, columns, fits, for_stdout, paint_for_stdout, plain, wrapped


class Shown:
    """Something with `rows`."""

    _header: ClassVar[tuple[str, ...]]
    rows: Any

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

    def _below(self, paint: Paint) -> list[str]:
        """The end of the text; on a page, above the pictures."""
        return []

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
        table, shared = self._table(groups)
        if not fits(table):
            groups = merged(groups, lambda rows: rows[0].likeness)
            table, shared = self._table(groups, left_out="bytes")
        lines = [*columns(table, paint), ""] if groups else []
        alike = ", ".join(f"{name} {text}" for name, text in shared.items() if text)
        notes = [*self._notes(), *([f"all of them: {alike}"] if alike else [])]
        return for_stdout([*lines, *wrapped(notes), *self._below(paint)])

    def _table(
        self, groups: Sequence[Any], left_out: str = ""
    ) -> tuple[list[list[str]], dict[str, str]]:
        """A header and lines; and of the columns that are left out, as all lines have the same
        text in them, that text.
        """
        body = self._body(groups)
        shared = _shared(self._header, body)
        kept = [i for i, name in enumerate(self._header) if name not in (left_out, *shared)]
        return [[cells[i] for i in kept] for cells in (self._header, *body)], shared

    def _body(self, groups: Sequence[tuple[str, list[Any]]]) -> list[tuple[str, ...]]:
        """A line for each group, and a last one that counts the other rows."""
        body = [self._cells(label, group) for label, group in groups]
        left = len(self._listed) - sum(len(group) for _, group in groups)
        if left:
            body.append((f"and {left} more", *[""] * (len(self._header) - 1)))
        return body

    def _repr_html_(self) -> str:
        body = self._body(fold(self._listed, LINES))
        return overview_page(
            self._notes(), self._below(plain), self.rows, self._header, body, self._meshes
        )

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
