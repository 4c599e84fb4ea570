"""A report as a page for notebooks: tables of the collectives and of the memory."""

from collections.abc import Sequence

from ..._core.show import html
from ..._core.text import show_bytes
from ..machines import Memory
from .memory import at_the_peak, held


def report_page(
    title: str,
    notes: Sequence[str],
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    memory: Memory | None,
) -> str:
    parts = [html.tag("p", title, class_="strong")]
    parts += [html.tag("p", note.strip(), class_="faint") for note in notes]
    if rows:
        # On narrow pages the first cell is the heading of a row.
        header, *body = ([kind, times, *others] for times, kind, *others in (columns, *rows))
        numbers = [i for i, name in enumerate(header) if name in ("times", "bytes", "sent")]
        parts.append(html.table(header, body, numbers=numbers))
    parts += _memory(memory) if memory is not None else []
    return str(html.page(*parts))


def _memory(memory: Memory) -> list[html.Html]:
    body = [(name, show_bytes(size)) for name, size in held(memory).items()]
    parts = [html.table(("each device holds", "bytes"), body, numbers=[1])]
    heading, largest = at_the_peak(memory)
    parts.append(html.tag("p", heading, class_="faint"))
    rows = [(arrays, nbytes, *made_by) for nbytes, arrays, *made_by in largest]
    if rows:
        parts.append(html.table(("arrays", "bytes", "primitive", "line"), rows, numbers=[1]))
    return parts
