"""Draws, as text, which device holds which part of an array."""

from typing import Any

from jax.sharding import NamedSharding, Sharding

from .parts import Cut, Part, Shape, Span, cut_of, show_span
from .text import DIM, Paint, pastel, show_numbers

# How many rows and panels are drawn.
_ROWS, _COLUMNS, _PANELS = 16, 8, 8


def draw(place: Sharding, shape: Shape, paint: Paint) -> list[str]:
    """The lines of a drawing."""
    cut = cut_of(place, shape)
    panels = cut.all_panels()
    lines = [f"which device holds which part: {directions(cut)}", *sums(place)]
    for panel in panels[:_PANELS]:
        lines += [panel_title(cut, panel)] if panel else []
        lines += _grid(cut, panel, shape, paint)
    if len(panels) > _PANELS:
        lines.append(f"and {len(panels) - _PANELS} more like these")
    return lines + processes(cut)


def directions(cut: Cut) -> str:
    """The dimensions that are rows and columns of a drawing."""
    drawn = {"down": cut.down, "across": cut.across}
    named = [f"dimension {dim} {name}" for name, dim in drawn.items() if dim is not None]
    return ", ".join(named) or "each device has the whole array"


def sums(place: Sharding) -> list[str]:
    """A note about partial sums, if the array has any."""
    if not (isinstance(place, NamedSharding) and place.spec.unreduced):
        return []
    names = ", ".join(sorted(map(repr, place.spec.unreduced)))
    return [f"partial sums: the values are the sums of the copies over {names}"]


def panel_title(cut: Cut, panel: tuple[Span, ...]) -> str:
    where = zip(cut.panels, panel, strict=True)
    return ", ".join(f"dimension {dim} at {start}:{stop}" for dim, (start, stop) in where)


def processes(cut: Cut) -> list[str]:
    """Which process has which devices, if there are several."""
    of_process: dict[int, list[Any]] = {}
    for device in cut.parts:
        of_process.setdefault(getattr(device, "process_index", 0), []).append(device)
    if len(of_process) == 1:
        return []
    texts = [f"{number} has {show_numbers(of)}" for number, of in sorted(of_process.items())]
    return [f"process {', process '.join(texts)}"]


def _grid(cut: Cut, panel: tuple[Span, ...], shape: Shape, paint: Paint) -> list[str]:
    rows = shortened(cut.along(cut.down), _ROWS)
    columns = shortened(cut.along(cut.across), _COLUMNS)
    parts = [[_part(cut, panel, row, column) for column in columns] for row in rows]
    texts = [[f" {_holders(cut, part)} " for part in line] for line in parts]
    heads = [_head(column, cut.across, shape) for column in columns]
    names = [_head(row, cut.down, shape) for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *texts, strict=True)]
    margin = max(map(len, names))

    def ruled(left: str, middle: str, right: str) -> str:
        return " " * margin + left + middle.join("─" * width for width in widths) + right

    lines = [ruled("┌", "┬", "┐")]
    if cut.across is not None:
        above = " ".join(map(str.center, heads, widths))
        lines.insert(0, paint(f"{' ' * margin} {above}".rstrip(), DIM))
    for i, (name, line) in enumerate(zip(names, parts, strict=True)):
        cells = [
            paint(text.center(width), "" if part is None else pastel(cut.number(part)))
            for text, width, part in zip(texts[i], widths, line, strict=True)
        ]
        lines += [ruled("├", "┼", "┤")] * (i > 0)
        lines.append(f"{paint(name.rjust(margin), DIM)}│{'│'.join(cells)}│")
    return [*lines, ruled("└", "┴", "┘")]


def shortened(spans: list[Any], most: int) -> list[Any]:
    """The spans that are drawn: `...` in place of those in the middle, if there are too many."""
    if len(spans) <= most:
        return spans
    return [*spans[: most - 2], ..., spans[-1]]


def _part(cut: Cut, panel: tuple[Span, ...], row: Any, column: Any) -> Part | None:
    return None if row is ... or column is ... else cut.cell(panel, row, column)


def _holders(cut: Cut, part: Part | None) -> str:
    return "…" if part is None else show_numbers(cut.holders[part])


def _head(span: Any, dim: int | None, shape: Shape) -> str:
    if span is ...:
        return "…"
    return "" if dim is None else f" {show_span(span, shape[dim])} "
