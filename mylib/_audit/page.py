"""A report as a page for notebooks: the collectives and the bytes that they send; the memory."""

from collections.abc import Sequence

from .._show import bar, html
from .._text import show_bytes
from ..machines import Memory
from .memory import at_the_peak, held

_NUMBERS = ("times", "bytes", "sent")


def report_page(
    title: str,
    notes: Sequence[str],
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    sent: Sequence[int],
    memory: Memory | None,
) -> str:
    """`sent` are the bytes that a device sends in a call for each row."""
    parts = [html.tag("p", title, class_="strong")]
    parts += [html.tag("p", note.strip(), class_="faint") for note in notes]
    parts += [_collectives(columns, rows, sent)] if rows else []
    parts += _memory(memory) if memory is not None else []
    return str(html.page(*parts))


def _collectives(
    columns: Sequence[str], rows: Sequence[Sequence[str]], sent: Sequence[int]
) -> html.Html:
    # On narrow pages the first cell is the heading of a row.
    header = (*_heading_first(columns), "share")
    bars = [bar(size / (max(sent) or 1), f"{show_bytes(size)} in a call") for size in sent]
    body = [(*_heading_first(row), picture) for row, picture in zip(rows, bars, strict=True)]
    numbers = [i for i, name in enumerate(header) if name in _NUMBERS]
    hover = [
        "\n".join(f"{name}: {text}" for name, text in zip(columns, row, strict=True) if text)
        for row in rows
    ]
    return html.table(header, body, numbers=numbers, hover=hover)


def _heading_first(cells: Sequence[str]) -> list[str]:
    times, kind, *others = cells
    return [kind, times, *others]


def _memory(memory: Memory) -> list[html.Html]:
    parts_held = held(memory)
    most = max(parts_held.values(), default=1)
    body = [
        (name, show_bytes(size), bar(size / most, show_bytes(size)))
        for name, size in parts_held.items()
    ]
    parts = [html.table(("each device holds", "bytes", ""), body, numbers=[1])]
    heading, largest = at_the_peak(memory)
    parts.append(html.tag("p", heading, class_="faint"))
    rows = [(arrays, nbytes, *made_by) for nbytes, arrays, *made_by in largest]
    if rows:
        parts.append(html.table(("arrays", "bytes", "primitive", "line"), rows, numbers=[1]))
    return parts
