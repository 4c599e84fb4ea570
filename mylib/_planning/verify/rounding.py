"""How far rounding reaches: a program, each of whose roundings is changed at random."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..._core.compat import Program, names
from ..._core.jaxprs import (
    Looped,
    bind_as,
    called_by,
    interpret,
    jaxprs_in,
    loop_of,
    scanned,
)

# Numbers are changed by at most this many units in the last place: of types with fewer than 20 bits
# by what rounding the same number up and down differ by. Others are changed by more, so that signs
# and comparisons that rounding may turn around are turned around in some of a few runs.
_UNITS, _UNITS_OF_FEW_BITS = 16, 2
_FEW_BITS = 2.0**-20
# What a product of float32 numbers rounds its operands to by default.
_PRODUCTS = {"gpu": 2.0**-11, "tpu": 2.0**-8}
# Odd numbers without a pattern: products with them, of 32 bits, are as good as random.
_MIXED = 0x9E3779B1, 0x85EBCA6B

Arrays = list[jax.Array]
# A scalar, or one that is traced.
Scalar = float | jax.Array


@dataclass(frozen=True)
class Roundings:
    """Those of a program. `much` says how much they are changed, from 0 to 1, and a `seed` by which
    random numbers. `eps` is that of all types, if not their own.
    """

    program: ClosedJaxpr
    eps: float | None = None

    def run(self, much: Scalar, seed: Scalar, args: Sequence[jax.Array]) -> Arrays:
        return interpret(self.program, args, self.call(much, seed))

    def call(self, much: Scalar, seed: Scalar) -> "Call":
        """What calls an equation with other roundings."""
        return _Rounding(much, seed, self.eps).call


Call = Callable[[JaxprEqn, Arrays], Sequence[jax.Array]]


@dataclass
class _Rounding:
    """One run. `number` counts the roundings."""

    much: Scalar
    seed: Scalar
    eps: float | None
    number: int = 0

    def run(self, program: Program, *args: jax.Array) -> Arrays:
        return interpret(program, args, self.call)

    def call(self, eqn: JaxprEqn, args: Arrays) -> Sequence[jax.Array]:
        name, called, loop = eqn.primitive.name, called_by(eqn, args), loop_of(eqn, args)
        if called is not None:
            return self.run(called[0], *called[1])
        if loop is not None:
            return self._loop(eqn, loop)
        if name == names.COND:
            branches = [partial(self.run, branch) for branch in jaxprs_in(eqn)]
            return lax.switch(args[0], branches, *args[1:])
        if name in names.EXACT or (name == names.CONVERT and _is_wider(eqn)):
            return bind_as(eqn, args)
        if name == names.CONVERT:
            return [self._cast(args[0], eqn)]
        if name in names.ADDED_UP:
            return self._added_up(eqn, args)
        if name not in names.BY_ELEMENT:
            args = [self._changed(arg, 0, eqn) for arg in args]
        return [self._changed(result, 0, eqn) for result in bind_as(eqn, args)]

    def _loop(self, eqn: JaxprEqn, loop: Looped[jax.Array]) -> Arrays:
        if (test := loop.test) is None:
            turn = lambda state, given: (state, self.run(loop.body, *given), None)  # noqa: E731
            return scanned(eqn, loop, turn, None)[1]
        return lax.while_loop(
            lambda carry: interpret(test, [*loop.of_test, *carry])[0],
            lambda carry: self.run(loop.body, *loop.constants, *carry),
            loop.carry,
        )

    def _added_up(self, eqn: JaxprEqn, args: Arrays) -> Arrays:
        """Sums also differ by the roundings of what they add up."""
        (total,) = bind_as(eqn, args)
        if not _is_float(total):
            return [total]
        noisy = {0, 2} if eqn.primitive.name in names.SCATTERS else {0}
        noises = [self._only_noise(arg) if i in noisy else arg for i, arg in enumerate(args)]
        (noise,) = bind_as(eqn, noises)
        if eqn.primitive.name in names.PRODUCTS and total.dtype.itemsize >= 4:
            # The roundings of equal numbers go one way: sums of 512 and of 32,768 on one device and
            # on eight differ by 11 and 30 units.
            terms = (args[0].size * args[1].size / max(total.size, 1)) ** 0.5
            noise += terms**0.25 * self._only_noise(total)
        return [self._changed(total, noise, eqn)]

    def _cast(self, number: jax.Array, eqn: JaxprEqn) -> jax.Array:
        """Changed before, because a cast may make zeros of small numbers."""
        (cast,), dtype = bind_as(eqn, [number]), eqn.params[names.PARAM_NEW_DTYPE]
        if jnp.issubdtype(dtype, jnp.inexact):
            return self._nearby(jnp.asarray(number), 0, cast, self.eps or _eps(dtype, eqn))
        # All numbers are rounded to their neighbours.
        limits, steps = jnp.iinfo(dtype), jnp.round(self.much * self._noise(number))
        return jnp.clip(cast + steps, limits.min, limits.max).astype(dtype)

    def _changed(self, number: jax.Array, noise: Scalar, eqn: JaxprEqn) -> jax.Array:
        """A number and the noise of what is added up in it, both in its last places."""
        if not _is_float(number):
            return number
        number = jnp.asarray(number)
        return self._nearby(number, noise, number, self.eps or _eps(number.dtype, eqn))

    def _nearby(
        self, number: jax.Array, noise: Scalar, rounded: jax.Array, eps: float
    ) -> jax.Array:
        number = number.astype(_wide(number.dtype))
        # Small numbers have no more digits after the point than these.
        least = jnp.where(number == 0, 0, jnp.finfo(rounded.dtype).tiny).astype(number.dtype)
        size = jnp.maximum(jnp.abs(number), least.real)
        change = size * self._noise(number) + jnp.asarray(noise, number.dtype)
        # Two units of 8 bits would be as large as the number.
        units = _UNITS if eps < _FEW_BITS else _UNITS_OF_FEW_BITS if eps < 2.0**-5 else 1
        changed = (number + self.much * (units * eps) * change).astype(rounded.dtype)
        return lax.select(jnp.isfinite(changed.astype(_wide(rounded.dtype))), changed, rounded)

    def _only_noise(self, number: jax.Array) -> jax.Array:
        if not _is_float(number):
            return number
        wide = jnp.asarray(number).astype(_wide(number.dtype))
        return (wide * self._noise(wide)).astype(number.dtype)

    def _noise(self, number: jax.Array) -> jax.Array:
        """Between -1 and 1, and the same for equal numbers, which are rounded alike: the rows of a
        batch that are equal, too, and then what they differ by adds up.
        """
        self.number += 1
        bits = _bits(number) ^ (jnp.uint32(self.seed) * 8191 + self.number * 2741)
        for factor in _MIXED:
            bits = bits * jnp.uint32(factor)
            bits ^= bits >> 15
        return (bits >> 8).astype(jnp.float32) * 2.0**-23 - 1


def _bits(number: jax.Array) -> jax.Array:
    """32 bits, which those of a number decide."""
    number = jnp.real(number) + 3 * jnp.imag(number)
    bits = lax.bitcast_convert_type(number, f"uint{8 * number.dtype.itemsize}")
    return (bits if bits.dtype == jnp.uint32 else bits ^ bits >> 32).astype(jnp.uint32)


_QUANTISED = {jnp.dtype(jnp.int8), jnp.dtype(jnp.int4)}


def _is_float(number: jax.Array) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(number), jnp.inexact))


def _wide(dtype: np.dtype) -> np.dtype:
    return dtype if dtype.itemsize >= 4 else np.dtype(np.float32)


def _is_wider(eqn: JaxprEqn) -> bool:
    """Whether a cast rounds no float."""
    aval, new = eqn.invars[0].aval, eqn.params[names.PARAM_NEW_DTYPE]
    assert isinstance(aval, ShapedArray)
    old = aval.dtype
    if not jnp.issubdtype(old, jnp.inexact):
        return True
    if jnp.issubdtype(new, jnp.inexact):
        return bool(jnp.finfo(new).eps <= jnp.finfo(old).eps)
    return jnp.dtype(new) not in _QUANTISED


def _eps(dtype: np.dtype, eqn: JaxprEqn) -> float:
    eps = float(jnp.finfo(dtype).eps)
    if eqn.primitive.name in names.PRODUCTS and dtype == jnp.float32:
        return max(eps, _PRODUCTS.get(jax.default_backend(), 0.0))
    return eps
