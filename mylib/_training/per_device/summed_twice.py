"""Finds gradients that are summed over the devices twice: by JAX, because the parameters are the
same on all devices, and by the user's own `psum` or `pmean`.

The program is read once, from top to bottom. Each value gets a set of marks that say how it was
computed:

- `CONSTANT`: from constants alone, `ZERO`: from zeros.
- `LOCAL(axis)`: the cotangent of a loss that differs between the devices along an axis. `jax.grad`
  begins with a 1 that is cast to varying; this is where the mark comes from.
- `SHARED(axis)`: the cotangent of a loss that is the same on all devices. In the transposed program
  it is cast to varying, where the loss was summed or averaged.
- `SUM(axis)`: a cotangent that JAX has summed over an axis, and the gradients that result from it.
- `CAST(axis)`: a gradient with that mark, cast to varying, which `psum` and `pmean` do first.

All other values have no marks. In case of doubt a value's marks are dropped, so that no warning is
wrong.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from ..._core.compat import (
    GradientPass,
    UnknownParameter,
    axes_of_cast_or_sum,
    names,
    opened,
    pass_of,
)
from ..._core.errors import SummedTwiceWarning, warn
from ..._core.jaxprs import Looped, all_equations, followed, is_opaque, jaxprs_in, loop_of, repeated
from .hazards import axes_named_by, where

Axis = Hashable
Mark = tuple[str, Axis]
Marks = frozenset[Mark]
# Sums of gradients: the axis of each, and its line.
Sums = list[tuple[Axis, str]]
# A jaxpr by its id, the marks of its arguments, and the pass of the gradient around it.
Key = tuple[int, tuple[Marks, ...], GradientPass]

CONSTANT: Mark = ("constant", None)
ZERO: Mark = ("zero", None)
NONE: Marks = frozenset()

# Equations that pass their operands on to their jaxpr.
_CALLS = names.CALLS | {names.CUSTOM_VMAP_CALL, names.REMAT, names.SHARD_MAP}
_SUMS = (names.PSUM, names.REDUCE_SCATTER)


def summed_twice(program: ClosedJaxpr) -> Sums:
    """Each axis over which a jaxpr of `shard_map` sums a gradient twice, with the line of the
    second sum.
    """
    # One of them may be JAX's own. Most programs have none.
    if sum(eqn.primitive.name in _SUMS for eqn in all_equations(program)) < 2:
        return []
    jaxpr = opened(program)
    reader = _MarksReader()
    try:
        reader.read(jaxpr, [NONE] * len(jaxpr.invars), GradientPass.NONE)
    except (UnknownParameter, ValueError):
        # A newer JAX, or other numbers of arguments: a failed check must not cost the result.
        return []
    return list(dict.fromkeys(reader.sums))


def warn_of_sums(name: str, program: ClosedJaxpr) -> None:
    """Warns about each of these sums in the function called `name`."""
    for axis, place in summed_twice(program):
        warn(
            f"{name}: a gradient is summed over {axis!r} twice. The parameters are the same on all "
            f"devices along {axis!r}, so JAX has summed their gradient already when it reaches the "
            f"psum, pmean or psum_scatter {place}. A pmean leaves that sum as it is, the others "
            f"multiply it by the number of devices.\n    instead: take the gradient with respect "
            f"to mylib.vary(parameters, {axis!r}), or replace the psum or pmean by a division by "
            f"jax.lax.axis_size({axis!r})",
            SummedTwiceWarning,
        )


class _MarksReader:
    def __init__(self):
        self.sums: Sums = []
        self._cache: dict[Key, tuple[list[Marks], Sums]] = {}

    def read(self, jaxpr: Jaxpr, operands: list[Marks], around: GradientPass) -> list[Marks]:
        """The marks of a jaxpr's results, from those of its arguments."""
        # Equal calls are read once. (The program holds the jaxpr, so its id stays valid.)
        key = id(jaxpr), tuple(operands), around
        if key in self._cache:
            results, repeated = self._cache[key]
            self.sums += repeated
        else:
            before = len(self.sums)
            results = self._read(jaxpr, operands, around)
            self._cache[key] = results, self.sums[before:]
        return results

    def _read(self, jaxpr: Jaxpr, operands: list[Marks], around: GradientPass) -> list[Marks]:
        def rule(eqn: JaxprEqn, operands: list[Marks]) -> list[Marks]:
            return self._results_of(eqn, operands, pass_of(eqn, around))

        return followed(
            jaxpr,
            operands,
            rule,
            lambda var: _of_literal(var) if isinstance(var, Literal) else NONE,
        )

    def _results_of(
        self, eqn: JaxprEqn, operands: list[Marks], within: GradientPass
    ) -> list[Marks]:
        name = eqn.primitive.name
        inner = [] if name in names.KERNELS else list(map(opened, jaxprs_in(eqn)))
        if name in _CALLS and inner and len(inner[0].invars) == len(operands):
            return self.read(inner[0], operands, within)
        if name == names.COND:
            results = [self.read(branch, operands[1:], within) for branch in inner]
            return [_joined(marks, _meet(within)) for marks in zip(*results, strict=False)]
        loop = loop_of(eqn, operands)
        if loop is not None:
            return self._repeat(loop, within)
        for jaxpr in inner:
            self.read(jaxpr, [NONE] * len(jaxpr.invars), within)
        if is_opaque(eqn):
            return [NONE] * len(eqn.outvars)
        if name == names.BARRIER:
            return operands
        transposed = within is GradientPass.TRANSPOSED
        if name == names.PVARY:
            marks = _cast(operands[0], axes_of_cast_or_sum(eqn), within)
        elif name == names.PSUM and transposed:
            marks = _summed_by_jax(operands[0], axes_of_cast_or_sum(eqn))
        elif name in _SUMS:
            marks = self._summed_by_user(eqn, operands[0], axes_named_by(eqn))
        elif operands and all(CONSTANT in marks for marks in operands):
            marks = _joined(operands, frozenset.union)
        elif transposed:
            # Linear in all operands, or in one of two; the other one has no marks.
            marks = NONE.union(*operands) - {CONSTANT, ZERO}
            marks |= {("shared", axis) for axis in axes_named_by(eqn)}
        else:
            marks = _of_gradients(eqn, operands)
        return [marks] * len(eqn.outvars)

    def _repeat(self, loop: Looped[Marks], within: GradientPass) -> list[Marks]:
        """The marks that hold for every iteration of a loop."""
        before, meet, body = len(self.sums), _meet(within), opened(loop.body)

        def turn(given: list[Marks]) -> list[Marks]:
            # What an earlier turn has found may not hold in all of them.
            del self.sums[before:]
            return self.read(body, given, within)

        carry, results = repeated(loop, turn, lambda a, b: _joined((a, b), meet))
        return [*carry, *results[len(carry) :]]

    def _summed_by_user(self, eqn: JaxprEqn, marks: Marks, axes: Iterable[Axis]) -> Marks:
        twice = sorted((axis for axis in axes if ("cast", axis) in marks), key=str)
        self.sums += [(axis, where(eqn)) for axis in twice]
        return marks - {(kind, axis) for kind, axis in marks if axis in twice or axis is None}


