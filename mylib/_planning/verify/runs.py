"""`verify`: does a step compute on many devices what it computes on one."""

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, Sharding

from ..._core.compat import names
from ..._core.contexts import in_own_dtypes, on_one_device
from ..._core.errors import (
    AuditError,
    PlacementWarning,
    ReplicaError,
    explained,
    folded,
    in_words,
    listed,
    starred,
)
from ..._core.jaxprs import all_equations, line_of
from ..._core.known_faults import MISREAD, MISREAD_OFF, known_faults_in
from ..._core.placement import is_described, is_here, no_mesh
from ..._core.status import StatusLine
from ..._core.text import counted, some
from ..._core.tree import Outline, is_array, outlined
from ..._moving.processes import check_replicas
from ..._programs.interpreter import run_here
from ..._training.jit import filter_jit
from ..._training.matrices import to_plain
from .arguments import alone, filled, numbers_of, widened
from .judge import Compared, are_numbers, compare
from .lines import first_difference
from .recorded import Runnable
from .rounding import Roundings

# How often the reference is run with changed roundings; and how often again, if a result differs by
# more. The sign of a gradient near zero may be the same in a few.
_AGAIN = 2, 14


class VerifyError(AssertionError):
    """A step differs from the same step on one device. `report` is the `mylib.testing.Verified`
    with all of its results.

    !!! Example

        ```python
        step = mylib.filter_jit(lambda x: 2 * x)
        try:
            mylib.testing.verify(step, jnp.ones(8))
        except mylib.testing.VerifyError as error:
            print(error.report.wrong)
        ```
    """

    def __init__(self, report: "Verified"):
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class Verified:
    """What `mylib.testing.verify` has compared.

    **Attributes:**

    - `name`: the step's name.
    - `wide`: the results in float64; None if the step can't be traced in it, for the reason `why`.
    - `own`: the results in the step's own dtypes; empty for a machine that you don't have.
    - `replicas`: copies that differ; empty if none do.
    - `line`: the first line whose values differ, and by how much; empty if that is unknown.
    - `known`: known faults of compilers that the step may have met.
    - `differs`: whether any result differs by more than rounding explains, or any copies differ.
    - `wrong`: the results that differ.

    !!! Example

        ```python
        step = mylib.filter_jit(lambda x: 2 * x)
        verified = mylib.testing.verify(step, jnp.ones(8))
        assert not verified.differs
        print(verified)
        ```
    """

    name: str
    wide: tuple[Compared, ...] | None
    own: tuple[Compared, ...]
    replicas: str = ""
    line: str = ""
    why: str = ""
    known: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        return bool(self.replicas or self.wrong)

    @property
    def wrong(self) -> list[Compared]:
        return [one for one in (*(self.wide or ()), *self.own) if one.differs]

    def __str__(self) -> str:
        count = counted(len(self.own or self.wide or ()), "result")
        if not self.differs:
            most = [f"{_largest(self.wide).difference:.2g} in float64"] if self.wide else []
            if self.own:
                one = _largest(self.own)
                explained = f"(rounding explains {one.rounding:.1g})"
                most += [f"as trained {one.difference:.2g} {explained}"]
            agree = f"agree{'s' * (count == '1 result')} with one device"
            return f"{self.name}: {count} {agree}: {'; '.join(most)}{self._unseen}"
        wrong, lines = self._alike, []
        if wrong:
            names = len({one.name for one in self.wrong})
            beginning = f"{names} of {count} differ{'s' * (names == 1)} from one device"
            several = "; the first" * (len(wrong) > 1)
            lines = [f"{self.name}: {beginning}{several}: {wrong[0]}"]
            lines += listed({(): wrong}, "all of them are in `.report.wrong`") if several else []
        lines += [f"  {one}" for one in (self.replicas, self.line) if one]
        lines += [f"  a known fault: {one}" for one in self.known]
        return "\n".join(lines if wrong else [f"{self.name}: {lines[0].strip()}", *lines[1:]])

    @property
    def _alike(self) -> list[str]:
        """The results that differ, as trained only those that agree in float64. Of equal layers the
        worst stands for all.
        """
        in_wide = {result.name for result in self.wide or () if result.differs}
        told = [(result, "") for result in self.wide or ()]
        told += [(own, " (as trained)") for own in self.own if own.name not in in_wide]
        alike: dict[tuple[Any, ...], list[Compared]] = defaultdict(list)
        for result, how in told:
            if result.differs:
                alike[starred(result.name), result.shape, result.dtype, how].append(result)
        return [
            f"{replace(_largest(group), name=name)}{how}"
            for (*_, how), group in alike.items()
            for name in folded([result.name for result in group])
        ]

    @property
    def _unseen(self) -> str:
        odd = [x.name for x in self.own if not x.is_finite]
        lines = [f"(not compared in float64: {self.why})"] if self.why else []
        lines += [f"(NaN or infinite on one device, too: {some(odd)})"] if odd else []
        return "".join(f"\n{line}" for line in lines)


