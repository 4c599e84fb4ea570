"""Pictures of meshes, of arrays and of sizes, as SVG."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import NamedSharding, Sharding

from ..placement import AnyMesh, Shape, devices_of
from ..text import more
from .grids import LEFT_OUT, PANELS, ROWS, shortened
from .html import Html, joined, tag
from .parts import partition_of
from .text import number_of, show_device

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


Cells = Sequence[Sequence[Cell | None]]
"""Rows of cells. Those that are left out are None."""


def draw_grid(title: str, cells: Cells) -> Html:
    """A grid as SVG."""
    texts = [cell.text for line in cells for cell in line if cell is not None]
    width = max(_WIDTH, *(_LETTER * len(text) + 6 for text in texts))
    x, y = width * len(cells[0]) + 2, _HEIGHT * len(cells) + 2
    drawn = [
        _draw_cell(cell, 1 + width * j, 1 + _HEIGHT * i, width)
        for i, line in enumerate(cells)
        for j, cell in enumerate(line)
    ]
    picture = tag(
        "svg", *drawn, viewBox=f"0 0 {x:g} {y:g}", width=f"{x:g}", height=f"{y:g}", role="img"
    )
    return tag("div", tag("div", title, class_="faint"), picture) if title else picture


def _draw_cell(cell: Cell | None, x: float, y: float, width: float) -> Html:
    if cell is None:
        return _text(LEFT_OUT, x + width / 2, y, "label")
    box = tag(
        "rect", tag("title", cell.hover), x=f"{x:g}", y=f"{y:g}", width=f"{width:g}",
        height=_HEIGHT, fill=cell.fill,
    )  # fmt: skip
    return joined([box, _text(cell.text, x + width / 2, y, "name")])


def _text(text: str, x: float, top: float, class_: str) -> Html:
    middle = f"{top + _HEIGHT / 2 + 4:g}"
    return tag("text", text, x=f"{x:g}", y=middle, class_=class_, text_anchor="middle")


def fill_of(number: int, parts: int) -> str:
    """A light colour, on which text is black. Neighbours among many parts differ in lightness."""
    lightness = 72 if parts > _HUES and number % 2 else 82
    return f"hsl({(210 + 300 * number // parts) % 360},70%,{lightness}%)"


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
        return _mesh_grids(place.mesh, cell)
    title = "".join(f"{name} →" for name in names)
    devices = list(cut.parts)
    lines = [devices[i : i + _LINE] for i in range(0, len(devices), _LINE)]
    cells = [[None] if line is ... else [*map(cell, line)] for line in shortened(lines, ROWS)]
    return [draw_grid(title, cells)]


def _mesh_grids(mesh: AnyMesh, cell: Callable[[Any], Cell]) -> list[Html]:
    """The first grids of a mesh of several axes, whose last two are rows and columns, and how many
    grids are not drawn.
    """
    *outer, (down, height), (across, width) = mesh.shape.items()
    panels = list(itertools.product(*(range(size) for _, size in outer)))
    devices = np.array(devices_of(mesh), object).reshape(len(panels), height, width)
    rows, columns = shortened(range(height), ROWS), shortened(range(width), _COLUMNS)
    grids: list[Html] = []
    for panel, at in zip(panels[:PANELS], devices, strict=False):
        cells = [[None if ... in (i, j) else cell(at[i, j]) for j in columns] for i in rows]
        names = [f"{name}={i}" for (name, _), i in zip(outer, panel, strict=True)]
        grids.append(draw_grid(", ".join([*names, f"{down} ↓ {across} →"]), cells))
    return [
        *grids,
        *(tag("p", line, class_="faint") for line in more(len(panels) - PANELS, "grid")),
    ]
