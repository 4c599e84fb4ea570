"""Draws, as text, which device holds which part of an array."""

from typing import Any

from jax.sharding import NamedSharding, Sharding

from ..placement import Shape, unreduced_kind
from ..text import more
from .grids import LEFT_OUT, PANELS, Grid, grid_of
from .parts import Partition, partition_of
from .text import DIM, Paint, pastel, show_numbers


def draw(place: Sharding, shape: Shape, paint: Paint) -> list[str]:
    """The lines of a drawing."""
    cut = partition_of(place, shape)
    lines = [f"which device holds which part: {directions(cut)}", *sums(place)]
    for grid in [grid_of(cut, panel, shape) for panel in cut.all_panels()[:PANELS]]:
        lines += [grid.title] if grid.title else []
        lines += _draw_grid(grid, cut, paint)
    return lines + more(len(cut.all_panels()) - PANELS, "grid") + processes(cut)


def directions(cut: Partition) -> str:
    """The dimensions that are rows and columns of a drawing."""
    drawn = {"down": cut.down, "across": cut.across}
    named = [f"dimension {dim} {name}" for name, dim in drawn.items() if dim is not None]
    return ", ".join(named) or "each device has the whole array"


def sums(place: Sharding) -> list[str]:
    """A note about partial sums (or maxima, minima), if the array has any."""
    if not (isinstance(place, NamedSharding) and place.spec.unreduced):
        return []
    names = ", ".join(sorted(map(repr, place.spec.unreduced)))
    kind = _KINDS[unreduced_kind(place.spec) or "sum"]
    return [f"partial {kind}: the values are the {kind} of the copies over {names}"]


_KINDS = {"sum": "sums", "max": "maxima", "min": "minima"}


def processes(cut: Partition) -> list[str]:
    """The devices of each process, if there are several processes."""
    of_process: dict[int, list[Any]] = {}
    for device in cut.parts:
        of_process.setdefault(getattr(device, "process_index", 0), []).append(device)
    if len(of_process) == 1:
        return []
    texts = [f"{number} has {show_numbers(of)}" for number, of in sorted(of_process.items())]
    return [f"process {', process '.join(texts)}"]


def _draw_grid(grid: Grid, cut: Partition, paint: Paint) -> list[str]:
    holders = {None: LEFT_OUT, **{part: show_numbers(of) for part, of in cut.holders.items()}}
    texts = [[f" {holders[part]} " for part in line] for line in grid.cells]
    heads, names = [*map(_framed, grid.columns)], [*map(_framed, grid.rows)]
    widths = [max(map(len, column)) for column in zip(heads, *texts, strict=True)]
    margin = max(map(len, names))

    def ruled(left: str, middle: str, right: str) -> str:
        return " " * margin + left + middle.join("─" * width for width in widths) + right

    lines = [ruled("┌", "┬", "┐")]
    if cut.across is not None:
        above = " ".join(map(str.center, heads, widths))
        lines.insert(0, paint(f"{' ' * margin} {above}".rstrip(), DIM))
    for i, (name, line) in enumerate(zip(names, grid.cells, strict=True)):
        cells = [
            paint(text.center(width), "" if part is None else pastel(cut.numbers[part]))
            for text, width, part in zip(texts[i], widths, line, strict=True)
        ]
        lines += [ruled("├", "┼", "┤")] * (i > 0)
        lines.append(f"{paint(name.rjust(margin), DIM)}│{'│'.join(cells)}│")
    return [*lines, ruled("└", "┴", "┘")]


def _framed(name: str) -> str:
    return name if name in ("", LEFT_OUT) else f" {name} "
