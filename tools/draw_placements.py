"""Draws what each device holds under the placements of the first page, docs/getting-started.md
and docs/rules.md: `python tools/draw_placements.py` writes docs/assets/placement-*.svg.

What is drawn is what JAX says of the shardings, over eight simulated devices.
"""

import math
import os
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import jax
from jax.sharding import NamedSharding, PartitionSpec as P

import mylib

_FOLDER = Path(__file__).resolve().parent.parent / "docs/assets"
_LABELS, _COLUMN, _HEAD, _GAP = 200, 68, 46, 22

# A background of its own: the picture is legible whatever the page's colours are.
_STYLE = """
.page{fill:#fff}.text{fill:#222}.small{fill:#666;font-size:11px}
.whole{fill:none;stroke:#999;stroke-dasharray:3 3}.part{fill:#3f51b5}.gathered{fill:#9fa8da}
.host{fill:none;stroke:#666}
@media (prefers-color-scheme:dark){.page{fill:#1e2129}.text{fill:#e4e4e8}.small{fill:#a0a3ad}
.whole{stroke:#777}.part{fill:#8c9eff}.gathered{fill:#4a548c}.host{stroke:#999}}
"""


class Row(NamedTuple):
    """An array, as wide and high as it is drawn, and how it is sharded."""

    name: str
    note: str
    width: int
    height: int
    spec: P
    kind: str = "part"  # or "gathered": only there for a while


class Picture(NamedTuple):
    name: str
    title: str
    axes: dict[str, int]
    rows: list[Row]
    hosts: int = 0


_BATCH = Row("batch", 'P("data"): its rows', 40, 64, P("data"))

PICTURES = [
    Picture(
        "model",
        "The arrays of the script on four devices",
        {"data": 4},
        [
            Row("model.layers[1].weight", 'P("data"), kept so', 48, 48, P("data")),
            Row("Adam's moments of it", "as the weight", 48, 48, P("data")),
            Row("model.layers[1].bias", "P(): small, a copy", 48, 10, P()),
            Row("x, the batch", 'P("data"): its rows', 40, 48, P("data")),
            Row("while a layer computes", "gathered, then freed", 48, 48, P(), "gathered"),
        ],
    ),
    Picture(
        "data-parallel",
        "Data parallel: each device has some of the rows, and a copy of each weight",
        {"data": 8},
        [_BATCH, Row("a weight", "P(): a copy", 48, 48, P())],
    ),
    Picture(
        "fsdp",
        "FSDP: each device keeps an eighth of each weight",
        {"data": 8},
        [
            _BATCH,
            Row("a weight, kept", 'P("data")', 48, 48, P("data")),
            Row("while its layer computes", "gathered, then freed", 48, 48, P(), "gathered"),
        ],
    ),
    Picture(
        "tensor-parallel",
        'Tensor parallel, and FSDP, on a mesh "data" x "model" of 4 x 2 devices',
        {"data": 4, "model": 2},
        [
            _BATCH,
            Row("first weight, used", 'P("model"): its outputs', 48, 48, P("model")),
            Row("second weight, used", 'P(None, "model"): inputs', 48, 48, P(None, "model")),
            Row("first weight, kept", 'P("model", "data")', 48, 48, P("model", "data")),
        ],
    ),
    Picture(
        "hosts",
        "Two processes: each reads the rows of its own devices",
        {"data": 8},
        [_BATCH, Row("a weight, kept", 'P("data")', 48, 48, P("data"))],
        hosts=2,
    ),
]


def draw(picture: Picture) -> str:
    count = math.prod(picture.axes.values())
    mesh = mylib.make_mesh(**picture.axes, devices=jax.devices()[:count])
    devices = list(mesh.devices.flat)
    top, parts = 40 + (20 if picture.hosts else 0), []
    parts += [_text(picture.title, 16, 24, "text", bold=True)]
    parts += [_text(f"device {i}", _left(i), top + 20, "small") for i in range(len(devices))]
    y = top + _HEAD - 8
    for row in picture.rows:
        parts += [_text(row.name, 16, y + row.height / 2 - 2, "text")]
        parts += [_text(row.note, 16, y + row.height / 2 + 14, "small")]
        held = NamedSharding(mesh, row.spec).devices_indices_map((row.height, row.width))
        for i, device in enumerate(devices):
            parts += [_array(row, held[device], _left(i), y)]
        y += row.height + _GAP
    parts += _hosts(picture.hosts, len(devices), top, y - 8)
    width, height = _left(len(devices)) + 8, y
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">',
            f"<title>{escape(picture.title)}</title>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _array(row: Row, held: tuple[slice, ...], x: float, y: float) -> str:
    (top, bottom), (left, right) = (
        s.indices(n)[:2] for s, n in zip(held, (row.height, row.width), strict=True)
    )
    return (
        f'<rect class="{row.kind}" x="{x + left}" y="{y + top}" '
        f'width="{right - left}" height="{bottom - top}"/>'
        f'<rect class="whole" x="{x}" y="{y}" width="{row.width}" height="{row.height}"/>'
    )


def _hosts(hosts: int, devices: int, top: float, bottom: float) -> list[str]:
    each = devices // hosts if hosts else 0
    return [
        f'<rect class="host" x="{_left(i * each) - 8}" y="{top - 8}" '
        f'width="{each * _COLUMN - 8}" height="{bottom - top + 8}" rx="6"/>'
        + _text(f"process {i}", _left(i * each), top - 14, "small")
        for i in range(hosts)
    ]


def _text(text: str, x: float, y: float, class_: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text class="{class_}" x="{x}" y="{y}"{weight}>{escape(text)}</text>'


def _left(device: int) -> int:
    return _LABELS + device * _COLUMN


def main() -> None:
    for picture in PICTURES:
        path = _FOLDER / f"placement-{picture.name}.svg"
        path.write_text(draw(picture), encoding="utf-8")


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_num_cpu_devices", 8)
    main()
