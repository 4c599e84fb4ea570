"""What opcodes of compiled programs compute of each element, in NumPy. All floating-point numbers
are float64, so that rounding explains next to nothing.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax.numpy as jnp
import numpy as np
import scipy.special
from numpy.typing import ArrayLike

from .._core.errors import AuditError


def wide(dtype: np.dtype) -> np.dtype:
    """With which numbers those of a dtype are computed. A byte has whole numbers of a few bits."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    if jnp.issubdtype(dtype, jnp.floating):
        return np.dtype(np.float64)
    return np.dtype(re.sub("int[124]$", "int8", np.dtype(dtype).name))


def held(values: ArrayLike, dtype: np.dtype) -> np.ndarray:
    """Values as an array of this dtype holds them; floating-point numbers aren't rounded."""
    target = wide(dtype)
    values = np.asarray(values).astype(target, copy=False)
    spare = 8 * target.itemsize - jnp.iinfo(dtype).bits if target.kind in "iu" else 0
    return values << target.type(spare) >> target.type(spare) if spare else values


def constant(text: str, dtype: np.dtype) -> np.ndarray:
    """The numbers in the text of a constant, in a row, as they are rounded in the program."""
    text = re.sub(r"/\*.*?\*/|[{}(),]", " ", text).replace("-nan", "nan")
    words = np.array(text.split(), str)
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.isin(words, ["true", "1"])
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return held(words.astype(np.float64).view(np.complex128).astype(dtype), dtype)
    return held(words.astype(wide(dtype)).astype(dtype), dtype)


def fitting(scalar: np.ndarray, like: np.ndarray) -> np.ndarray:
    """A number for each device, or an array of the same shape."""
    return scalar.reshape(scalar.shape + (1,) * (like.ndim - scalar.ndim))


def in_total_order(a: np.ndarray) -> np.ndarray:
    """Numbers that are ordered as all floating-point numbers: NaN has a place by its sign, and -0
    is less than 0. Others are as they are.
    """
    if not np.issubdtype(a.dtype, np.floating):
        return a
    bits = np.asarray(a, np.float64).view(np.int64)
    return np.where(bits < 0, bits ^ np.iinfo(np.int64).max, bits)


def _unsigned(dtype: np.dtype, a: np.ndarray) -> np.ndarray:
    unsigned = a.view(f"u{a.itemsize}")
    return unsigned & unsigned.dtype.type(2 ** jnp.iinfo(dtype).bits - 1)


def _signed(dtype: np.dtype, a: np.ndarray) -> np.ndarray:
    return held(a.view(f"i{a.itemsize}"), jnp.dtype(f"int{jnp.iinfo(dtype).bits}"))


