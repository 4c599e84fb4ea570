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

from .lines import calling_frame
from .text import abridged, counted


@dataclass(frozen=True)
class Fault:
    """One problem with a request.

    **Attributes:**

    - `path`: the leaf, as text; empty if the fault is not about a single leaf.
    - `shape`: the leaf's shape, or None.
    - `request`: the requested placement.
    - `reason`: why it is impossible.
    - `fix`: what to write instead.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        (fault,) = mylib.explain({"w": jnp.ones(3)}, P("data"), mesh).faults
        assert (fault.path, fault.shape) == ("['w']", (3,))
        print(fault.reason, fault.fix)
        ```
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

    - `faults`: a tuple of `mylib.errors.Fault`.

    !!! Example

        ```python
        try:
            mylib.filter_shard(jnp.ones(3), P("data"), mesh=mylib.make_mesh(data=8))
        except mylib.PlacementError as error:
            (fault,) = error.faults
            print(fault.reason, fault.fix)
        ```
    """

    _beginning: ClassVar[str] = "can't place"
    _request: ClassVar[str] = "asked for"


class ReplicaError(_FaultyLeavesError):
    """Copies that should be equal differ. The message names every such array.

    **Attributes:**

    - `faults`: a tuple of `mylib.errors.Fault`.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        weights = mylib.filter_shard(jnp.ones((4, 4)), P(), mesh=mesh)
        try:
            mylib.check_replicas(weights)
        except mylib.errors.ReplicaError as error:
            print(error.faults)
        ```
    """

    _beginning: ClassVar[str] = "copies differ in"
    _request: ClassVar[str] = "it is placed as"


class AuditError(MylibError, ValueError):
    """`mylib.audit` can't read a compiled program, or a part of it. There is no report then: an
    incomplete number would be worse than none. Or `mylib.testing.run_here` can't compute it.

    !!! Example

        ```python
        try:
            mylib.audit("HloModule of_another_compiler")
        except mylib.errors.AuditError as error:
            print(error)
        ```
    """


class NotHereError(MylibError, RuntimeError):
    """Raised instead of running something on a machine that you don't have: programs can
    only be compiled for it.

    !!! Example

        ```python
        machines = mylib.machines
        try:
            mesh = machines.gpu("h100").mesh(data=-1)
            make = mylib.filter_jit(jnp.zeros, out_shardings=P("data"), mesh=mesh)
            make(8)
        except (machines.NotHereError, machines.CompilerError) as error:
            print(error)  # `make.lower(8).compile()` works
        ```
    """


def not_here(name: str) -> NotHereError:
    return NotHereError(
        f"{name} can't be called: its devices are those of a machine that you don't have, which "
        "can compile, not run. Call .lower(...).compile()"
    )


class TeamError(MylibError, RuntimeError):
    """The processes of a `mylib.elastic.Team` can't go on, or not with this one.

    **Attributes:**

    - `restart`: whether all processes should end with the status `mylib.elastic.RESTART` and be
        started again. If not, another process has raised an error of its own, or the others go on
        without this one.

    !!! Example

        ```python
        import sys

        def run(train):
            try:
                train()
            except mylib.errors.TeamError as error:
                print(error)
                sys.exit(mylib.elastic.RESTART if error.restart else 1)
        ```
    """

    def __init__(self, message: str, restart: bool):
        super().__init__(message)
        self.restart = restart


