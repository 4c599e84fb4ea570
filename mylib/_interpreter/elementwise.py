"""Operations on each element. Values have the devices in front; in a reduction they have any
shape.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.special

from .._audit import COMPARED, Instruction
from .layouts import dtype_in_memory, dtype_of


def _divided(a: Any, b: Any) -> Any:
    if np.issubdtype(a.dtype, np.inexact):
        return a / b
    # Towards zero; division by zero is -1.
    safe = np.where(b == 0, 1, b)
    quotient = np.abs(a) // np.abs(safe) * np.sign(a) * np.sign(safe)
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient).astype(a.dtype)


def _shift(shift: Any, past: Any = None) -> Any:
    def run(a: Any, b: Any) -> Any:
        bits = 8 * a.dtype.itemsize
        inside = (b >= 0) & (b < bits)
        shifted = shift(a, np.where(inside, b, 0).astype(b.dtype))
        return np.where(inside, shifted, past(a) if past else 0).astype(a.dtype)

    return run


def _unsigned(a: Any) -> Any:
    return a.view(a.dtype.str.replace("i", "u"))


def _leading_zeros(a: Any) -> Any:
    bits = 8 * a.dtype.itemsize
    return sum((_unsigned(a) >> i == 0).astype(a.dtype) for i in range(bits))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "negate": np.negative, "exponential": np.exp, "log": np.log, "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a), "tanh": np.tanh, "cosine": np.cos, "sine": np.sin,
    "tan": np.tan, "floor": np.floor, "ceil": np.ceil, "sign": np.sign, "cbrt": np.cbrt,
    "logistic": scipy.special.expit, "erf": scipy.special.erf, "real": np.real, "imag": np.imag,
    "exponential-minus-one": np.expm1, "log-plus-one": np.log1p, "not": np.invert,
    "is-finite": np.isfinite, "round-nearest-even": np.rint, "popcnt": np.bitwise_count,
    "round-nearest-afz": lambda a: np.trunc(a + np.copysign(0.5, a)),
    "count-leading-zeros": _leading_zeros, "acos": np.arccos, "acosh": np.arccosh,
    "asin": np.arcsin, "asinh": np.arcsinh, "atan": np.arctan, "atanh": np.arctanh,
    "sinh": np.sinh, "cosh": np.cosh,
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": _divided,
    "maximum": np.maximum, "minimum": np.minimum, "power": np.power, "remainder": np.fmod,
    "atan2": np.arctan2, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "complex": lambda a, b: a + 1j * b, "shift-left": _shift(np.left_shift),
    "shift-right-logical": _shift(lambda a, b: (_unsigned(a) >> _unsigned(b)).view(a.dtype)),
    "shift-right-arithmetic": _shift(np.right_shift, lambda a: np.where(a < 0, -1, 0)),
    # In float64 it would round, which is what a reader wants to leave out.
    "reduce-precision": lambda a: a,
}  # fmt: skip


def _compare(run: Any, x: Instruction, a: Any, b: Any) -> Any:
    if x.attributes.get("type") == "TOTALORDER" and np.issubdtype(a.dtype, np.floating):
        # NaN is the largest number there.
        a, b = (np.where(np.isnan(v), np.inf, v) for v in (a, b))
    return COMPARED[x.attribute("direction")](a, b)


def _select(run: Any, x: Instruction, which: Any, a: Any, b: Any) -> Any:
    return np.where(fitting(which, a), a, b)


def _clamp(run: Any, x: Instruction, low: Any, a: Any, high: Any) -> Any:
    return np.minimum(np.maximum(a, fitting(low, a)), fitting(high, a))


def fitting(scalar: Any, like: Any) -> Any:
    """A number for each device, or an array of the same shape."""
    return scalar.reshape(scalar.shape + (1,) * (like.ndim - scalar.ndim))


def _convert(run: Any, x: Instruction, a: Any) -> Any:
    (array,) = x.arrays
    target = dtype_of(array)
    if np.issubdtype(a.dtype, np.floating) and target.kind in "iu":
        limits = np.iinfo(dtype_in_memory(array))
        a = np.nan_to_num(np.clip(np.trunc(a), float(limits.min), float(limits.max)), nan=0.0)
    return a.astype(target)


RULES: dict[str, Callable[..., Any]] = {
    "compare": _compare, "select": _select, "clamp": _clamp, "convert": _convert,
    "stochastic-convert": _convert,
    **{
        name: lambda run, x, *operands, of=of: of(*operands) for name, of in _FUNCTIONS.items()
    },
}  # fmt: skip
