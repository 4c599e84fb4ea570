"""The candidates of a plan as a picture for notebooks: memory against seconds."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..._core.show import html
from ..._core.text import show_bytes, show_time
from .candidate import Candidate

# Pixels: it fits a notebook's cell, with room around for labels.
_WIDTH, _HEIGHT, _LEFT, _BELOW, _ABOVE = 640, 320, 64, 36, 32
# How many candidates have their names at their dots, and the sizes of a letter, a line and a dot.
_NAMED, _LETTER, _LINE, _DOT = 5, 6, 13, 9
_BYTES = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}
# The first digits of ticks, and those where there would be fewer than three.
_DIGITS = (1, 2, 5), range(1, 10), [n / 10 for n in range(10, 100)]


class Dot(NamedTuple):
    """A candidate whose figures are known."""

    memory: float
    seconds: float
    candidate: Candidate
    is_chosen: bool


def page_of(
    text: str, candidates: Sequence[Candidate], chosen: Candidate, limit: float | None
) -> str:
    """The picture, with the plan as text below it. `limit` is what each device may hold."""
    legend = "memory and time of each candidate: the green one is chosen, hollow ones don't fit"
    code = html.tag("details", html.tag("summary", "the plan as text"), html.tag("pre", text))
    title, *_ = text.splitlines()
    parts = [html.tag("p", title, class_="strong"), html.tag("p", legend, class_="faint")]
    dots = [Dot(x.memory, x.seconds, x, x is chosen) for x in candidates if x.memory and x.seconds]
    return str(html.page(*parts, *([_picture(dots, limit)] if dots else []), code))


class Axis:
    """A logarithmic axis, as candidates differ by orders of magnitude, from one pixel to another.
    Around the values is a margin.
    """

    def __init__(self, values: Sequence[float], start: float, stop: float):
        self.low, self.high = min(values) * 0.9, max(values) * 1.15
        self._start, self._size = start, (stop - start) / math.log(self.high / self.low)

    def at(self, value: float) -> float:
        return self._start + math.log(value / self.low) * self._size

    def ticks(self, units: Mapping[str, float]) -> list[tuple[float, str]]:
        """Round values, and their texts."""
        found: list[tuple[float, str]] = []
        for digits in _DIGITS:
            numbers = [digit * 10**i for i in range(3) for digit in digits]
            found = [
                (number * unit, f"{number:g} {name}")
                for name, unit in units.items()
                for number in numbers
                if self.low <= number * unit <= self.high
            ]
            if len(found) >= 3:
                break
        return found


def _picture(dots: Sequence[Dot], limit: float | None) -> html.Html:
    memories = [dot.memory for dot in dots] + ([limit] if limit else [])
    x = Axis(memories, _LEFT, _WIDTH - 20)
    y = Axis([dot.seconds for dot in dots], _HEIGHT - _BELOW, _ABOVE)
    parts = [*_axes(x, y)]
    if limit:
        at = x.at(limit)
        parts += [_line(at, _ABOVE, at, _HEIGHT - _BELOW, stroke_dasharray="4 3")]
        parts += [_label(f"a step may take {show_bytes(limit)}", at, _ABOVE - 6, "middle")]
    parts += [_circle(dot, x, y) for dot in sorted(dots, key=lambda dot: dot.is_chosen)]
    parts += _names(dots, x, y)
    return html.tag(
        "svg", *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", width=_WIDTH, height=_HEIGHT, role="img"
    )


def _names(dots: Sequence[Dot], x: Axis, y: Axis) -> Iterator[html.Html]:
    """The names of the chosen one and of the best others, each where it hides least."""
    taken = [_box(x.at(dot.memory), y.at(dot.seconds) + 4, "middle", 8) for dot in dots]
    for dot in [dot for dot in dots if not dot.candidate.why][:_NAMED]:
        name, at, down = dot.candidate.name, x.at(dot.memory), y.at(dot.seconds) + 4
        spots = [(at + _DOT, down, "start"), (at - _DOT, down, "end")]
        spots += [(at, down + up, "middle") for up in (-_LINE, _LINE + 3)]
        boxes = [_box(*spot, _LETTER * len(name)) for spot in spots]
        hidden = [sum(_hides(box, other) for other in [*taken, _OUTSIDE]) for box in boxes]
        best = hidden.index(min(hidden))
        taken.append(boxes[best])
        yield _label(name, *spots[best])


# Left, right, top, bottom.
_Box = tuple[float, float, float, float]
_OUTSIDE = _WIDTH, math.inf, 0, _HEIGHT


def _box(x: float, y: float, anchor: str, width: float) -> _Box:
    """Of a text: `y` is its base line."""
    left = x - {"start": 0, "middle": width / 2, "end": width}[anchor]
    return left, left + width, y - _LINE + 3, y + 3


def _hides(one: _Box, other: _Box) -> bool:
    is_beside = one[1] <= other[0] or other[1] <= one[0]
    return not (is_beside or one[3] <= other[2] or other[3] <= one[2])


def _axes(x: Axis, y: Axis) -> Iterator[html.Html]:
    bottom = _HEIGHT - _BELOW
    yield _line(_LEFT, bottom, _WIDTH, bottom)
    yield _line(_LEFT, _ABOVE - 12, _LEFT, bottom)
    for value, text in x.ticks(_BYTES):
        yield _line(x.at(value), bottom, x.at(value), bottom + 4)
        yield _label(text, x.at(value), bottom + 16, "middle")
    for value, text in y.ticks(_SECONDS):
        yield _line(_LEFT - 4, y.at(value), _LEFT, y.at(value))
        yield _label(text, _LEFT - 7, y.at(value) + 4, "end")
    yield _label("memory of each device", _WIDTH, _HEIGHT - 4, "end")
    yield _label("time of a call", 4, 12, "start")


def _circle(dot: Dot, x: Axis, y: Axis) -> html.Html:
    one = dot.candidate
    text = f"{one.name}: {show_bytes(dot.memory)}, {show_time(dot.seconds)}; {one.reason}"
    return html.tag(
        "circle", html.tag("title", text), cx=f"{x.at(dot.memory):.1f}",
        cy=f"{y.at(dot.seconds):.1f}", r=6 if dot.is_chosen else 4,
        fill="#2b8a3e" if dot.is_chosen else "none" if one.why else "#4c8dd6",
        stroke="currentColor", pointer_events="all",
    )  # fmt: skip


def _line(x1: float, y1: float, x2: float, y2: float, **attributes: str) -> html.Html:
    at = {name: f"{x:.1f}" for name, x in {"x1": x1, "y1": y1, "x2": x2, "y2": y2}.items()}
    return html.tag("line", **at, stroke="currentColor", opacity=0.5, **attributes)


def _label(text: str, x: float, y: float, anchor: str) -> html.Html:
    return html.tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", class_="label", text_anchor=anchor)
