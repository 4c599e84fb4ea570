"""What a notebook shows of a report: the collectives with what they send, and the memory."""

from collections.abc import Sequence
from typing import NamedTuple

from .._show import bar, html
from .memory import ProgramMemory
from .text import readable

_NUMBERS = ("times", "bytes", "sent")


class Sent(NamedTuple):
    """A line of the table of collectives, and the bytes that a device sends for it in a call."""

    cells: Sequence[str]
    nbytes: int


def report_page(
    title: str,
    notes: Sequence[str],
    header: Sequence[str],
    rows: Sequence[Sent],
    memory: ProgramMemory | None,
) -> str:
    parts = [html.tag("p", title, class_="strong")]
    parts += [html.tag("p", note.strip(), class_="faint") for note in notes]
    parts += [_collectives(header, rows)] if rows else []
    parts += _memory(memory) if memory is not None else []
    return str(html.page(*parts))


def _collectives(header: Sequence[str], rows: Sequence[Sent]) -> html.Html:
    most = max(row.nbytes for row in rows) or 1
    body = [
        (*row.cells, bar(row.nbytes / most, f"{readable(row.nbytes)} in a call")) for row in rows
    ]
    numbers = [i for i, name in enumerate(header) if name in _NUMBERS]
    hover = [
        "\n".join(f"{name}: {text}" for name, text in zip(header, row.cells, strict=True) if text)
        for row in rows
    ]
    return html.table((*header, "sent in a call"), body, numbers=numbers, hover=hover)


def _memory(memory: ProgramMemory) -> list[html.Html]:
    held = memory.held()
    most = max(held.values(), default=1)
    body = [(name, readable(size), bar(size / most, readable(size))) for name, size in held.items()]
    parts = [html.table(("each device holds", "bytes", ""), body, numbers=[1])]
    heading, rows = memory.at_the_peak()
    if rows:
        parts.append(html.tag("p", heading, class_="faint"))
        parts.append(html.table(("bytes", "arrays", "primitive", "line"), rows))
    return parts
