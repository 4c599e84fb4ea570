"""Whether results differ by more than rounding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._compat import names, opened
from .._programs import all_equations

# A result may differ by this many times what the perturbed runs of the reference differ by. They
# change the arguments alone, and rounding happens at each operation. Checked with the random
# programs of `tests/verify`.
_ROOM = 32
# Rounding that no perturbation of the arguments shows, in units of the largest number: that of
# sums of a few hundred numbers in another order.
_UNITS = 64


@dataclass(frozen=True)
class Compared:
    """A leaf of the results.

    **Attributes:**

    - `name`: its path.
    - `shape`, `dtype`: those of the step's own run.
    - `difference`: the largest between the two runs.
    - `rounding`: the largest that rounding explains.
    - `largest`: the largest number of the reference.
    - `differs`: whether the difference is larger than rounding explains.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    difference: float
    rounding: float
    largest: float

    @property
    def differs(self) -> bool:
        return not self.difference <= self.rounding

    def __str__(self) -> str:
        return (
            f"{self.name} {self.dtype}{list(self.shape)}: by {self.difference:.2g} of "
            f"{self.largest:.2g} (rounding: {self.rounding:.1g})"
        )


def compare(
    names: Sequence[str],
    got: Sequence[np.ndarray],
    wanted: Sequence[np.ndarray],
    shaken: Sequence[Sequence[np.ndarray]],
    eps: float,
) -> list[Compared]:
    """`shaken` are the reference's results for perturbed arguments."""
    return [
        _compared(name, x, want, [run[i] for run in shaken], eps)
        for i, (name, x, want) in enumerate(zip(names, got, wanted, strict=True))
    ]


def _compared(
    name: str, x: np.ndarray, want: np.ndarray, shaken: Sequence[np.ndarray], eps: float
) -> Compared:
    shape, dtype = tuple(x.shape), str(x.dtype)
    if x.shape != want.shape:
        return Compared(f"{name}, for {want.shape}", shape, dtype, np.inf, 0.0, 0.0)
    floats = jnp.issubdtype(want.dtype, jnp.inexact)
    noise = max((largest_difference(run, want) for run in shaken), default=0.0)
    largest = largest_of(want)
    rounding = _ROOM * noise + (_UNITS * eps * largest if floats else 0.0)
    return Compared(name, shape, dtype, largest_difference(x, want), rounding, largest)


def largest_difference(x: np.ndarray, y: np.ndarray) -> float:
    """Infinite where only one is a number, or they are different infinities."""
    if not x.size:
        return 0.0
    x, y = _numbers(x), _numbers(y)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(x - y))
    return float(np.max(np.where(np.isnan(difference), np.inf, difference)))


def _numbers(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def largest_of(x: np.ndarray) -> float:
    numbers = np.abs(_numbers(x))
    return float(np.max(numbers, initial=0.0, where=np.isfinite(numbers)))


def coarsest(program: Any) -> float:
    """The distance of numbers near 1 in the least exact floating-point type of a program."""
    return max((float(jnp.finfo(d).eps) for d in _floats_of(program)), default=0.0)


def _floats_of(program: Any) -> Iterator[Any]:
    jaxpr = opened(program)
    variables = [*jaxpr.invars, *(x for eqn in all_equations(program) for x in eqn.outvars)]
    for dtype in {x.aval.dtype for x in variables if hasattr(x.aval, "dtype")}:
        if jnp.issubdtype(dtype, jnp.inexact):
            yield dtype
    # Numbers that are rounded to int8, as `send_dtype=` does, are as exact as those.
    if any(map(_rounds_to_int8, all_equations(program))):
        yield jnp.dtype(jnp.bfloat16)


def _rounds_to_int8(eqn: Any) -> bool:
    if eqn.primitive.name != names.CONVERT or eqn.params[names.PARAM_NEW_DTYPE] != jnp.int8:
        return False
    return jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)
