"""The largest arrays that a program computes, before it is compiled."""

import math
import re
from collections.abc import Iterator
from typing import Any

import jax

from .._compat import names
from .._lines import spot
from ._fit import Alive

_TENSOR = re.compile(r"tensor<((?:\d+x)+)(complex<)?([a-z]+(\d+)\w*)>?>")
_LINE = re.compile(r'"([^"]+)":(\d+):')
_SHOWN = 5


def computed(lowered: jax.stages.Lowered) -> tuple[Alive, ...]:
    """The largest arrays, one of each shape and dtype, with their bytes on all devices together:
    how they are divided is not known before the program is compiled.
    """
    largest: dict[tuple[str, tuple[int, ...]], Alive] = {}
    for array in _arrays(lowered):
        key = array.dtype, array.shape
        # Inner functions are printed without lines.
        if key not in largest or (array.source and not largest[key].source):
            largest[key] = array
    return tuple(sorted(largest.values(), key=lambda x: -x.bytes)[:_SHOWN])


def _arrays(lowered: jax.stages.Lowered) -> Iterator[Alive]:
    module: Any = lowered.compiler_ir("stablehlo")
    for operation in _operations(module.operation):
        if operation.name in names.MLIR_FILLED:  # the compiler joins them with what uses them
            continue
        for result in operation.results:
            match = _TENSOR.fullmatch(str(result.type))
            if match is not None:
                shape = tuple(int(n) for n in match[1].split("x") if n)
                bits = max(8, int(match[4])) * (2 if match[2] else 1)
                size = math.prod(shape) * bits // 8
                yield Alive(size, 1, match[3], shape, *_origin(operation))


def _operations(around: Any) -> Iterator[Any]:
    for region in around.regions:
        for block in region.blocks:
            for operation in block.operations:
                yield operation
                yield from _operations(operation)


def _origin(operation: Any) -> tuple[str, str]:
    """The primitive and the innermost line."""
    location = str(operation.location)
    name = re.match(r'loc\("([^"]*)"', location)
    line = _LINE.search(location)
    primitive = name[1].split("/")[-1] if name else ""
    return primitive, spot(line[1], line[2]) if line else ""