def _largest(compared: Sequence[Compared]) -> Compared:
    return max(compared, key=lambda x: x.difference)


def verify(
    step: Callable[..., Any],
    /,
    *args: Any,
    reference: Callable[..., Any] | None = None,
    high: int | None = None,
    seed: int = 0,
) -> Verified:
    """Runs a step as it is placed, on the available devices, and on one device, and compares
    all results: losses, gradients, updated weights, states. Simulated devices will do.

    The step runs twice: in float64, which tells a wrong program from rounding, and in its own
    dtypes, which is the program that is trained. How far rounding may reach is measured: the
    reference also runs with each operation's result changed by as much as rounding would.

    **Arguments:**

    - `step`: a function of `mylib.filter_jit`, `jax.jit` or `equinox.filter_jit`, the step of a
        plan (`plan.jit(step)`), or a function that is compiled here.
    - `args`: its arguments: arrays where the step expects them, or `jax.ShapeDtypeStruct`s, which
        are filled with random numbers. Zeros and ones hide mistakes, so new weights, biases and
        moments are better abstract. Nothing is donated.
    - `reference`: the function for one device. By default it is the step itself without its
        placements: those of this package, and `fully_shard`, do nothing there. A step with JAX's
        own constraints, or with `shard_map`, needs one.
    - `high`: random integers are below it, such as the size of a vocabulary.
    - `seed`: of the random numbers.

    If the step is for the mesh of a machine that you don't have (`mylib.machines`), its compiled
    program and that for one device are computed by `mylib.testing.run_here`, in float64 only.

    In float64 the arguments are float64, and `dtype=`, `reduce_dtype=` and `send_dtype=` of
    `fully_shard` are ignored; casts in the step stay, and so does the dtype of arrays that it
    captures. Other threads that use JAX meanwhile have float64, too.

    If there are several processes, all of them must call it.

    **Returns:**

    A `mylib.testing.Verified`: what was compared.

    **Raises:**

    `mylib.testing.VerifyError`, an `AssertionError`: each result that differs by more than
    rounding explains, copies that differ, and the first line of the step whose values differ.
    `TypeError` if the step needs a `reference`, or integers need `high`. `ValueError` if one device
    computes no finite number either.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)

        @mylib.filter_jit(in_shardings={"x": P("data")}, mesh=mesh)
        def loss(model, x):
            return jnp.mean(jax.vmap(model)(x) ** 2)

        model = eqx.nn.MLP(8, 8, 32, 2, key=jax.random.key(0))
        print(mylib.testing.verify(loss, model, jnp.ones((16, 8))))
        ```
    """
    if isinstance(step, eqx.Module) and any(map(inspect.isroutine, args)):
        raise TypeError("verify takes the function first: verify(step, model, batch)")
    __tracebackhide__ = True
    args = filled(args, high, seed)
    runs = _Runs(step, reference, args)
    traced = runs.traced(wide=False)
    device = _missing_device(traced.placed.program)
    if device is not None:
        report = Verified(runs.name, runs.in_numpy, ())
        if report.differs:
            known = runs.known_faults(traced.alone.program, device.platform)
            raise VerifyError(replace(report, known=known))
        return report
    own = runs.judged(traced)
    wide, why = None, ""
    try:
        traced_wide = runs.traced(wide=True)
    except (TypeError, ValueError) as error:
        why = in_words(error)
    else:
        wide = runs.judged(traced_wide)
        if any(one.differs for one in wide):
            traced = traced_wide
    replicas = runs.differing_replicas()
    report = Verified(runs.name, wide, own, replicas, why=why)
    if not report.differs:
        return report
    line = first_difference(traced.placed, traced.alone) if report.wrong else ""
    known = runs.known_faults(traced.placed.program, jax.default_backend())
    raise VerifyError(replace(report, line=line, known=known))