class SavedProgramError(MylibError, ValueError):
    """A compiled program can't be saved, or a file can't be used as one: it is something else, it
    is damaged, or its program is for other versions, devices, arguments or code. Nothing has been
    loaded then.

    !!! Example

        ```python
        import pathlib, tempfile

        x = jnp.ones(8)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "step.mylib")
            path.write_text("something else")
            try:
                mylib.load_compiled(path, mylib.filter_jit(lambda x: x + 1), x)
            except mylib.errors.SavedProgramError as error:
                print(error)
        ```
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


def explained(error: BaseException, words: str) -> None:
    """Puts an explanation before what an error says, once: logs show an error's text, and not
    always its notes. Errors with a text of their own making get a note.
    """
    if not words or words in all_words(error):
        return
    if len(error.args) == 1 and str(error) == str(error.args[0]):
        error.args = (f"{words}\n{error.args[0]}",)
    else:
        error.add_note(words)


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
    if count < 2:
        return "\n".join([f"{beginning} {what}:", *listed(alike, where)])
    # The first line has a cause: that of all leaves, or of the first one.
    ((request, _, instead), named), *others = alike.items()
    if others:
        first = (
            f"{beginning} {what}; the first: {next(iter(named), 'the tree')}: {faults[0].reason}"
        )
        return "\n".join([first, *listed(alike, where)])
    lines = [f"{beginning} {what}: {faults[0].reason}", f"    {request}", f"    {instead}"]
    return "\n".join([*lines, *listed({(): named}, where, len(lines))])


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
        # A fault of the tree isn't one of the leaf above it.
        for line in (
            *(f"  {name}" for name in names or ["the whole tree"] * (len(alike) > 1)),
            *(f"    {text}" for text in lines),
        )
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
        alike.setdefault(starred(name), []).append(name)
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
    return f"{with_stars(names)}, {len(names)} leaves"


def starred(name: str) -> str:
    """A name with a star for each index."""
    return _INDEX.sub("*", name)


def with_stars(names: Sequence[str]) -> str:
    """One name for several, with a star for each index that differs: `.layers[*].weight`."""
    columns = zip(*map(_INDEX.findall, names), strict=True)
    texts = iter([column[0] if len({*column}) == 1 else "*" for column in columns])
    return _INDEX.sub(lambda _: next(texts), names[0])


class MylibWarning(UserWarning):
    """The base class of all warnings of this package.

    !!! Example

        ```python
        import warnings

        warnings.filterwarnings("ignore", category=mylib.MylibWarning)
        ```
    """


class CapturedArrayWarning(MylibWarning):
    """A function compiled by `mylib.filter_jit` captures an array of 1 MiB or more. The array
    becomes a constant of the compiled program, replicated on every device.

    !!! Example

        ```python
        table = jnp.ones((512, 1024))
        # An argument, not `lambda i: table[i]`.
        look_up = mylib.filter_jit(lambda table, i: table[i])
        row = look_up(table, jnp.asarray(3))
        ```
    """


class DonationWarning(MylibWarning):
    """A function with `donate="warn"` or `"warn-except-first"` was given an array whose memory no
    result could reuse. Or a function with `donate="all-except-first"` returns new versions of
    several arguments, and the spared first argument is itself returned in a new version.

    !!! Example

        ```python
        step = mylib.filter_jit(lambda x: x + 1, donate="warn")
        x = step(jnp.ones(8))  # the result has the argument's memory
        ```
    """


class PlacementWarning(MylibWarning):
    """A function compiled by `mylib.filter_jit` is given arrays that are placed otherwise than
    by `kept` of its `mylib.fully_shard` or `mylib.by_matrix`, such as replicated weights.
    They need the memory on each device that `kept` is there to save, or are moved in each call.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        kept = mylib.rules.fsdp("data")

        @mylib.filter_jit(in_shardings={"x": P("data")}, mesh=mesh)
        def loss(model, x):
            model = mylib.fully_shard(model, eqx.nn.Linear, kept, mesh=mesh)
            return jnp.mean(jax.vmap(model)(x))

        model = eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0))
        model = mylib.filter_shard(model, kept, mesh=mesh)  # else it warns
        loss(model, jnp.ones((16, 64)))
        ```
    """


class PrefetchWarning(MylibWarning):
    """Layers of `mylib.fully_shard` with `prefetch=` are called in programs of their own, such
    as a `jax.checkpoint` of each layer's call, so they can't gather their weights in advance.

    !!! Example

        ```python
        import warnings

        warnings.filterwarnings(  # in tests
            "error", category=mylib.errors.PrefetchWarning
        )
        ```
    """


class RecompilationWarning(MylibWarning):
    """A function was compiled a second time for the same shapes, because its results, passed back
    in, have other shardings than its first arguments.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        rows = P("data")  # the same in and out, so one compilation is enough
        step = mylib.filter_jit(
            lambda x: x + 1, in_shardings=rows, out_shardings=rows, mesh=mesh
        )
        x = step(step(jnp.ones(8)))
        ```
    """


class ReplicatedWarning(MylibWarning):
    """A function compiled by `mylib.filter_jit` computes the same on all devices: its matrix
    products and convolutions are not divided among them. Usually a batch is not placed, such as a
    NumPy array without `in_shardings`; or `jax.lax.map` goes over sharded rows, which XLA gathers:
    call it in `mylib.filter_shard_map`; or an optimiser such as Muon multiplies whole matrices,
    which are gathered for one product after the other: use `mylib.by_matrix`; or a loop, such
    as over the pieces of a batch, gathers the same weights in each iteration: use
    `mylib.accumulate`, or ignore it if the gathered weights don't fit in memory.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        # Without in_shardings all devices would compute the same.
        predict = mylib.filter_jit(
            lambda w, x: x @ w, in_shardings=(P(), P("data")), mesh=mesh
        )
        y = predict(np.ones((64, 64), np.float32), np.ones((16, 64), np.float32))
        ```
    """


class StaticNumberWarning(MylibWarning):
    """A Python number among the arguments changes at each call. It is static, so each value
    compiles another program; convert it by `jax.numpy.asarray` to have it traced.

    !!! Example

        ```python
        scaled = mylib.filter_jit(lambda x, by: x * by)
        for by in range(3):
            scaled(jnp.ones(8), jnp.asarray(by))  # one program for all
        ```
    """


class SummedTwiceWarning(MylibWarning):
    """In a function of `mylib.filter_shard_map` a gradient is summed over the devices twice: by
    JAX, and by the function's own `psum` or `pmean`.

    JAX sums gradients with respect to parameters that are the same on all devices. A `pmean` of the
    sum leaves it as it is: `n` times as large as the mean over `n` devices. A `psum` multiplies it
    by `n`. Take the gradient with respect to `mylib.vary` of the parameters instead.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)

        @mylib.filter_shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        def gradient(w, x):
            w = mylib.vary(w, "data")  # without it, `pmean` warns
            return jax.lax.pmean(jax.grad(lambda w: jnp.sum(w * x))(w), "data")

        gradient(jnp.ones(()), jnp.arange(8.0))
        ```
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


# Tracebacks and pickles then show the public names.
for _class in (Fault, *MylibError.__subclasses__(), *MylibWarning.__subclasses__(), ReplicaError):
    _class.__module__ = "mylib.errors"
for _class in (MylibError, MylibWarning, PlacementError):
    _class.__module__ = "mylib"
NotHereError.__module__ = "mylib.machines"
