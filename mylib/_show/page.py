"""`show` and `explain` as pages for notebooks: totals, pictures and a table."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from jax.sharding import Sharding

from .._text import counted, more, show_bytes
from .drawing import directions, processes, sums
from .fold import fold
from .html import Html, page, table, tag
from .loads import load_groups
from .meshes import Meshes
from .parts import partition_of
from .pictures import array_grids, bar, device_grids
from .rows import Row, meaning, show_place, sizes
from .text import show_devices

# Columns of sizes.
SIZES = ("bytes", "per device", "received")
# How many paths are listed over a device, and how many pictures and loads are drawn.
_PATHS, _FIGURES, _LOADS = 6, 12, 12
# With more devices than this, fewer paths are listed, because each device lists them.
_LARGE = 64


def overview_page(
    notes: Sequence[str],
    rows: Sequence[Row],
    header: Sequence[str],
    body: Sequence[Sequence[str]],
    loads: Mapping[Any, int],
    meshes: Meshes,
) -> str:
    """A page with `notes`, pictures of where `rows` are, `loads` as bars, and a table."""
    numbers = [i for i, name in enumerate(header) if name in SIZES]
    hover = [f"{cells[0]}\n{', '.join(cells[i] for i in numbers if cells[i])}" for cells in body]
    listed = [table(header, body, numbers=numbers, hover=hover)] if body else []
    first, *others = notes
    return str(
        page(
            tag("p", first, class_="strong"),
            *(tag("p", note, class_="faint") for note in others),
            *_figures(rows, meshes),
            *_loads(loads),
            *listed,
        )
    )


def _figures(rows: Sequence[Row], meshes: Meshes) -> list[Html]:
    figures = [*_array_figure(rows), *_mesh_figures(rows, meshes)]
    pictures = [tag("div", *figures, class_="figures")] if figures else []
    if any(row.devices > 1 for row in rows):
        legend = "devices that hold the same part of an array have the same colour"
        pictures.append(tag("p", legend, class_="faint"))
    return pictures


def _mesh_figures(rows: Sequence[Row], meshes: Meshes) -> list[Html]:
    """The devices of each distinct sharding, that of most bytes first."""
    groups: dict[Hashable, tuple[Sharding, list[Row]]] = {}
    for row in rows:
        if (place := row.drawn_at) is not None:
            groups.setdefault(meaning(place), (place, []))[1].append(row)
    ordered = sorted(groups.values(), key=lambda group: -sum(row.nbytes for row in group[1]))
    figures = [_mesh_figure(place, of, meshes) for place, of in ordered[:_FIGURES]]
    return figures + [tag("p", text) for text in more(len(ordered) - _FIGURES, "sharding")]


def _mesh_figure(place: Sharding, rows: Sequence[Row], meshes: Meshes) -> Html:
    # From the largest array: others may have a dimension of size 0.
    shape = max(rows, key=lambda row: row.nbytes).leaf.shape
    shown = _PATHS if place.num_devices <= _LARGE else 3
    groups = fold(rows, shown)
    lines = [f"{label}: {sizes(group)[1]}" for label, group in groups]
    left = len(rows) - sum(len(group) for _, group in groups)
    held = "\n".join([*lines, *more(left, "array")])
    each = show_bytes(sum(row.bytes_per_device for row in rows))
    title = show_place(place) + meshes.suffix(place)
    where = " on each device" if place.num_devices > 1 else ""
    about = f"{counted(len(rows), 'array')}, {each}{where}"
    return _figure(title, [about], device_grids(place, shape, held))


def _array_figure(rows: Sequence[Row]) -> list[Html]:
    """The parts of a single array, and the devices that hold them."""
    place = place_of_single(rows)
    if place is None:
        return []
    shape, nbytes = rows[0].leaf.shape, rows[0].bytes_per_device
    cut = partition_of(place, shape)
    notes = [directions(cut), *sums(place), *processes(cut)]
    return [_figure("Which device holds which part", notes, array_grids(place, shape, nbytes))]


def _figure(title: str, notes: Sequence[str], grids: Sequence[Html]) -> Html:
    # Not <figure>, for which sites have rules of their own.
    about = [tag("div", note, class_="faint") for note in notes]
    caption = tag("div", tag("div", title, class_="strong"), *about, class_="caption")
    return tag("div", caption, tag("div", *grids, class_="panels"), class_="figure")


def place_of_single(rows: Sequence[Row]) -> Sharding | None:
    """The place of an array that is the whole tree, if it can be drawn."""
    return rows[0].drawn_at if len(rows) == 1 and not rows[0].path else None


def _loads(loads: Mapping[Any, int]) -> list[Html]:
    groups = load_groups(loads)
    if not groups:
        return []
    most = groups[0][0]
    body = [
        (show_devices(devices), show_bytes(nbytes), bar(nbytes / most, show_bytes(nbytes)))
        for nbytes, devices in groups[:_LOADS]
    ]
    return [table(("devices", "bytes each", ""), body, numbers=[1])]
