"""`assert_split`: a kernel computes of parts what it computes of the whole."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import names, opened
from .._kernels import NoDerivativeError, Splits, kernel_p
from .._programs import bind_as, interpret, jaxprs_in, kernel_of
from .._tree import outlined

# Calls whose last operands are the arguments of their jaxpr.
_CALLS = (
    names.JIT,
    names.CLOSED_CALL,
    names.REMAT,
    names.CUSTOM_JVP_CALL,
    names.CUSTOM_VJP_CALL,
)
# Into at most as many parts: so many devices are simulated.
_MOST = 8


def assert_split(kernel: Callable[..., Any], /, *args: Any) -> None:
    """Asserts that a kernel, and those of its derivative, compute of parts what they compute of the
    whole, for each split that `dims=` or `like=` of [`mylib.opaque`][] permits, and that the kernel
    computes what `like=` does.

    The parts of up to eight devices are computed one after the other, so one device is enough.
    Results may differ by the square root of the precision of their dtype.

    **Arguments:**

    - `kernel`: a function of `mylib.opaque` with `dims=` or `like=`, or one that calls some.
    - `args`: its arguments, as small as the kernel takes them, but of the shapes' proportions.

    **Raises:**

    `AssertionError`, which names the kernel, the letter that can't be split, and the result that
    differs.

    !!! Example

        ```python
        softmax = mylib.opaque(
            lambda x: jax.nn.softmax(x), dims="rows width -> rows width"
        )
        try:
            mylib.testing.assert_split(softmax, jnp.ones((8, 16)))
        except AssertionError as error:
            assert "'width'" in str(error)
        ```
    """
    arrays, outline = outlined(args)
    arrays = list(map(jnp.asarray, arrays))

    def run(*arrays: Any) -> list[Any]:
        return outlined(kernel(*outline.fill(arrays)))[0]

    def gradient(*arrays: Any) -> Any:
        are_moved = [jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays]

        def of_moved(moved: Sequence[Any]) -> list[Any]:
            rest = iter(moved)
            results = run(*(next(rest) if x else y for x, y in zip(are_moved, arrays, strict=True)))
            return [x for x in results if jnp.issubdtype(x.dtype, jnp.inexact)]

        moved = [y for x, y in zip(are_moved, arrays, strict=True) if x]
        results, backward = jax.vjp(of_moved, moved)
        return backward([jnp.cos(x) for x in results])

    seen: list[str] = []
    _check(run, arrays, seen)
    if not seen:
        raise TypeError(
            "assert_split: it calls no function of mylib.opaque with dims= or like=, which "
            "describe how a kernel may be split"
        )
    try:
        _check(gradient, arrays, seen)
    except NoDerivativeError:
        pass


def _check(run: Callable[..., Any], arrays: Sequence[Any], seen: list[str]) -> None:
    """Checks each kernel of a function, with the operands that it has there."""

    def rule(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        if eqn.primitive is kernel_p:
            called, splits = kernel_of(eqn)
            seen.append(called.name)
            return _checked(called, splits, operands)
        if eqn.primitive.name in _CALLS:
            (inner, *_) = jaxprs_in(eqn)
            return interpret(inner, operands[len(operands) - len(opened(inner).invars) :], rule)
        return bind_as(eqn, operands)

    interpret(jax.make_jaxpr(run)(*arrays), arrays, rule)


def _checked(kernel: Any, splits: Splits, operands: Sequence[Any]) -> Sequence[Any]:
    """A kernel's results, which all splits leave as they are."""
    whole = kernel(*operands)
    like = kernel.reference(operands)[0] if kernel.like is not None else whole
    for i, (x, wanted) in enumerate(zip(whole, like, strict=True)):
        _compare(x, wanted, f"{kernel.name}: result {i} is not that of like=")
    for parts in _ways(splits):
        results = [kernel(*_part(operands, splits.operands, parts, at)) for at in _places(parts)]
        for i, (x, letters) in enumerate(zip(whole, splits.results, strict=True)):
            for at, result in zip(_places(parts), results, strict=True):
                (wanted,) = _part([x], [letters], parts, at)
                shown = ", ".join(f"{letter!r} in {count}" for letter, count in parts.items())
                _compare(
                    result[i],
                    wanted,
                    f"{kernel.name}, with {shown} parts: result {i} differs from that of the whole "
                    f"({splits}). If it needs them whole, write whole={tuple(parts)}",
                )
    return whole


def _ways(splits: Splits) -> Iterator[dict[str, int]]:
    """For each letter the numbers of its parts, and all letters in the smallest numbers."""
    smallest: dict[str, int] = {}
    for letter, most in splits.parts.items():
        counts = [n for n in range(2, min(most, _MOST) + 1) if most % n == 0] or [most]
        smallest[letter] = counts[0]
        yield from ({letter: count} for count in counts)
    if len(smallest) > 1:
        yield smallest


def _places(parts: Mapping[str, int]) -> Iterator[dict[str, int]]:
    for at in itertools.product(*map(range, parts.values())):
        yield dict(zip(parts, at, strict=True))


def _part(
    arrays: Sequence[Any],
    letters: Sequence[Sequence[str]],
    parts: Mapping[str, int],
    at: Mapping[str, int],
) -> list[Any]:
    """The parts of arrays that one device has."""

    def cut(size: int, letter: str) -> slice:
        if letter not in parts or size == 1:
            return slice(None)
        length = size // parts[letter]
        return slice(at[letter] * length, (at[letter] + 1) * length)

    return [
        x[tuple(map(cut, x.shape, names_of))] for x, names_of in zip(arrays, letters, strict=True)
    ]


def _compare(x: Any, wanted: Any, what: str) -> None:
    if (x.shape, x.dtype) != (wanted.shape, wanted.dtype):
        raise AssertionError(
            f"assert_split: {what}: it is {x.dtype}{list(x.shape)}, "
            f"not {wanted.dtype}{list(wanted.shape)}"
        )
    if not x.size:
        return
    a, b = (np.asarray(y, np.result_type(np.float64, y.dtype)) for y in (x, wanted))
    near = jnp.finfo(x.dtype).eps ** 0.5 if jnp.issubdtype(x.dtype, jnp.inexact) else 0
    largest, difference = np.nanmax(abs(b)), np.nanmax(abs(a - b))
    if not np.array_equal(np.isnan(a), np.isnan(b)) or difference > near * max(largest, 1e-30):
        raise AssertionError(f"assert_split: {what}: by {difference:.3g} of {largest:.3g}")
