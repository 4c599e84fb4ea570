"""Errors that name every leaf whose placement can't be had, or whose copies differ; and warnings,
each of a category of its own.
"""

import inspect
import math
import re
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import ClassVar


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a request.

    **Attributes:**

    - `path`: the leaf, as text; empty where the fault is not one leaf's.
    - `shape`: the leaf's shape, or None.
    - `request`: what was asked of it.
    - `reason`: why that can't be done.
    - `mend`: what to write instead.
    """

    path: str
    shape: tuple[int, ...] | None
    request: str
    reason: str
    mend: str


class PlacementError(ValueError):
    """A request that can't be carried out. It names every faulty leaf, and is raised before
    anything has been moved, donated or compiled. Many leaves are named in few lines, such as
    `.layers[0..299].weight`, or counted; all of them are in `faults`.

    **Attributes:**

    - `faults`: a tuple of [`mylib.Fault`][].
    """

    _beginning: ClassVar[str] = "can't place"
    _request: ClassVar[str] = "asked for"

    def __init__(self, faults: Sequence[Fault]):
        self.faults: tuple[Fault, ...] = tuple(faults)
        super().__init__(_describe(self.faults, self._beginning, self._request))

    def __reduce__(self) -> tuple[type["PlacementError"], tuple[tuple[Fault, ...]]]:
        return type(self), (self.faults,)


class ReplicaError(PlacementError):
    """Copies that should be equal differ. It names every array of which they do.

    **Attributes:**

    - `faults`: a tuple of [`mylib.Fault`][].
    """

    _beginning: ClassVar[str] = "the copies differ of"
    _request: ClassVar[str] = "it is placed as"


class AuditError(ValueError):
    """A compiled program, or a part of it, that [`mylib.audit`][] does not understand. There is no
    report then: a number that leaves something out would be worse than none.
    """


def in_words(error: BaseException) -> str:
    """The error in a line, with its notes; its kind, if it can't say what it is."""
    try:
        return " ".join("".join(traceback.format_exception_only(error)).split("\n")).strip()
    except Exception:
        # It may be anybody's, and do anything.
        return type(error).__name__


def _describe(faults: Sequence[Fault], beginning: str, requested: str) -> str:
    # Leaves that share a fault share its explanation.
    alike: dict[tuple[str, ...], list[str]] = {}
    for fault in faults:
        shape = "" if fault.shape is None else f" {fault.shape}"
        told = f"{requested}: {fault.request}", f"but {fault.reason}", f"instead: {fault.mend}"
        named = alike.setdefault(told, [])
        named += [fault.path + shape] if fault.path else []
    # Of one leaf several things can be wrong; of the whole tree, too, and of no leaf by itself.
    count = len({name for named in alike.values() for name in named})
    what = _count(count, "leaf", "leaves") if count else "the tree"
    return "\n".join([f"{beginning} {what}:", *listed(alike, "all of them are in `.faults`")])


# How many lines of an error a person reads, and how many explanations these have room for.
_LINES = 40
_EXPLANATIONS = 7


def listed(alike: dict[tuple[str, ...], list[str]], where: str) -> list[str]:
    """What is told of leaves, each time under the names of those that it is told of. If that is
    more than a person reads, names that differ by an index become one, and the rest is left out;
    `where` says where it is.
    """
    lines = _lines_of(alike)
    if len(lines) < _LINES:
        return lines
    shown = dict(list(alike.items())[:_EXPLANATIONS])
    told = max(map(len, shown))
    room = max(2, (_LINES - 2) // len(shown) - told)
    lines = _lines_of({key: _some(folded(names), room) for key, names in shown.items()})
    rest = list(alike.values())[_EXPLANATIONS:]
    if rest:
        left = _count(len(rest), "more fault", "more faults")
        leaves = _count(sum(map(len, rest)), "leaf", "leaves")
        lines += [f"and {left}" + (f", of {leaves}" if any(rest) else "")]
    return [*lines, where]


def _count(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def _lines_of(alike: dict[tuple[str, ...], list[str]]) -> list[str]:
    return [
        line
        for told, names in alike.items()
        for line in (*(f"  {name}" for name in names), *(f"    {text}" for text in told))
    ]


def _some(names: dict[str, int], room: int) -> list[str]:
    """As many of the names, each of several leaves, as there is room for."""
    if len(names) <= room:
        return list(names)
    rest = sum(list(names.values())[room - 1 :])
    return [*list(names)[: room - 1], f"and {rest} more"]


_INDEX = re.compile(r"(?<=\[)\d+(?=\])")


def folded(names: Sequence[str]) -> dict[str, int]:
    """The names, those that differ by indices as one, and how many each stands for."""
    alike: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        alike.setdefault(_INDEX.sub("*", name), []).append(name)
    return {_common(group): len(group) for group in alike.values()}


def _common(names: Sequence[str]) -> str:
    """One name for several: `.layers[0..299].weight`, or `.layers[*].weight, 7 leaves` if some are
    missing in between.
    """
    if len(names) == 1:
        return names[0]
    columns = list(zip(*(map(int, _INDEX.findall(name)) for name in names), strict=True))
    ranges = [(min(column), max(column)) for column in columns]
    texts = iter([str(low) if low == high else f"{low}..{high}" for low, high in ranges])
    count = math.prod(high - low + 1 for low, high in ranges)
    if count == len(names):
        return _INDEX.sub(lambda _: next(texts), names[0])
    texts = iter([str(low) if low == high else "*" for low, high in ranges])
    return f"{_INDEX.sub(lambda _: next(texts), names[0])}, {len(names)} leaves"


class MylibWarning(UserWarning):
    """The base class of all warnings of this package.

    !!! Example

        ```python
        import warnings

        warnings.filterwarnings("ignore", category=mylib.MylibWarning)
        ```
    """


class CapturedArrayWarning(MylibWarning):
    """A function compiled by [`mylib.filter_jit`][] uses an array of 1 MiB or more that it finds
    outside of its arguments. The array becomes a constant of the compiled program, whole on every
    device.
    """


class DonationWarning(MylibWarning):
    """A function with `donate="warn"` or `"warn-except-first"` was given an array whose memory no
    result could use.
    """


class RecompilationWarning(MylibWarning):
    """A function was compiled a second time for the same shapes, because its own results were not
    where its arguments had been.
    """


class StaticNumberWarning(MylibWarning):
    """A Python number that is an argument changes at each call. It is static, so that each of its
    values compiles another program; `jax.numpy.asarray` of it would be traced.
    """


class SummedTwiceWarning(MylibWarning):
    """In a function of [`mylib.filter_shard_map`][] a gradient is summed over the devices by JAX,
    and by the function's own `psum` or `pmean` as well.

    JAX sums gradients with respect to parameters that are the same on all devices. A `pmean` of the
    sum leaves it as it is: `n` times as large as the mean over `n` devices. A `psum` multiplies it
    by `n`. Take the gradient with respect to [`mylib.vary`][] of the parameters instead.
    """


# While a function is traced, these are between its caller and the code that warns.
_PASSED_THROUGH = (__name__.partition(".")[0], "contextlib", "equinox", "jax")


def warn(message: str, category: type[MylibWarning]) -> None:
    """Warns at the line that has called this package, or JAX or Equinox and they this package."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and _package_of(frame) in _PASSED_THROUGH:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)


def _package_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
