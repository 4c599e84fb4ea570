"""Counts products, pairs of numbers that are multiplied and added: of a traced program, and of a
convolution.
"""

import functools
import math
import operator
import re
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from .compat import Program, names, opened
from .jaxprs import KERNEL, jaxprs_in, shape_of


class Products(NamedTuple):
    """What a traced program computes, on all devices together."""

    products: int
    # Those of them that are in loops.
    looped: int = 0
    # The numbers that everything else returns.
    others: int = 0
    # The matrices that are factored, or solved with: in as many products as the compiler likes.
    factors: int = 0


def products_in(program: Program, each_turn: bool, at_most: float = math.inf) -> Products | None:
    """Counts what each iteration of a scan computes, or the body of a loop once, as the compiler's
    own analysis does. Equations whose results nothing uses are left out, but loops and branches are
    counted whole. None if the program calls code whose work is unknown, or if there are more
    products than `at_most`, when counting ends.
    """
    return _Counter(each_turn, at_most).of(program)


class _Counter:
    """Counts each jaxpr once, however often it is called. (The program holds the jaxprs, so their
    ids stay valid.)
    """

    def __init__(self, each_turn: bool, at_most: float):
        self._each_turn = each_turn
        self._at_most = at_most
        self._counts: dict[object, Products | None] = {}

    def of(self, program: Program, used: Sequence[bool] | None = None) -> Products | None:
        """Counts what is needed for the results that are used; by default all are."""
        jaxpr = opened(program)
        key = id(jaxpr), used
        if key not in self._counts:
            results = jaxpr.outvars if used is None else compress(jaxpr.outvars, used)
            self._counts[key] = self._count(jaxpr, set(map(id, results)))
        return self._counts[key]

    # From the results to the arguments: `followed` would also count what nothing uses.
    def _count(self, jaxpr: Jaxpr, live: set[int]) -> Products | None:
        total = Products(0)
        for eqn in reversed(jaxpr.eqns):
            used = tuple(id(var) in live for var in eqn.outvars)
            if True in used or eqn.effects:
                live.update(map(id, eqn.invars))
                counted = self._in_equation(eqn, used)
                if counted is None:
                    return None
                total = Products(*map(operator.add, total, counted))
                if total.products > self._at_most:
                    return None
        return total

    def _in_equation(self, eqn: JaxprEqn, used: tuple[bool, ...]) -> Products | None:
        name = eqn.primitive.name
        if name in _UNKNOWN:
            return None
        if name in _PRODUCTS:
            return Products(products_of_equation(eqn))
        inner = jaxprs_in(eqn)
        if inner:
            return self._called(eqn, inner, used)
        others = sum(math.prod(shape_of(var.aval)) for var in eqn.outvars)
        return Products(0, others=others, factors=int(name in names.FACTORS))

    def _called(
        self, eqn: JaxprEqn, inner: list[Program], used: tuple[bool, ...]
    ) -> Products | None:
        name = eqn.primitive.name
        counted = (self.of(program, used if name in _CALLS else None) for program in inner)
        parts = [part for part in counted if part is not None]
        if len(parts) < len(inner):
            return None
        if name == names.COND:
            return max(parts)
        times = _times(eqn, self._each_turn)
        total = Products(*(times * sum(counts) for counts in zip(*parts, strict=True)))
        return total._replace(looped=total.products) if name in _LOOPS else total


_LOOPS = (names.SCAN, names.WHILE)
_PRODUCTS = {names.DOT, names.CONVOLUTION}
_UNKNOWN = {KERNEL, *names.KERNELS, *names.OPAQUE_CALLS, names.RAGGED_DOT}
# Equations whose results are those of their one jaxpr.
_CALLS = names.CALLS | {names.REMAT}


def _times(eqn: JaxprEqn, each_turn: bool) -> int:
    """How often an equation's jaxprs are counted."""
    params = eqn.params
    if eqn.primitive.name == names.SHARD_MAP:
        sizes = params[names.PARAM_MESH].shape
        return math.prod(sizes[axis] for axis in params[names.PARAM_MANUAL_AXES])
    if eqn.primitive.name == names.SCAN:
        length = params[names.PARAM_LENGTH]
        return length if each_turn else min(length, int(params[names.PARAM_UNROLL]))
    return 1


