"""Reads the errors of the TPU's compiler for programs that don't fit."""

import re
from collections.abc import Iterator, Sequence

from ..._core.lines import spot
from .fit import Alive, Argument, Fit, OutOfMemoryError, largest
from .sheets import GiB


def out_of_memory(error: Exception, arguments: Sequence[Argument]) -> OutOfMemoryError | None:
    """A readable form of the compiler's error, or None if it is another error."""
    text = str(error)
    match = next(filter(None, (pattern.search(text) for pattern in _EXCEEDED)), None)
    if "RESOURCE_EXHAUSTED" not in text or match is None:
        return None
    *needed, available = (int(float(x[:-1]) * _UNITS[x[-1]]) for x in match.groups())
    return OutOfMemoryError(
        Fit(
            sum(needed),
            available,
            largest(arguments),
            arguments=sum(x.nbytes for x in arguments),
            temporaries=tuple(sorted(_listed(text), key=lambda x: -x.bytes)),
        )
    )


# https://openxla.org/xla/errors/error_1000. The first is written before the program is divided into
# operations: what it calls temporaries contains arguments and results.
_SIZE = r"([\d.]+[KMGT])"
_EXCEEDED = (
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
    re.compile(rf"Hbm usage: {_SIZE}, SparseCore Hbm usage:? {_SIZE}, exceeding.*: {_SIZE}"),
)
_UNITS = {"K": 2**10, "M": 2**20, "G": GiB, "T": 2**40}


def _listed(text: str) -> Iterator[Alive]:
    """The temporaries among the "largest program allocations" that the error lists."""
    _, _, listed = text.partition("Largest program allocations in hbm:")
    for entry in listed.split("====="):
        size = re.search(rf"Size: {_SIZE}", entry)
        shape = re.search(r"Shape: (\w+)\[([\d,]*)\]", entry)
        if "Allocation type: HLO temp" in entry and size is not None and shape is not None:
            name = re.search(r'op_name="([^"]*)"', entry)
            line = re.search(r'source_file="([^"]*)" source_line=(\d+)', entry)
            yield Alive(
                int(float(size[1][:-1]) * _UNITS[size[1][-1]]),
                1,
                shape[1],
                tuple(int(n) for n in shape[2].split(",") if n),
                re.split(r"[/\[]", name[1].partition("[")[0])[-1] if name else "",
                spot(line[1], line[2]) if line else "",
            )