def _of_literal(literal: Any) -> Marks:
    aval = literal.aval
    is_zero = jnp.issubdtype(aval.dtype, jnp.number) and aval.shape == () and not literal.val
    return frozenset({CONSTANT, ZERO} if is_zero else {CONSTANT})


def _cast(marks: Marks, axes: Iterable[Axis], within: GradientPass) -> Marks:
    for axis in axes:
        summed = ("sum", axis)
        if summed in marks:
            kind = "local" if within is GradientPass.TRANSPOSED else "cast"
            marks = marks - {summed} | {(kind, axis)}
        elif within is GradientPass.TRANSPOSED and ZERO not in marks:
            marks |= {("shared", axis)}
        elif within is GradientPass.NONE and CONSTANT in marks and ZERO not in marks:
            marks |= {("local", axis)}
    return marks


def _summed_by_jax(marks: Marks, axes: Iterable[Axis]) -> Marks:
    for axis in axes:
        local, shared = ("local", axis) in marks, ("shared", axis) in marks
        marks -= {("local", axis), ("shared", axis)}
        if local and not shared:
            marks |= {("sum", axis)}
    return marks - {CONSTANT, ZERO}


def _of_gradients(eqn: Any, operands: list[Marks]) -> Marks:
    """The marks of a gradient that an operation on it keeps."""
    name = eqn.primitive.name
    if name in names.LINEAR_IN_ONE or (name == names.REDUCE_SUM and eqn.outvars[0].aval.shape):
        return _gradient(operands[0])
    if name in names.LINEAR_IN_ALL:
        return _gradient(_joined(operands, frozenset.intersection))
    if name == names.SELECT:
        return _scaled(_joined(operands[1:], frozenset.intersection), operands[0])
    if name == names.DIV:
        return _scaled(operands[0], operands[1])
    if name == names.MUL:
        return _scaled(*operands) | _scaled(*reversed(operands))
    return NONE


def _scaled(marks: Marks, scale: Marks) -> Marks:
    """A sum may be multiplied by any value that is the same on all devices; after the cast to
    varying only by constants.
    """
    if CONSTANT in scale:
        return _gradient(marks)
    return frozenset(m for m in marks if m[0] == "sum") - scale


def _gradient(marks: Marks) -> Marks:
    return frozenset(m for m in marks if m[0] in ("sum", "cast"))


def _meet(within: GradientPass) -> Callable[..., Marks]:
    return frozenset.union if within is GradientPass.TRANSPOSED else frozenset.intersection


def _joined(operands: Sequence[Marks], join: Callable[..., Marks]) -> Marks:
    """Constants remove no marks from the values that they are joined with."""
    others = [marks for marks in operands if CONSTANT not in marks]
    if others:
        return join(*others)
    return NONE.union(*operands) - (NONE if all(ZERO in marks for marks in operands) else {ZERO})
