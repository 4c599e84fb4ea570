"""Errors that name every leaf that can't be placed, or whose copies differ; and warnings with their
categories.
"""

import math
import re
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ._lines import calling_frame
from ._text import abridged, counted


@dataclass(frozen=True)
class Fault:
    """One problem with a request.

    **Attributes:**

    - `path`: the leaf, as text; empty if the fault is not about a single leaf.
    - `shape`: the leaf's shape, or None.
    - `request`: the requested placement.
    - `reason`: why it is impossible.
    - `fix`: what to write instead.
    """

    path: str
    shape: tuple[int, ...] | None
    request: str
    reason: str
    fix: str


def because(reason: str, fix: str, request: str = "", path: str = "") -> Fault:
    """A fault without a leaf: it is about the whole tree, or its leaf is added by `Leaves.at`."""
    return Fault(path, None, request, reason, fix)


class MylibError(Exception):
    """The base class of all errors of this package. Each error also has a base class of Python's
    own, such as `ValueError`.

    !!! Example

        ```python
        try:
            mylib.filter_shard(jnp.ones(3), P("data"), mesh=mylib.make_mesh(data=8))
        except mylib.MylibError as error:
            print(error)
        ```
    """


class _FaultyLeavesError(MylibError, ValueError):
    """An error that names leaves, with the problem of each."""

    _beginning: ClassVar[str]
    _request: ClassVar[str]

    def __init__(self, faults: Sequence[Fault]):
        self.faults: tuple[Fault, ...] = tuple(faults)
        super().__init__(_describe(self.faults, self._beginning, self._request))

    def __reduce__(self) -> tuple[type["_FaultyLeavesError"], tuple[tuple[Fault, ...]]]:
        return type(self), (self.faults,)


class PlacementError(_FaultyLeavesError):
    """A request can't be carried out. The message names every faulty leaf; it is raised before
    anything has been moved, donated or compiled. Many leaves are shortened to
    `.layers[0..299].weight`, or counted; all of them are in `faults`.

    **Attributes:**

    - `faults`: a tuple of [`mylib.Fault`][].
    """

    _beginning: ClassVar[str] = "can't place"
    _request: ClassVar[str] = "asked for"


class ReplicaError(_FaultyLeavesError):
    """Copies that should be equal differ. The message names every such array.

    **Attributes:**

    - `faults`: a tuple of [`mylib.Fault`][].
    """

    _beginning: ClassVar[str] = "copies differ in"
    _request: ClassVar[str] = "it is placed as"


class AuditError(MylibError, ValueError):
    """[`mylib.audit`][] can't read a compiled program, or a part of it. There is no report then: an
    incomplete number would be worse than none.
    """


class NotHereError(MylibError, RuntimeError):
    """Raised instead of running something on a machine that you don't have: programs can
    only be compiled for it.
    """


def not_here(name: str) -> NotHereError:
    return NotHereError(
        f"{name} can't be called: its devices are those of a machine that you don't have, which "
        "can compile, not run. Call .lower(...).compile()"
    )


class SavedProgramError(MylibError, ValueError):
    """A compiled program can't be saved, or a file can't be used as one: it is something else, it
    is damaged, or its program is for other versions, devices, arguments or code. Nothing has been
    loaded then.
    """


def in_words(error: BaseException) -> str:
    """The error in one line, with its notes; only its type if formatting it fails. For readers, and
    for other processes: the end of a long one is left out.
    """
    return abridged(all_words(error))


def all_words(error: BaseException) -> str:
    """`in_words`, however long it is."""
    try:
        text = "".join(traceback.format_exception_only(error))
        return " ".join(text.split("\n")).strip()
    except Exception:
        # A user's error may raise anything while it is formatted.
        return type(error).__name__


def _describe(faults: Sequence[Fault], beginning: str, requested: str) -> str:
    # Leaves that share a fault share its explanation.
    alike: dict[tuple[str, ...], list[str]] = {}
    for fault in faults:
        shape = "" if fault.shape is None else f" {fault.shape}"
        lines = f"{requested}: {fault.request}", f"but {fault.reason}", f"instead: {fault.fix}"
        named = alike.setdefault(lines, [])
        named += [fault.path + shape] if fault.path else []
    # A leaf can have several faults, and a fault can be about the whole tree instead of a leaf.
    count = len({name for named in alike.values() for name in named})
    what = counted(count, "leaf", "leaves") if count else "the tree"
    where = "all of them are in `.faults`"
    if count > 1 and len(alike) == 1:
        # One cause of many leaves comes before their names.
        ((request, _, instead), named) = next(iter(alike.items()))
        first = [f"{beginning} {what}: {faults[0].reason}", f"    {request}", f"    {instead}"]
        return "\n".join([*first, *listed({(): named}, where, len(first))])
    return "\n".join([f"{beginning} {what}:", *listed(alike, where)])


# The most lines of an error that a person reads, and the most explanations in them.
_LINES = 40
_EXPLANATIONS = 7


