"""`assert_split`: a kernel computes of parts what it computes of the whole."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .._core.jaxprs import bind_as, called_by, interpret, kernel_of
from .._core.kernels import NoDerivativeError, Splits, difference, difference_of_parts, kernel_p
from .._core.tree import outlined

# Into at most as many parts: so many devices are simulated.
_MOST = 8


def assert_split(kernel: Callable[..., Any], /, *args: Any) -> None:
    """Asserts that a kernel, and those of its derivative, compute of parts what they compute of the
    whole, for each split that `dims=` or `like=` of `mylib.opaque` permits, and that the kernel
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
        results, backward = eqx.filter_vjp(run, *arrays)
        return backward([jnp.cos(x) if eqx.is_inexact_array(x) else None for x in results])

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

    def rule(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if eqn.primitive is kernel_p:
            kernel, splits = kernel_of(eqn)
            seen.append(kernel.name)
            return _checked(kernel, splits, operands)
        called = called_by(eqn, operands)
        return bind_as(eqn, operands) if called is None else interpret(*called, rule)

    interpret(jax.make_jaxpr(run)(*arrays), arrays, rule)


def _checked(kernel: Any, splits: Splits, operands: Sequence[Any]) -> Sequence[Any]:
    """A kernel's results, which all splits leave as they are."""
    __tracebackhide__ = True
    whole = kernel(*operands)
    like = kernel.reference(operands)[0] if kernel.like is not None else whole
    for i, (x, wanted) in enumerate(zip(whole, like, strict=True)):
        told = difference(x, wanted)
        if told is not None:
            raise AssertionError(
                f"assert_split: {kernel.name}: result {i} is not that of like=: {told}"
            )
    for parts in _ways(splits):
        told = difference_of_parts(kernel, operands, whole, splits, parts)
        if told is not None:
            names_of = ", ".join(kernel.shown(letter, splits) for letter in parts)
            raise AssertionError(
                f"assert_split: {kernel.name}, {told} ({splits}). If it needs them whole, write "
                f"whole=[{names_of}]"
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
