"""A schedule as a picture: a row for each mesh, time to the right."""

import math
from collections.abc import Iterator, Sequence

from .._show import html
from ._actions import Action, Pass
from ._simulation import Timed

# In pixels: the shortest action, all of the time, a row, a letter, and the space around.
_STEP, _LONGEST, _ROW, _LETTER, _EDGE = 22, 1000, 26, 6.5, 14
# The top of the rows, under the title and the notes.
_TOP = 62
# How many actions are drawn, as each takes about 200 bytes.
_MOST = 4000
# Light colours under black text. Those of a mesh's later stages are darker.
_HUES = {Pass.FORWARD: 210, Pass.BACKWARD: 310, Pass.WEIGHT: 50}
_LIGHT, _DARKER, _DARKEST = 84, 9, 57
_INK, _FAINT, _PAPER, _IDLE = "#111111", "#555555", "#ffffff", "#e8e8e8"


class _Picture:
    """The boxes to draw, the mesh of each, and the length of a unit of time in pixels."""

    def __init__(self, lines: Sequence[Sequence[Timed]]):
        actions = sorted((timed, mesh) for mesh, line in enumerate(lines) for timed in line)
        self.count, self.drawn = len(actions), actions[:_MOST]
        self.names = [f"mesh {mesh}" for mesh in range(len(lines))]
        self.end = max(end for (_, end, _), _ in self.drawn)
        shortest = min(end - start for (start, end, _), _ in self.drawn)
        self.unit = min(_STEP / shortest, _LONGEST / self.end)
        self.shortest = shortest * self.unit
        self.left = _EDGE + _LETTER * max(map(len, self.names)) + 8

    def at(self, time: float) -> float:
        return self.left + self.unit * time

    def chunk(self, action: Action) -> int:
        """The number of its stage among those of its mesh."""
        return action.stage // len(self.names)


def draw_svg(title: str, notes: str, lines: Sequence[Sequence[Timed]]) -> str:
    """The SVG of a timeline. With too many actions, the first are drawn, and a note reports it."""
    picture = _Picture(lines)
    if len(picture.drawn) < picture.count:
        notes += f"; the first {len(picture.drawn)} of {picture.count} actions"
    bottom = _top(len(lines))
    legend, legend_end = _legend(picture, bottom + 34)
    ends = [picture.at(picture.end) + _LETTER, legend_end]
    ends += [_EDGE + 9 * len(title), _EDGE + _LETTER * len(notes)]
    width, height = _EDGE + max(ends), bottom + 34 + 12 + _EDGE
    return html.tag(
        "svg",
        html.tag("title", title),
        _box(0.5, 0.5, width - 1, height - 1, fill=_PAPER, rx=8),
        _text(title, _EDGE, 26, font_size=14, font_weight="bold"),
        _text(notes, _EDGE, 45, fill=_FAINT),
        *_rows(picture),
        *_actions(picture),
        *_axis(picture, bottom),
        *legend,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=f"{width:g}",
        height=f"{height:g}",
        style="max-width:100%;height:auto",
        font_family="system-ui, sans-serif",
        font_size=11,
        fill=_INK,
        role="img",
    )


def _rows(picture: _Picture) -> Iterator[html.Html]:
    for i, name in enumerate(picture.names):
        yield _text(name, picture.left - 8, _top(i) + _ROW / 2 + 4, text_anchor="end")
        yield _box(picture.left, _top(i) + 2, picture.unit * picture.end, _ROW - 4, fill=_IDLE)


def _actions(picture: _Picture) -> Iterator[html.Html]:
    """A group of boxes for each colour, and their labels: the same for all of them, as much as
    fits.
    """
    groups: dict[str, list[html.Html]] = {}
    texts: list[html.Html] = []
    longest = max(len(str(action.microbatch)) for (_, _, action), _ in picture.drawn)
    letters = (picture.shortest - 2) / _LETTER
    for (start, end, action), mesh in picture.drawn:
        hover = html.tag("title", f"{action}: {start:g} to {end:g}")
        box = (picture.at(start), _top(mesh) + 2, picture.unit * (end - start), _ROW - 4)
        groups.setdefault(_fill(action.kind, picture.chunk(action)), []).append(_box(*box, hover))
        if longest <= letters:
            kind = action.kind if longest + 1 <= letters else ""
            middle = picture.at((start + end) / 2), _top(mesh) + _ROW / 2 + 4
            texts.append(_text(f"{kind}{action.microbatch}", *middle))
    for fill, boxes in groups.items():
        yield html.tag("g", *boxes, fill=fill, stroke=_FAINT, stroke_width=0.5)
    yield html.tag("g", *texts, text_anchor="middle", pointer_events="none")


def _top(mesh: int) -> float:
    return _TOP + _ROW * mesh


def _axis(picture: _Picture, y: float) -> Iterator[html.Html]:
    yield _text("time", picture.left - 8, y + 16, fill=_FAINT, text_anchor="end")
    tick = _tick(48 / picture.unit)
    for i in range(math.floor(picture.end / tick + 1e-9) + 1):
        x = picture.at(i * tick)
        yield _box(x - 0.5, y, 1, 4, _FAINT)
        yield _text(f"{i * tick:g}", x, y + 16, fill=_FAINT, text_anchor="middle")


def _tick(least: float) -> float:
    """The smallest of 1, 2, 5, 10, ... that isn't less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= least * (1 - 1e-9))


def _legend(picture: _Picture, y: float) -> tuple[list[html.Html], float]:
    """The meanings of the colours, and where they end."""
    actions = [action for (_, _, action), _ in picture.drawn]
    kinds = {action.kind for action in actions}
    split = Pass.WEIGHT in kinds
    names = {
        Pass.FORWARD: "forward",
        Pass.BACKWARD: "gradient of the input" if split else "backward",
        Pass.WEIGHT: "gradient of the weights",
    }
    entries = [(_fill(kind, 0), f"{kind}: {names[kind]}") for kind in Pass if kind in kinds]
    if latest := max(map(picture.chunk, actions)):
        entries.append((_fill(Pass.FORWARD, latest), "darker: later stages of a mesh"))
    pieces, x = list[html.Html](), float(_EDGE)
    for fill, name in [*entries, (_IDLE, "idle")]:
        pieces.append(_box(x, y, 12, 12, fill=fill, stroke=_FAINT, stroke_width=0.5))
        pieces.append(_text(name, x + 18, y + 10))
        x += 18 + _LETTER * len(name) + 14
    return pieces, x - 14


def _fill(kind: Pass, chunk: int) -> str:
    return f"hsl({_HUES[kind]},70%,{max(_LIGHT - _DARKER * chunk, _DARKEST)}%)"


def _box(
    x: float, y: float, width: float, height: float, *inside: str, **attributes: object
) -> html.Html:
    size = {"x": f"{x:g}", "y": f"{y:g}", "width": f"{width:g}", "height": f"{height:g}"}
    return html.tag("rect", *inside, **size, **attributes)


def _text(text: str, x: float, y: float, **attributes: object) -> html.Html:
    return html.tag("text", text, x=f"{x:g}", y=f"{y:g}", **attributes)
