"""Draws FSDP over time, and the choice of a strategy: `python tools/draw_diagrams.py`."""

from pathlib import Path

ASSETS = Path(__file__).resolve().parent.parent / "docs/assets"
_HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" height="{1}" '
    'font-family="sans-serif" font-size="14">\n<rect width="{0}" height="{1}" fill="white"/>\n'
)
_ARROW = (
    '<defs><marker id="end" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0L10 5L0 10z" fill="#616161"/></marker></defs>\n'
)
OWN, GATHERED, GRADIENT = "#3949ab", "#c5cae9", "#1b5e20"


def _text(x: int, y: int, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#212121">{text}</text>\n'


def _bar(x: int, y: int, width: int, height: int, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"/>\n'


# Of each phase: its name, which layer's weights are whole, and whose gradients are there after it.
_PHASES = [
    ("between steps", None, ()),
    ("layer 1", 1, ()),
    ("layer 2", 2, ()),
    ("layer 2, backward", 2, (2,)),
    ("layer 1, backward", 1, (2, 1)),
    ("update", None, (2, 1)),
]
_PHASE, _DEVICE, _QUARTER = 150, 62, 28


def fsdp() -> str:
    """A row for each device. Its quarter of a layer's weights grows to a whole one, and shrinks."""
    drawn = _HEAD.format(80 + _PHASE * len(_PHASES), 360)
    for column, (name, whole, gradients) in enumerate(_PHASES):
        left = 80 + _PHASE * column
        drawn += _text(left + 2 * _QUARTER, 24, name)
        for device in range(4):
            for layer in (1, 2):
                top = 16 + _DEVICE * device + 26 * layer
                if layer == whole:
                    drawn += _bar(left, top, 4 * _QUARTER, 12, GATHERED)
                own = left + _QUARTER * device
                drawn += _bar(own, top, _QUARTER, 12, OWN)
                if layer in gradients:
                    drawn += _bar(own, top + 14, _QUARTER, 6, GRADIENT)
    for device in range(4):
        drawn += _text(8, 64 + _DEVICE * device, f"device {device}", "start")
    legend = [(OWN, "its quarter"), (GATHERED, "gathered"), (GRADIENT, "its quarter of a gradient")]
    for i, (fill, name) in enumerate(legend):
        drawn += _bar(80 + 200 * i, 322, 24, 12, fill) + _text(112 + 200 * i, 333, name, "start")
    return drawn + "</svg>\n"


def _box(x: int, y: int, lines: str, fill: str, stroke: str) -> str:
    said = "".join(_text(x + 110, y + 26 + 18 * i, t) for i, t in enumerate(lines.split("|")))
    return (
        f'<rect x="{x}" y="{y}" width="220" height="60" rx="6" fill="{fill}" stroke="{stroke}"/>\n'
        + said
    )


def _arrow(path: str, x: int, y: int, answer: str) -> str:
    line = f'<path d="{path}" fill="none" stroke="#616161" marker-end="url(#end)"/>\n'
    return line + _text(x, y, answer, "start")


def strategy() -> str:
    asked = [
        "Does it fit|on one device?",
        "Do all devices|together hold it?",
        "A row of the batch|for each device?",
    ]
    chosen = ["Data parallel|replicated()", "More devices,|or host memory", 'FSDP|fsdp("data")']
    drawn = _HEAD.format(760, 300) + _ARROW
    for i, (question, answer) in enumerate(zip(asked, chosen, strict=True)):
        x = 10 + 260 * i
        drawn += _box(x, 20, question, "#e8eaf6", OWN) + _box(x, 130, answer, "#e8f5e9", GRADIENT)
        drawn += _arrow(f"M{x + 110} 80V128", x + 118, 110, "no" if i == 1 else "yes")
    drawn += _box(
        530, 230, 'FSDP and tensor parallel|tensor &amp; fsdp("data")', "#e8f5e9", GRADIENT
    )
    drawn += _arrow("M230 50H268", 238, 44, "no") + _arrow("M490 50H528", 496, 44, "yes")
    return drawn + _arrow("M545 80L510 120V260H528", 484, 230, "no") + "</svg>\n"


PICTURES = {"fsdp.svg": fsdp, "which-strategy.svg": strategy}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ASSETS / name).write_text(draw(), encoding="utf-8")
