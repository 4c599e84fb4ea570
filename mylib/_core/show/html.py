"""Writes HTML and SVG for notebooks: escaped, without scripts, and with nothing from elsewhere."""

import re
from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path

from .text import BEFORE_KEY


class Html(str):
    """HTML, not to be escaped again."""


def tag(name: str, *inside: str, **attributes: object) -> Html:
    """An element. Its content is escaped unless it is `Html`. In the names of attributes, a last
    `_` is dropped, and other underscores become dashes.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_escaped(str(value))}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{written}>{joined(inside)}</{name}>")


def joined(parts: Sequence[str]) -> Html:
    return Html("".join(part if isinstance(part, Html) else _escaped(part) for part in parts))


def _escaped(text: str) -> str:
    # Neither XML nor HTML has control characters.
    return escape("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text))


def page(*inside: str) -> Html:
    """A page for notebooks."""
    return tag("div", tag("style", _style()), *inside, class_="mylib-show")


@cache
def _style() -> Html:
    rules = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    # Without the comment at the start.
    return Html(rules.partition("*/")[2])


def table(
    header: Sequence[str],
    body: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
) -> Html:
    """A table, which becomes a list where it is narrow. `numbers` are the columns that are aligned
    on the right.
    """
    classes = ["number" if i in numbers else "text" for i in range(len(header))]
    head = tag("tr", *(tag("th", x, class_=c) for x, c in zip(header, classes, strict=True)))
    rows = [tag("tr", *_cells(header, cells, classes)) for cells in body]
    # With a class, as sites have rules for tables without one.
    return tag("table", tag("thead", head), tag("tbody", *rows), class_="rows")


def _cells(header: Sequence[str], cells: Sequence[str], classes: Sequence[str]) -> list[Html]:
    return [
        # The name of the column, for narrow pages, which have no columns.
        tag("td", _breakable(cell), class_=class_ if cell else f"{class_} empty", data_name=name)
        for name, cell, class_ in zip(header, cells, classes, strict=True)
    ]


def _breakable(cell: str) -> Html:
    """Paths may be folded before a key, and nowhere else."""
    if isinstance(cell, Html):
        return cell
    return joined([part for x in _KEY.split(cell) for part in (_FOLD, x)][1:])


_KEY = re.compile(BEFORE_KEY)
_FOLD = Html("<wbr/>")
