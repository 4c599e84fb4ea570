"""The candidates of a plan as a picture for notebooks: memory against seconds."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from .._show import html
from .._text import show_bytes

# Pixels: it fits a notebook's cell, with room at the left and below for the labels of the axes.
_WIDTH, _HEIGHT, _LEFT, _BELOW = 640, 320, 64, 36
# How many candidates have their names beside them, and the sizes of a letter and a line.
_NAMED, _OF_LETTER, _OF_LINE = 5, 6, 13


class Dot(NamedTuple):
    """A candidate: its name, memory and seconds, whether it was chosen or rejected."""

    name: str
    memory: float
    seconds: float
    is_chosen: bool
    is_rejected: bool
    reason: str

    @property
    def text(self) -> str:
        return f"{self.name}: {show_bytes(self.memory)}, {_seconds(self.seconds)}; {self.reason}"


def page_of(title: str, text: str, dots: Sequence[Dot], room: float | None) -> str:
    """The picture, with the plan as text below it. `room` is the memory of a device."""
    legend = "memory and time of each candidate; the line joins those that nothing beats in both"
    code = html.tag("details", html.tag("summary", "the plan as text"), html.tag("pre", text))
    parts = [html.tag("p", title, class_="strong"), html.tag("p", legend, class_="faint")]
    return str(html.page(*parts, *([_picture(dots, room)] if dots else []), code))


def front(dots: Sequence[Dot]) -> list[Dot]:
    """Those that no other beats in both memory and seconds, by memory."""
    best, unbeaten = math.inf, list[Dot]()
    for dot in sorted(dots, key=lambda dot: (dot.memory, dot.seconds)):
        if dot.seconds < best:
            best, unbeaten = dot.seconds, [*unbeaten, dot]
    return unbeaten


def _picture(dots: Sequence[Dot], room: float | None) -> html.Html:
    memories = [dot.memory for dot in dots] + ([room] if room else [])
    x = _scale(memories, _LEFT, _WIDTH - 20)
    y = _scale([dot.seconds for dot in dots], _HEIGHT - _BELOW, 20)
    best = front(dots)
    line = " ".join(f"{x(dot.memory):.1f},{y(dot.seconds):.1f}" for dot in best)
    parts = [*_axes(dots, memories, x, y)]
    if room:
        parts += [_line(x(room), 20, x(room), _HEIGHT - _BELOW, stroke_dasharray="4 3")]
        parts += [_label(f"a device has {show_bytes(room)}", x(room) - 4, 16, "end")]
    parts += [html.tag("polyline", points=line, fill="none", stroke="currentColor", opacity=0.5)]
    parts += [_circle(dot, x, y) for dot in sorted(dots, key=lambda dot: dot.is_chosen)]
    # The chosen one comes first, and then the best of the others.
    named = [dot for dot in dots if not dot.is_rejected] or best
    parts += _names(named[:_NAMED], x, y)
    return html.tag(
        "svg", *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", width=_WIDTH, height=_HEIGHT, role="img"
    )


def _names(
    dots: Sequence[Dot], x: Callable[[float], float], y: Callable[[float], float]
) -> Iterator[html.Html]:
    """The names of dots beside them. One that another would hide moves down."""
    placed: list[tuple[float, float, float]] = []
    for dot in sorted(dots, key=lambda dot: y(dot.seconds)):
        width, at, down = _OF_LETTER * len(dot.name), x(dot.memory), y(dot.seconds) + 4
        is_left = at + 9 + width > _WIDTH
        left = at - 9 - width if is_left else at + 9
        for start, stop, other in placed:
            if left < stop and start < left + width:
                down = max(down, other + _OF_LINE)
        placed.append((left, left + width, down))
        yield _label(dot.name, at - 9 if is_left else at + 9, down, "end" if is_left else "start")


def _axes(dots: Sequence[Dot], memories: Sequence[float], x: Any, y: Any) -> Iterator[html.Html]:
    yield _line(_LEFT, _HEIGHT - _BELOW, _WIDTH, _HEIGHT - _BELOW)
    yield _line(_LEFT, 0, _LEFT, _HEIGHT - _BELOW)
    for value in _ticks(memories):
        yield _label(show_bytes(value), x(value), _HEIGHT - _BELOW + 16, "middle")
    for value in _ticks([dot.seconds for dot in dots]):
        yield _label(_seconds(value), _LEFT - 6, y(value) + 4, "end")
    yield _label("memory of a device", _WIDTH, _HEIGHT - 4, "end")


def _circle(dot: Dot, x: Callable[[float], float], y: Callable[[float], float]) -> html.Html:
    colour = "#2b8a3e" if dot.is_chosen else "none" if dot.is_rejected else "#4c8dd6"
    return html.tag(
        "circle", html.tag("title", dot.text), cx=f"{x(dot.memory):.1f}",
        cy=f"{y(dot.seconds):.1f}", r=6 if dot.is_chosen else 4, fill=colour,
        stroke="currentColor", pointer_events="all",
    )  # fmt: skip


def _scale(values: Sequence[float], start: float, stop: float) -> Callable[[float], float]:
    """Logarithmic, as candidates differ by orders of magnitude."""
    # A margin around the dots, wider where their names stand.
    low, high = math.log(min(values) * 0.9), math.log(max(values) * 1.15)
    return lambda value: start + (math.log(value) - low) / (high - low) * (stop - start)


def _ticks(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    # Within 5 % five labels of three digits would hardly differ.
    return [low * (high / low) ** (i / 4) for i in range(5 if high > 1.05 * low else 1)]


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _line(x1: float, y1: float, x2: float, y2: float, **attributes: Any) -> html.Html:
    at = {name: f"{x:.1f}" for name, x in {"x1": x1, "y1": y1, "x2": x2, "y2": y2}.items()}
    return html.tag("line", **at, stroke="currentColor", opacity=0.5, **attributes)


def _label(text: str, x: float, y: float, anchor: str = "start") -> html.Html:
    at = {"x": f"{x:.1f}", "y": f"{y:.1f}"}
    return html.tag("text", text, **at, class_="label", text_anchor=anchor)