def products_of_equation(eqn: JaxprEqn) -> int:
    """Counts those of one equation, a `dot_general` or a convolution."""
    if eqn.primitive.name == names.CONVOLUTION:
        return _convolution(eqn)
    (contracted, _), _ = eqn.params[names.PARAM_DIMENSION_NUMBERS]
    shape = shape_of(eqn.invars[0].aval)
    return math.prod([*shape_of(eqn.outvars[0].aval), *(shape[i] for i in contracted)])


def flops_of_kernel(eqn: JaxprEqn) -> float | None:
    """What a Pallas kernel computes, as it states or as its name tells; None if neither does."""
    cost = eqn.params.get(names.PARAM_COST)
    if cost is not None:
        return float(cost.flops)
    types: list[Any] = [var.aval for var in eqn.invars]
    avals = [(tuple(aval.shape), aval.dtype.kind in "iub") for aval in types]
    products = products_of_splash(eqn.params.get(names.PARAM_NAME) or "", avals, len(eqn.outvars))
    return None if products is None else 2.0 * products


def products_of_splash(
    name: str, operands: Sequence[tuple[tuple[int, ...], bool]], results: int
) -> int | None:
    """Those of a kernel of splash attention, by its name, and by the shapes of its operands and
    whether they are of integers. None if it is another kernel.
    """
    found = re.search(names.KERNEL_SPLASH, name)
    if found is None:
        return None
    queries, keys = [shape for shape, is_int in operands if not is_int][:2]
    # Backward the scores are computed again; one kernel may do it all.
    count = 5 if results == _FUSED else _SPLASH[found["of"]]
    products = count * math.prod(queries) * max(keys[-2:])
    positions = [shape for shape, is_int in operands if is_int and len(shape) == 2]
    # A mask that is computed from positions is causal, or leaves out more: its blocks are not
    # computed. With segments there are two other such arrays.
    return products // 2 if len(positions) > (2 if found["segments"] else 0) else products


# How many products of queries and keys, or of scores and values: for the result, for the gradients
# of keys and values, and for that of queries.
_SPLASH = {"fwd": 2, "dkv": 4, "dq": 3}
# The results of the kernel for all three gradients.
_FUSED = 3


def _convolution(eqn: JaxprEqn) -> int:
    params = eqn.params
    shapes = [shape_of(var.aval) for var in (*eqn.invars, *eqn.outvars)]
    # Each as its batch or its results, its channels, and its places.
    inputs, window, results = (
        [shape[i] for i in order]
        for shape, order in zip(shapes, params[names.PARAM_DIMENSION_NUMBERS], strict=True)
    )
    size = results[0] * results[1] * window[1]
    for i, (low, _) in enumerate(params[names.PARAM_PADDING]):
        size *= meetings(
            results[2 + i],
            params[names.PARAM_STRIDES][i],
            window[2 + i],
            params[names.PARAM_RHS_DILATION][i],
            inputs[2 + i],
            params[names.PARAM_LHS_DILATION][i],
            low,
        )
    return size


@functools.lru_cache(maxsize=1000)
def meetings(
    results: int, stride: int, window: int, dilation: int, inputs: int, holes: int, low: int
) -> int:
    """How many pairs of a result and a place in its window meet an input, in one direction, and
    neither padding nor one of the zeros between dilated inputs. XLA writes batches as dilated
    inputs, too, of whose window one place meets something.
    """
    few, step, many, other = results, stride, window, dilation
    if few > many:
        few, step, many, other = many, other, few, step
    places = np.arange(many) * other - low
    last = (inputs - 1) * holes
    total = 0
    for i in range(few):
        at = places + i * step
        total += np.count_nonzero((at >= 0) & (at <= last) & (at % holes == 0))
    return int(total)
