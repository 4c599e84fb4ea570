"""Whether a function computes of parts what it computes of the whole."""

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ..compat import names
from ..jaxprs import all_equations, is_opaque, shape_of
from .axes import Called
from .reading import splits_like
from .splits import Letters, Splits

# For letters, the number of their parts, or the place of one part.
Counts = Mapping[str, int]
Array = jax.Array | np.ndarray
Types = Sequence[jax.ShapeDtypeStruct]
Run = Callable[..., Sequence[Any]]
# References whose operations make more numbers than these, all together, aren't run.
_MOST_NUMBERS = 1 << 22
_NOT_RUN = {names.WHILE, names.CUDNN_FORWARD, names.CUDNN_BACKWARD}
# What functions raise for sizes that they weren't written for.
_UNFIT = (TypeError, ValueError, ArithmeticError, LookupError, AssertionError)


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Adds a note to what is raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        raise


def check_reference(kernel: Called, splits: Splits, types: Types) -> None:
    """Raises if a reference computes something else of parts, such as one that divides by the
    number of its rows: that is in its code, not in its operations. Once for each kernel and types.
    """
    given = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in types)
    wide = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
    # Another thread has no mesh, and traces nothing.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(_checked, kernel, splits, given, wide).result()


@functools.lru_cache(maxsize=1024)
def _checked(kernel: Called, splits: Splits, types: Types, wide: bool) -> None:
    note = noted(f"opaque: raised while like= of {kernel.name} was called for parts")
    with jax.enable_x64(wide), jax.default_device(jax.local_devices()[0]), note:
        run = jax.jit(lambda *arrays: kernel.reference(arrays)[0])
        if math.isinf(_numbers(jax.make_jaxpr(run)(*types))):
            return
        fits = [x for x in splits.parts if _program_of(run, _resized(splits, types, {x}))]
        small = _small(run, splits, types, fits)
        if small is None:
            return
        rng = np.random.default_rng(0)
        arrays = [_random(rng, type_) for type_ in small]
        whole = run(*arrays)
        for letter in fits:
            parts = {letter: _prime(splits.parts[letter])}
            told = difference_of_parts(run, arrays, whole, splits, parts, ends=True)
            if told is not None:
                raise TypeError(
                    f"opaque: write whole=[{kernel.shown(letter, splits)}] for {kernel.name}, or a "
                    f"like= that is right for arrays of any size there: {told}, though its "
                    "operations treat each part by itself. check=False leaves this check out"
                )


def _small(run: Run, splits: Splits, types: Types, fits: Collection[str]) -> Types | None:
    """Smaller operands: what may be split is a part of itself, the rest as it is, or smaller, if
    the reference takes that; None if it can't be run.
    """
    small = _resized(splits, types, fits or splits.parts)
    # If it takes parts of no dimension, this raises what it says.
    program = _program_of(run, small) if fits else jax.make_jaxpr(run)(*small)
    if program is not None and _numbers(program) > _MOST_NUMBERS:
        small = _resized(splits, types, splits.letters)
        program = _program_of(run, small)
        if program is not None and str(splits_like(program)) != str(splits):
            return None
    if program is None or _numbers(program) > _MOST_NUMBERS:
        return None
    return small


def _program_of(run: Run, types: Types) -> ClosedJaxpr | None:
    """None if the reference wasn't written for these sizes, as attention whose keys and values
    must be of one width.
    """
    try:
        return jax.make_jaxpr(run)(*types)
    except _UNFIT:
        return None


def _resized(splits: Splits, types: Types, letters: Collection[str]) -> Types:
    units: dict[str, int] = {}
    for names_of, type_ in zip(splits.operands, types, strict=True):
        for letter, n in zip(names_of, type_.shape, strict=True):
            units[letter] = math.gcd(units.get(letter, 0), n if n > 1 else 0)
    units.update(splits.parts)

    def resized(letter: str, n: int) -> int:
        unit = units[letter]
        return n // unit * _few(unit) if letter in letters and n > 1 else n

    return [
        jax.ShapeDtypeStruct(tuple(map(resized, names_of, x.shape)), x.dtype)
        for x, names_of in zip(types, splits.operands, strict=True)
    ]


def _few(count: int) -> int:
    """The smallest number of which parts are more than one, if there is such."""
    prime = _prime(count)
    return 2 * prime if count % (2 * prime) == 0 else prime


def _prime(count: int) -> int:
    return next(n for n in range(2, count + 1) if count % n == 0)


def _numbers(program: ClosedJaxpr) -> float:
    """How many numbers the operations of a program make; infinite if it can't be run anywhere, or
    might not end with random operands.
    """
    total = 0.0
    for aval in program.in_avals:
        if not jnp.issubdtype(aval.dtype, jnp.number) and aval.dtype != bool:
            return math.inf
    for eqn in all_equations(program):
        if is_opaque(eqn) or eqn.primitive.name in _NOT_RUN:
            return math.inf
        total += sum(math.prod(shape_of(x.aval)) for x in eqn.outvars)
    return total


def _random(rng: np.random.Generator, type_: jax.ShapeDtypeStruct) -> np.ndarray:
    is_inexact = jnp.issubdtype(type_.dtype, jnp.inexact)
    numbers = rng.normal(size=type_.shape) if is_inexact else rng.integers(0, 2, size=type_.shape)
    return numbers.astype(type_.dtype)


def difference_of_parts(
    run: Run,
    operands: Sequence[Array],
    whole: Sequence[Array],
    splits: Splits,
    parts: Counts,
    ends: bool = False,
) -> str | None:
    """How the results of parts differ from those of the whole; None if they don't. With `ends`
    only the first and the last part are computed.
    """
    places = list(_places(parts))
    for at in (places[0], places[-1]) if ends else places:
        results = run(*_part(operands, splits.operands, parts, at))
        wanted = _part(whole, splits.results, parts, at)
        for i, told in enumerate(map(difference, results, wanted)):
            if told is not None:
                shown = ", ".join(f"{letter!r} in {count}" for letter, count in parts.items())
                return f"with {shown} parts result {i} differs from that of the whole ({told})"
    return None


def _places(parts: Counts) -> Iterator[dict[str, int]]:
    for at in itertools.product(*map(range, parts.values())):
        yield dict(zip(parts, at, strict=True))


def _part(
    arrays: Sequence[Array], letters: Sequence[Letters], parts: Counts, at: Counts
) -> list[Array]:
    """The parts of arrays that one device has."""

    def cut(size: int, letter: str) -> slice:
        if letter not in parts or size == 1:
            return slice(None)
        length = size // parts[letter]
        return slice(at[letter] * length, (at[letter] + 1) * length)

    return [
        x[tuple(map(cut, x.shape, names_of))] for x, names_of in zip(arrays, letters, strict=True)
    ]


def difference(array: Array, wanted: Array) -> str | None:
    """How an array differs from another, by more than the square root of its precision."""
    if (array.shape, array.dtype) != (wanted.shape, wanted.dtype):
        shown = f"{array.dtype}{list(array.shape)}"
        return f"it is {shown}, not {wanted.dtype}{list(wanted.shape)}"
    a, b = (np.asarray(x, np.result_type(np.float64, x.dtype)) for x in (array, wanted))
    is_inexact = jnp.issubdtype(array.dtype, jnp.inexact)
    near = jnp.finfo(array.dtype).eps ** 0.5 if is_inexact else 0
    with np.errstate(invalid="ignore"):
        off = abs(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, a - b)).max(initial=0)
    largest = abs(b[np.isfinite(b)]).max(initial=1e-30)
    return None if off <= near * largest else f"by {off:.3g} of {largest:.3g}"