class _Flat:
    """A function of the arrays of its arguments that returns the arrays of its results. `names` are
    the paths of the latest results.
    """

    def __init__(self, fun: Callable[..., Any], outline: Outline):
        self.fun, self._outline = fun, outline
        self.names: list[str] = []

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        result = _plain(self.fun(*self._outline.fill(arrays)))
        leaves = [(p, x) for p, x in jtu.tree_flatten_with_path(result)[0] if _has_numbers(x)]
        self.names = [jtu.keystr(path) or "the result" for path, _ in leaves]
        return [x for _, x in leaves]


_Run = Callable[[int | None], list[np.ndarray]]


@dataclass(frozen=True)
class _BothTraced:
    """The step's program, and the reference's, which `run` runs with its roundings changed by the
    numbers of a seed, or as they are.
    """

    placed: Runnable
    alone: Runnable
    run: _Run
    wide: bool


class _Runs:
    """Runs of a step and of its reference."""

    def __init__(self, step: Any, reference: Any, args: Any):
        # A state of `by_matrix` depends on the devices. On one it is the transform's own.
        arrays, outline = outlined(args)
        # What compiles a step can also lower it. Other wrappers are a part of the step.
        is_compiled = hasattr(step, "lower")
        self.name = getattr(step, "__name__", type(step).__name__)
        self._own = reference is None
        self._step = _Flat(step if is_compiled else filter_jit(step), outline)
        written = step.__wrapped__ if is_compiled else step
        self._alone = _Flat(written if self._own else reference, outlined(to_plain(args))[1])
        self._arrays, self._outline = list(map(jnp.copy, arrays)), outline
        self._results: list[Any] = []

    def traced(self, wide: bool) -> _BothTraced:
        alone, run = self._traced_alone(wide)
        with _as_is(wide):
            args = self._placed(wide)
            placed = Runnable(jax.make_jaxpr(self._step)(args), args, partial(_as_is, wide))
        return _BothTraced(placed, alone, run, wide)

    def judged(self, traced: _BothTraced) -> tuple[Compared, ...]:
        """The results compared."""
        with _as_is(traced.wide):
            # Copies: the step may donate them.
            self._results = self._step(self._placed(traced.wide))
            got = list(map(numbers_of, self._results))
        return self._compared(self._step.names, got, traced.run)

    @cached_property
    def in_numpy(self) -> tuple[Compared, ...]:
        """The results of the compiled step beside those of the step compiled for one device, both
        computed by `run_here`: so both draw the same random bits, and neither rounds.
        """
        return self._in_numpy()

    def _in_numpy(self, options: Any = None) -> tuple[Compared, ...]:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self._arrays]
        step: Any = self._step.fun
        compiled = step.lower(*self._outline.fill(shapes)).compile(options)
        program = _Flat(partial(run_here, compiled), self._outline)
        got = list(map(np.asarray, program(self._arrays)))
        return self._compared(program.names, got, self._traced_alone(False, in_numpy=True)[1])

    def known_faults(self, program: Any, platform: str) -> tuple[str, ...]:
        """Of the compilers for a platform, those that may be why this program differs."""
        misread = [f"{MISREAD}"] * (MISREAD.is_on(platform) and self._is_misread())
        return (*known_faults_in(program, platform), *misread)

    def _is_misread(self) -> bool:
        """Whether the compiled step differs in NumPy, too, and no more if XLA keeps its copies."""
        flag = MISREAD_OFF.partition("=")[0]
        try:
            differs = any(x.differs for x in self.in_numpy)
            return differs and not any(x.differs for x in self._in_numpy({flag: False}))
        except (AuditError, TypeError):  # it can't be computed
            return False

    def _compared(
        self, names: Sequence[str], got: Sequence[np.ndarray], run: _Run
    ) -> tuple[Compared, ...]:
        """The results beside those of the reference."""
        if self._alone.names != names:
            raise TypeError(
                f"verify: the step returns {', '.join(names)}; its reference returns "
                f"{', '.join(self._alone.names)}"
            )
        wanted, others = run(None), []
        if not are_numbers(wanted):
            raise ValueError(
                f"verify: {self.name} returns no finite number, also on one device, so there is "
                "nothing to compare: look for the first NaN by jax.debug_nans, or pass other arrays"
            )
        compared: list[Compared] = []
        about = f"verify: {self.name} with other roundings"
        with StatusLine(about) as line:
            for count in _AGAIN:
                for _ in range(count):
                    line.write(f"{about}, run {len(others) + 1} of at most {sum(_AGAIN)}")
                    others.append(run(len(others)))
                compared = compare(names, got, wanted, others)
                if not any(one.differs for one in compared):
                    break
        return tuple(compared)

    def differing_replicas(self) -> str:
        """In the latest run."""
        try:
            check_replicas(dict(zip(self._step.names, self._results, strict=True)))
        except ReplicaError as error:
            return str(error)
        return ""

    def _placed(self, wide: bool) -> list[Any]:
        return list(map(widened if wide else jnp.copy, self._arrays))

    def _traced_alone(self, wide: bool, in_numpy: bool = False) -> tuple[Runnable, _Run]:
        with _as_is(wide):
            plain = outlined(_plain(self._outline.fill(self._placed(wide))))[0]
        with _one_device(wide):
            device = jax.local_devices()[0]
            args = [alone(x, device) for x in plain]
            try:
                traced = jax.jit(self._alone).trace(args)
            except Exception as error:
                if self._own:
                    explained(error, _NEEDS_REFERENCE)
                raise
            if self._own:
                _refuse_placed(traced.jaxpr)
            # NumPy rounds nothing, but compilers fold constants in float32.
            eps = float(jnp.finfo(jnp.float32).eps) if in_numpy else None
            roundings = Roundings(traced.jaxpr, eps)
            compiled = jax.jit(roundings.run).lower(0.0, 0, args).compile()
            calls = partial(run_here, compiled) if in_numpy else compiled

        def run(seed: int | None) -> list[np.ndarray]:
            with _one_device(wide):
                return list(map(numbers_of, calls(float(seed is not None), seed or 0, args)))

        return Runnable(traced.jaxpr, args, partial(_one_device, wide)), run