def listed(alike: dict[tuple[str, ...], list[str]], where: str, above: int = 1) -> list[str]:
    """The lines of a message: each explanation below the names of its leaves. If there are too many
    lines, names that differ by an index are combined, and the rest is left out; `where` says where
    to find it. `above` is the number of lines above them.
    """
    lines = _lines_of(alike)
    if len(lines) + above <= _LINES:
        return lines
    shown = dict(list(alike.items())[:_EXPLANATIONS])
    longest = max(map(len, shown))
    room = max(2, (_LINES - 1 - above) // len(shown) - longest)
    lines = _lines_of({key: _some(folded(names), room) for key, names in shown.items()})
    rest = list(alike.values())[_EXPLANATIONS:]
    if rest:
        left = counted(len(rest), "more fault")
        leaves = counted(sum(map(len, rest)), "leaf", "leaves")
        lines += [f"and {left}" + (f", of {leaves}" if any(rest) else "")]
    return [*lines, where]


def _lines_of(alike: dict[tuple[str, ...], list[str]]) -> list[str]:
    return [
        line
        for lines, names in alike.items()
        for line in (*(f"  {name}" for name in names), *(f"    {text}" for text in lines))
    ]


def _some(names: dict[str, int], room: int) -> list[str]:
    """As many of the names as there is room for; a name may stand for several leaves."""
    if len(names) <= room:
        return list(names)
    rest = sum(list(names.values())[room - 1 :])
    return [*list(names)[: room - 1], f"and {rest} more"]


_INDEX = re.compile(r"(?<=\[)\d+(?=\])")


def folded(names: Sequence[str]) -> dict[str, int]:
    """Combines names that differ only by indices, and counts them."""
    alike: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        alike.setdefault(_INDEX.sub("*", name), []).append(name)
    return {_common(group): len(group) for group in alike.values()}


def _common(names: Sequence[str]) -> str:
    """One name for several: `.layers[0..299].weight`, or `.layers[*].weight, 7 leaves` if some
    indices are missing.
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
    """A function compiled by [`mylib.filter_jit`][] captures an array of 1 MiB or more. The array
    becomes a constant of the compiled program, replicated on every device.
    """


class DonationWarning(MylibWarning):
    """A function with `donate="warn"` or `"warn-except-first"` was given an array whose memory no
    result could reuse. Or a function with `donate="all-except-first"` returns new versions of
    several arguments, and the spared first argument is itself returned in a new version.
    """


class PlacementWarning(MylibWarning):
    """A function compiled by [`mylib.filter_jit`][] is given arrays that are placed otherwise than
    by `kept` of its [`mylib.fully_shard`][] or [`mylib.by_matrix`][], such as replicated weights.
    They need the memory on each device that `kept` is there to save, or are moved in each call.
    """


class PrefetchWarning(MylibWarning):
    """Layers of [`mylib.fully_shard`][] with `prefetch=` are called in programs of their own, such
    as a `jax.checkpoint` of each layer's call, so they can't gather their weights in advance.
    """


class RecompilationWarning(MylibWarning):
    """A function was compiled a second time for the same shapes, because its results, passed back
    in, have other shardings than its first arguments.
    """


class ReplicatedWarning(MylibWarning):
    """A function compiled by [`mylib.filter_jit`][] computes the same on all devices: its matrix
    products and convolutions are not divided among them. Usually a batch is not placed, such as a
    NumPy array without `in_shardings`; or `jax.lax.map` goes over sharded rows, which XLA gathers:
    call it in [`mylib.filter_shard_map`][]; or an optimiser such as Muon multiplies whole matrices,
    which are gathered for one product after the other: use [`mylib.by_matrix`][]; or a loop, such
    as over the pieces of a batch, gathers the same weights in each iteration: use
    [`mylib.accumulate`][], or ignore it if the gathered weights don't fit in memory.
    """


class StaticNumberWarning(MylibWarning):
    """A Python number among the arguments changes at each call. It is static, so each value
    compiles another program; convert it by `jax.numpy.asarray` to have it traced.
    """


class SummedTwiceWarning(MylibWarning):
    """In a function of [`mylib.filter_shard_map`][] a gradient is summed over the devices twice: by
    JAX, and by the function's own `psum` or `pmean`.

    JAX sums gradients with respect to parameters that are the same on all devices. A `pmean` of the
    sum leaves it as it is: `n` times as large as the mean over `n` devices. A `psum` multiplies it
    by `n`. Take the gradient with respect to [`mylib.vary`][] of the parameters instead.
    """


class WrongArgumentWarning(MylibWarning):
    """What is placed is probably not what was meant: an optimiser, which has no arrays, instead of
    its state; or a model where the placement of a batch is given.
    """


def warn(message: str, category: type[MylibWarning]) -> None:
    """Warns at the user's line that called this package, directly or through other packages."""
    frame = calling_frame()
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__", "<string>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
