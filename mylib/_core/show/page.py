"""`show` and `explain` as pages for notebooks: totals, pictures and a table."""

from collections.abc import Hashable, Sequence

from jax.sharding import Sharding

from ..text import counted, more, show_bytes
from .fold import fold
from .html import Html, page, table, tag
from .meshes import Meshes
from .pictures import device_grids
from .rows import Row, meaning, show_place, sizes

# Columns of sizes.
SIZES = ("bytes", "per device", "received")
# How many paths are listed over a device, and how many pictures are drawn.
_PATHS, _FIGURES = 4, 12


def overview_page(
    notes: Sequence[str],
    below: Sequence[str],
    rows: Sequence[Row],
    header: Sequence[str],
    body: Sequence[Sequence[str]],
    meshes: Meshes,
) -> str:
    """A page with `notes`, the text `below` them, pictures of where `rows` are, and a table."""
    numbers = [i for i, name in enumerate(header) if name in SIZES]
    listed = [table(header, body, numbers=numbers)] if body else []
    text = "\n".join(below).strip("\n")
    first, *others = notes
    return str(
        page(
            tag("p", first, class_="strong"),
            *(tag("p", note, class_="faint") for note in others),
            *([tag("pre", text)] if text else []),
            *_figures(rows, meshes),
            *listed,
        )
    )


def _figures(rows: Sequence[Row], meshes: Meshes) -> list[Html]:
    figures = _mesh_figures(rows, meshes)
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
    groups = fold(rows, _PATHS)
    lines = [f"{label}: {sizes(group)[1]}" for label, group in groups]
    left = len(rows) - sum(len(group) for _, group in groups)
    held = "\n".join([*lines, *more(left, "array")])
    each = show_bytes(sum(row.bytes_per_device for row in rows))
    title = show_place(place) + meshes.suffix(place)
    where = " on each device" if place.num_devices > 1 else ""
    about = f"{counted(len(rows), 'array')}, {each}{where}"
    # Not <figure>, for which sites have rules of their own.
    parts = tag("div", title, class_="strong"), tag("div", about, class_="faint")
    caption = tag("div", *parts, class_="caption")
    grids = device_grids(place, shape, held)
    return tag("div", caption, tag("div", *grids, class_="panels"), class_="figure")