@contextmanager
def _as_is(wide: bool) -> Iterator[None]:
    # Arguments that are filled here are not where the step keeps them.
    with warnings.catch_warnings(), _in_float64() if wide else nullcontext(), in_own_dtypes(wide):
        warnings.simplefilter("ignore", PlacementWarning)
        yield


@contextmanager
def _in_float64() -> Iterator[None]:
    """In all threads. Python callbacks run in those of XLA, which `jax.enable_x64` doesn't reach:
    there JAX would convert their arguments to float32, on a device that waits for the callback.
    """
    with ThreadPoolExecutor(1) as other:
        before = other.submit(_is_wide).result()
    jax.config.update("jax_enable_x64", True)
    try:
        # This thread may have a setting of its own.
        with jax.enable_x64(True):
            yield
    finally:
        jax.config.update("jax_enable_x64", before)


def _is_wide() -> bool:
    return jax.config.jax_enable_x64  # type: ignore[attr-defined]


@contextmanager
def _one_device(wide: bool) -> Iterator[None]:
    device = jax.default_device(jax.local_devices()[0])
    with _as_is(wide), no_mesh(), on_one_device(True), device:
        yield


def _plain(tree: Any) -> Any:
    """A tree whose states of `by_matrix` are the optimiser's own, without rounding."""
    with in_own_dtypes(True):
        return to_plain(tree)


def _has_numbers(x: Any) -> bool:
    """Whether it is an array; the gradient of integers is one of nothing."""
    return is_array(x) and x.dtype != jax.dtypes.float0


def _missing_device(program: Any) -> Any:
    """A device that a program has values on and that isn't here; None if all are."""
    for eqn in all_equations(program):
        for x in jtu.tree_leaves(list(eqn.params.values())):
            if isinstance(x, Mesh) and is_described(x):
                return x.devices.flat[0]
            if isinstance(x, Sharding) and not is_here(x):
                return next(iter(x.device_set))
    return None


_NEEDS_REFERENCE = (
    "if the step has JAX's own constraints, or shard_map, give the function for one device: "
    "verify(step, ..., reference=). verify runs the step on one device, without a mesh and without "
    "placements of mylib"
)


def _refuse_placed(program: Any) -> None:
    placed = (names.CONSTRAINT, names.RESHARD, names.SHARD_MAP)
    lines = [line_of(eqn) for eqn in all_equations(program) if eqn.primitive.name in placed]
    if lines:
        where = some(list(dict.fromkeys(lines)))
        raise TypeError(f"verify: the step places values at {where}; {_NEEDS_REFERENCE}")
