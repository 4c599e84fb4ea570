"""Whether results differ by more than rounding."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

# A number may differ by this many times what it differs by in one of the runs with changed
# roundings. They change each rounding by more than it can be, but there are few runs.
_ROOM = 2


@dataclass(frozen=True)
class Compared:
    """A leaf of the results.

    **Attributes:**

    - `name`: its path.
    - `shape`, `dtype`: those of the step's own run.
    - `difference`: the largest difference between the two runs, of the numbers that differ by more
        than rounding explains if there are any.
    - `rounding`: how much rounding explains of that difference.
    - `largest`: the largest number of the reference.
    - `count`: how many numbers differ by more than rounding explains.
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
    count: int = 0
    is_finite: bool = True

    @property
    def differs(self) -> bool:
        return not self.difference <= self.rounding

    def __str__(self) -> str:
        off = f"{self.count} numbers off by up to" if self.count > 1 else "off by"
        return (
            f"{self.name} {self.dtype}{list(self.shape)}: {off} {self.difference:.2g}, where the "
            f"largest number is {self.largest:.2g}; rounding explains {self.rounding:.1g}"
        )


def compare(
    names: Sequence[str],
    got: Sequence[np.ndarray],
    wanted: Sequence[np.ndarray],
    others: Sequence[Sequence[np.ndarray]],
) -> list[Compared]:
    """`others` are the reference's results with changed roundings."""
    return [
        _compared(name, x, want, [run[i] for run in others])
        for i, (name, x, want) in enumerate(zip(names, got, wanted, strict=True))
    ]


def are_numbers(results: Sequence[np.ndarray]) -> bool:
    """Whether any result has a finite number, of those that may have others."""
    may_not = [_numbers(x) for x in results if x.size and jnp.issubdtype(x.dtype, jnp.inexact)]
    return not may_not or any(np.isfinite(x).any() for x in may_not)


def _compared(name: str, x: np.ndarray, want: np.ndarray, others: Sequence[np.ndarray]) -> Compared:
    shape, dtype = tuple(x.shape), str(x.dtype)
    if (x.shape, x.dtype) != (want.shape, want.dtype):
        name = f"{name}, for {want.dtype}{list(want.shape)}"
        return Compared(name, shape, dtype, np.inf, 0.0, 0.0)
    largest = largest_of(want)
    if not x.size:
        return Compared(name, shape, dtype, 0.0, 0.0, largest)
    differences, rounding = differences_of(x, want), rounding_of(want, others)
    differs = differences > rounding
    worst = np.argmax(np.where(differs, differences, -1) if differs.any() else differences)
    is_finite = bool(np.isfinite(_numbers(want)).all())
    difference, explained = (float(y.reshape(-1)[worst]) for y in (differences, rounding))
    count = int(differs.sum())
    return Compared(name, shape, dtype, difference, explained, largest, count, is_finite)


def rounding_of(want: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    """How much rounding explains of each number's difference. A run in which a number overflows
    explains nothing of it.
    """
    noise = [differences_of(run, want) for run in others]
    return _ROOM * np.max([np.where(np.isinf(x), 0.0, x) for x in noise], axis=0, initial=0.0)


def differences_of(x: np.ndarray, y: np.ndarray) -> np.ndarray:
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
