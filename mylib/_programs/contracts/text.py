"""Sizes that are given, and texts of faults."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..._core.text import show_bytes
from ..audit import Collective, Report, axis_of, folded_names, what_of

Axes = str | Sequence[str]
Size = int | str


def names_of(axes: Axes) -> tuple[str, ...]:
    return tuple(sorted((axes,) if isinstance(axes, str) else axes))


def over(c: Collective) -> tuple[str, ...]:
    return tuple(sorted(c.axes or ("?",)))


@dataclass(frozen=True)
class Violation:
    """What is wrong with some leaves; `leaves` may be other names of what is at fault."""

    leaves: tuple[str, ...]
    text: str


def lines(faults: Iterable[Violation]) -> list[str]:
    """Sentences that name the leaves first. Faults that differ only in these are one."""
    alike: dict[str, list[str]] = {}
    for fault in faults:
        alike.setdefault(fault.text, []).extend(fault.leaves)
    return [f"{folded_names(leaves)}: {text}" if leaves else text for text, leaves in alike.items()]


def moved_by(c: Collective, leaves: Sequence[str] = ()) -> tuple[str, ...]:
    """The names of what a collective moves."""
    if leaves or c.arrays:
        return tuple(leaves or c.arrays)
    return tuple(f"gradient of {path}" for path in c.gradients) or (what_of([c]),)


def text_of(c: Collective) -> str:
    """A collective, without what it moves."""
    at = f" at {c.source}" if c.source else ""
    loop = " in a loop" if c.loops else ""
    return f"{c.kind} over {', '.join(over(c))}{at}{loop}: {show_bytes(c.bytes)}"


def including(report: Report, kind: str | None, axes: Axes | None) -> list[Collective]:
    """The collectives of a kind that go over all of these axes, or parts of them."""
    report.among(kind, axes)  # names that don't exist are an error
    names = set(() if axes is None else names_of(axes))
    return [c for c in report.among(kind) if names <= set(map(axis_of, c.axes or names))]


_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def bytes_in(size: Size) -> int:
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"([\d.]+) ?([kKMG]?i?B)", size)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{size!r} is not a size: write '64 MiB', or a number of bytes")
    return round(float(match[1]) * _UNITS[match[2]])
