"""The shapes of what a compiled program communicates, which `mylib.audit` doesn't tell."""

import math
import re
from collections import Counter
from typing import Any, NamedTuple

import equinox as eqx

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
# `%name = f32[8,4]{1,0} all-gather(...)`, or a tuple of results where several were combined.
_INSTRUCTION = re.compile(rf" = (?P<result>.+?) (?P<kind>{_KINDS})(?:-start)?\(")
_SHAPE = re.compile(r"([a-z]+)(\d*)\[([\d,]*)\]")
# `%name (parameters) -> result {`, and the computations that an instruction calls.
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\) -> .*\{")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.-]+)|branch_computations=\{(.*?)\}")
_TRIPS = re.compile(r"known_trip_count\W+n\W+(\d+)")


class Collective(NamedTuple):
    kind: str
    shapes: tuple[tuple[int, ...], ...]  # of what one device has afterwards
    nbytes: int


def compiled_text(fun: Any, *args: Any) -> str:
    return eqx.filter_jit(fun).lower(*args).compile().compiled.as_text()


def collectives(text: str) -> list[Collective]:
    found = []
    for line in text.splitlines():
        match = _INSTRUCTION.search(line)
        if match is not None:
            kept = _SHAPE.findall(match["result"])
            shapes = tuple(tuple(int(n) for n in dims.split(",") if n) for *_, dims in kept)
            # A pred is a byte; other types say their bits.
            bits = [int(size or 8) for _, size, _ in kept]
            nbytes = sum(b // 8 * math.prod(shape) for b, shape in zip(bits, shapes, strict=True))
            found.append(Collective(match["kind"], shapes, nbytes))
    return found


def executed(text: str) -> Counter[Collective]:
    """How often each collective runs: those in the body of a loop as often as the loop does."""
    lines: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        match = _COMPUTATION.match(line)
        if match is not None:
            name = match["name"]
            entry = name if match["entry"] else entry
        lines.setdefault(name, []).append(line)

    def run(computation: str) -> Counter[Collective]:
        counts: Counter[Collective] = Counter()
        for line in lines[computation][1:]:
            counts.update(collectives(line))
            times = _trips(line) if " while(" in line else 1
            for one, several in _CALLED.findall(line):
                for called in [one] if one else re.findall(r"[\w.-]+", several):
                    for collective, count in run(called).items():
                        counts[collective] += times * count
        return counts

    return run(entry)


def _trips(line: str) -> int:
    known = _TRIPS.search(line)
    assert known is not None, f"it is unknown how often this loop runs: {line}"
    return int(known[1])


def gathered(text: str) -> tuple[int, int]:
    """How many arrays a device gathers while the program runs, and the bytes that it then has."""
    gathers = {c: n for c, n in executed(text).items() if c.kind == "all-gather"}
    return (
        sum(n * len(c.shapes) for c, n in gathers.items()),
        sum(n * c.nbytes for c, n in gathers.items()),
    )