def _shifted(
    shift: Callable[[np.dtype, np.ndarray, np.ndarray], np.ndarray],
    past: Callable[[np.dtype, np.ndarray], np.ndarray | int],
) -> Callable[..., np.ndarray]:
    def run(dtype: np.dtype, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        inside = (b >= 0) & (b < jnp.iinfo(dtype).bits)
        by = np.where(inside, b, 0).astype(a.dtype)
        return np.where(inside, shift(dtype, a, by), past(dtype, a)).astype(a.dtype)

    return run


def _divided(dtype: np.dtype, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if not jnp.issubdtype(dtype, jnp.integer):
        return a / b
    # Towards zero; division by zero is -1.
    return np.where(b == 0, np.array(-1).astype(a.dtype), (a - np.fmod(a, b)) // b)


def _converted(dtype: np.dtype, a: np.ndarray) -> np.ndarray:
    if np.iscomplexobj(a) and not jnp.issubdtype(dtype, jnp.complexfloating):
        a = np.real(a)
    if not np.issubdtype(a.dtype, np.floating) or not jnp.issubdtype(dtype, jnp.integer):
        return a
    low, high = (wide(dtype).type(end) for end in (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max))
    # The nearest one that there is; NaN is 0. In float64 the ends may be rounded.
    above, below = a >= float(high), a <= float(low)
    inside = np.where(above | below | np.isnan(a), 0, a).astype(wide(dtype))
    return np.select([above, below], [high, low], inside)


def _away_from_zero(a: np.ndarray) -> np.ndarray:
    whole = np.trunc(a)
    return np.where(np.abs(a - whole) >= 0.5, whole + np.sign(a), whole)


def _logistic(a: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-a)) if np.iscomplexobj(a) else scipy.special.expit(a)


_ORDERS = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater,
    "GE": np.greater_equal,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "abs": np.abs, "negate": np.negative, "exponential": np.exp, "log": np.log, "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a), "tanh": np.tanh, "cosine": np.cos, "sine": np.sin,
    "tan": np.tan, "floor": np.floor, "ceil": np.ceil, "sign": np.sign, "cbrt": np.cbrt,
    "logistic": _logistic, "erf": scipy.special.erf, "real": np.real, "imag": np.imag,
    "exponential-minus-one": np.expm1, "log-plus-one": np.log1p, "not": np.invert,
    "is-finite": np.isfinite, "round-nearest-even": np.rint, "round-nearest-afz": _away_from_zero,
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh,
    "atan": np.arctan, "atanh": np.arctanh, "sinh": np.sinh, "cosh": np.cosh,
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply,
    "maximum": np.maximum, "minimum": np.minimum, "power": np.power,
    "atan2": np.arctan2, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "complex": lambda a, b: a + 1j * b,
    "select": lambda which, a, b: np.where(fitting(which, a), a, b),
    "clamp": lambda low, a, high: np.minimum(np.maximum(a, fitting(low, a)), fitting(high, a)),
    # In float64 it would round, which is what a reader wants to leave out.
    "reduce-precision": lambda a: a,
}  # fmt: skip
_BY_DTYPE: dict[str, Callable[..., np.ndarray]] = {
    "divide": _divided, "convert": _converted,
    "remainder": lambda dtype, a, b: np.where(
        (b == 0) & jnp.issubdtype(dtype, jnp.integer), a, np.fmod(a, b)
    ),
    "popcnt": lambda dtype, a: np.bitwise_count(_unsigned(dtype, a)),
    "count-leading-zeros": lambda dtype, a: np.sum(
        [_unsigned(dtype, a) >> i == 0 for i in range(jnp.iinfo(dtype).bits)], 0
    ),
    "shift-left": _shifted(lambda dtype, a, b: np.left_shift(a, b), lambda dtype, a: 0),
    "shift-right-logical": _shifted(
        lambda dtype, a, b: _unsigned(dtype, a) >> b.view(f"u{b.itemsize}"), lambda dtype, a: 0
    ),
    "shift-right-arithmetic": _shifted(
        # Also of numbers without a sign.
        lambda dtype, a, b: _signed(dtype, a) >> b.view(f"i{b.itemsize}"),
        lambda dtype, a: _signed(dtype, a) >> 8 * a.itemsize - 1,
    ),
}  # fmt: skip
ELEMENTWISE = (*_FUNCTIONS, *_BY_DTYPE, "compare")


def elementwise(
    opcode: str, operands: Sequence[np.ndarray], dtype: np.dtype, attributes: Mapping[str, str]
) -> np.ndarray:
    """The result of one of these opcodes, which has this dtype in the program. Operands have one
    shape, or are numbers for the dimensions in front.
    """
    if opcode == "compare":
        # As jaxlib 0.10 and 0.12 write it.
        if attributes.get("type") == "TOTALORDER" or attributes.get("order") == "TOTAL":
            operands = list(map(in_total_order, operands))
        return _ORDERS[attributes["direction"]](*operands)
    function = _FUNCTIONS.get(opcode) or partial(_BY_DTYPE[opcode], dtype)
    try:
        with np.errstate(all="ignore"):
            return held(function(*operands), dtype)
    except TypeError as error:
        of = " and ".join(f"{x.dtype}" for x in operands)
        raise AuditError(f"{opcode} of {of} is not known how to compute here") from error
