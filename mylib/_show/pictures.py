"""Pictures of meshes, of arrays and of sizes, as SVG."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import NamedSharding, Sharding

from .._placement import AnyMesh, Bounds, Shape, devices_of
from .._text import show_bytes
from .grids import LEFT_OUT, PANELS, ROWS, Grid, grids_of, more, shortened
from .html import Html, joined, tag
from .parts import partition_of, show_part
from .text import number_of, show_device, show_devices, show_numbers

# How many columns of a mesh are drawn; and of a mesh of one axis, how many devices a line.
_COLUMNS, _LINE = 16, 8
# This many colours can be told from each other by their hue.
_HUES = 12
_WIDTH, _HEIGHT, _LETTER = 30, 26, 6.5


class Cell(NamedTuple):
    """A cell of a grid: its text, the text over it, and its colour."""

    text: str
    hover: str
    fill: str


def draw_grid(grid: Grid[Cell]) -> Html:
    """A grid as SVG."""
    texts = [cell.text for line in grid.cells for cell in line if cell is not None]
    width = max(_WIDTH, *(_LETTER * len(text) + 6 for text in [*grid.columns, *texts]))
    left = max((_LETTER * len(name) + 8 for name in grid.rows if name), default=1)
    top = 18 if any(grid.columns) else 1
    x, y = left + width * len(grid.columns) + 1, top + _HEIGHT * len(grid.rows) + 1
    heads = [
        _text(name, left + width * (i + 0.5), 12, "label", "middle")
        for i, name in enumerate(grid.columns)
    ]
    heads += [
        _text(name, left - 6, top + _HEIGHT * (i + 0.5) + 4, "label", "end")
        for i, name in enumerate(grid.rows)
    ]
    cells = [
        _draw_cell(cell, left + width * j, top + _HEIGHT * i, width)
        for i, line in enumerate(grid.cells)
        for j, cell in enumerate(line)
    ]
    picture = tag(
        "svg", *heads, *cells, viewBox=f"0 0 {x:g} {y:g}", width=f"{x:g}", height=f"{y:g}",
        role="img",
    )  # fmt: skip
    return tag("div", tag("div", grid.title, class_="faint"), picture) if grid.title else picture


def _draw_cell(cell: Cell | None, x: float, y: float, width: float) -> Html:
    if cell is None:
        return _text(LEFT_OUT, x + width / 2, y + _HEIGHT / 2 + 4, "label", "middle")
    box = tag(
        "rect", tag("title", cell.hover), x=f"{x:g}", y=f"{y:g}", width=f"{width:g}",
        height=_HEIGHT, fill=cell.fill,
    )  # fmt: skip
    return joined([box, _text(cell.text, x + width / 2, y + _HEIGHT / 2 + 4, "name", "middle")])


def _text(text: str, x: float, y: float, class_: str, anchor: str) -> Html:
    return tag("text", text, x=f"{x:g}", y=f"{y:g}", class_=class_, text_anchor=anchor)


def fill_of(number: int, parts: int) -> str:
    """A light colour, on which text is black. Neighbours among many parts differ in lightness."""
    lightness = 72 if parts > _HUES and number % 2 else 82
    return f"hsl({(210 + 300 * number // parts) % 360},70%,{lightness}%)"


def bar(share: float, hover: str) -> Html:
    """A bar that is filled to a share."""
    return stacked([share], hover)


def stacked(shares: Sequence[float], hover: str) -> Html:
    """A bar of several shares, one after the other."""
    starts = itertools.accumulate(shares, initial=0.0)
    filled = [
        tag(
            "rect", tag("title", hover), x=f"{160 * start:.4g}", y=0,
            fill=fill_of(i, len(shares)), width=f"{160 * share:.4g}", height=12,
        )
        for i, (start, share) in enumerate(zip(starts, shares, strict=False))
    ]  # fmt: skip
    track = tag("rect", x=0, y=0, width=160, height=12, class_="track")
    return tag("svg", track, *filled, viewBox="0 0 160 12", width=160, height=12, role="img")


def device_grids(place: Sharding, shape: Shape, held: str) -> list[Html]:
    """The devices of a sharding as its mesh arranges them. Those that hold the same part of an
    array of this shape have the same colour. `held` says what they hold.
    """
    cut = partition_of(place, shape)

    def cell(device: Any) -> Cell:
        number, process = cut.numbers[cut.parts[device]], getattr(device, "process_index", 0)
        where = f"{show_device(device)}, process {process}"
        what = f"{where}\npart {number + 1} of {len(cut.holders)} of each array\n{held}"
        return Cell(str(number_of(device)), what, fill_of(number, len(cut.holders)))

    names = place.mesh.axis_names if isinstance(place, NamedSharding) else ()
    if isinstance(place, NamedSharding) and len(names) > 1:
        panels = math.prod(place.mesh.axis_sizes[:-2])
        return _drawn(_mesh_grids(place.mesh, cell), panels)
    title = "".join(f"{name} →" for name in names)
    devices = list(cut.parts)
    lines = [devices[i : i + _LINE] for i in range(0, len(devices), _LINE)]
    cells = [[None] if line is ... else [*map(cell, line)] for line in shortened(lines, ROWS)]
    return [draw_grid(Grid(title, [""] * len(cells), [""] * len(cells[0]), cells))]


def _drawn(grids: Sequence[Grid[Cell]], count: int) -> list[Html]:
    """The first grids as SVG, and how many of them are not drawn."""
    return [*map(draw_grid, grids), *(tag("p", line, class_="faint") for line in more(count))]


def _mesh_grids(mesh: AnyMesh, cell: Callable[[Any], Cell]) -> list[Grid[Cell]]:
    """The first grids of a mesh of several axes. Its last two axes are rows and columns."""
    *outer, (down, height), (across, width) = mesh.shape.items()
    panels = list(itertools.product(*(range(size) for _, size in outer)))
    devices = np.array(devices_of(mesh), object).reshape(len(panels), height, width)
    rows, columns = shortened(range(height), ROWS), shortened(range(width), _COLUMNS)
    grids = list[Grid[Cell]]()
    for panel, at in zip(panels[:PANELS], devices, strict=False):
        cells = [[None if ... in (i, j) else cell(at[i, j]) for j in columns] for i in rows]
        names = [f"{name}={i}" for (name, _), i in zip(outer, panel, strict=True)]
        title = ", ".join([*names, f"{down} ↓ {across} →"])
        grids.append(Grid(title, [""] * len(rows), [""] * len(columns), cells))
    return grids


def array_grids(place: Sharding, shape: Shape, nbytes: int) -> list[Html]:
    """The parts of an array, with the devices that hold them."""
    cut = partition_of(place, shape)

    def cell(part: Bounds) -> Cell:
        holders = cut.holders[part]
        hover = f"array{show_part(part, shape)}\n{show_bytes(nbytes)} on {show_devices(holders)}"
        return Cell(show_numbers(holders), hover, fill_of(cut.numbers[part], len(cut.holders)))

    grids = [grid.map(cell) for grid in grids_of(cut, shape)]
    return _drawn(grids, len(cut.all_panels()))
