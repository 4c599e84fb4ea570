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
# Optimisers turn the rounding of a gradient near zero into its sign, and so into a whole step. The
# perturbed runs show how many numbers of a result do that; as many times more may do it.
_MORE = 8


@dataclass(frozen=True)
class Compared:
    """A leaf of the results.

    **Attributes:**

    - `name`: its path.
    - `shape`, `dtype`: those of the step's own run.
    - `difference`: the largest between the two runs. If rounding explains that of a few numbers,
        and more of them differ: what `count` numbers differ by at least.
    - `rounding`: how much of it rounding explains.
    - `largest`: the largest number of the reference.
    - `count`: how many numbers differ so much.
    - `is_finite`: whether the reference has neither NaN nor infinite numbers.
    - `differs`: whether the difference is larger than rounding explains.

    !!! Example

        ```python
        step = mylib.filter_jit(lambda x: 2 * x)
        for leaf in mylib.testing.verify(step, jnp.ones(8)).own:
            print(leaf.name, leaf.difference, leaf.rounding)
        ```
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    difference: float
    rounding: float
    largest: float
    count: int = 1
    is_finite: bool = True

    @property
    def differs(self) -> bool:
        return not self.difference <= self.rounding

    def __str__(self) -> str:
        many = f"{self.count} numbers by at least" if self.count > 1 else "by"
        return (
            f"{self.name} {self.dtype}{list(self.shape)}: {many} {self.difference:.2g} of "
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
    largest = largest_of(want)
    if not x.size:
        return Compared(name, shape, dtype, 0.0, 0.0, largest)
    # From the largest on.
    differences = np.sort(_differences(x, want), axis=None)[::-1]
    noise = np.max([_differences(run, want) for run in shaken], axis=0, initial=0.0)
    noise = np.repeat(np.sort(noise, axis=None)[::-1], _MORE)[: x.size]
    rounding = _ROOM * noise + (_UNITS * eps * largest if floats else 0.0)
    first = int(np.argmax(differences > rounding))
    difference = float(differences[first])
    count = int(np.sum(differences >= difference))
    explained, is_finite = float(rounding[first]), bool(np.isfinite(_numbers(want)).all())
    return Compared(name, shape, dtype, difference, explained, largest, count, is_finite)


def largest_difference(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.max(_differences(x, y), initial=0.0))


def _differences(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Infinite where only one is a number, or they are different infinities."""
    x, y = _numbers(x), _numbers(y)
    same = (x == y) | (np.isnan(x) & np.isnan(y))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(x - y))
    return np.where(np.isnan(difference), np.inf, difference)


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
