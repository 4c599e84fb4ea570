"""`verify`: does a step compute on many devices what it computes on one."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import Mesh, Sharding

from .._compat import names
from .._errors import (
    PlacementWarning,
    ReplicaError,
    in_words,
    listed,
)
from .._interpreter import run_here
from .._jit import filter_jit
from .._known_faults import known_faults_in
from .._matrices import to_plain
from .._placement import in_own_dtypes, is_described, is_here, no_mesh, on_one_device
from .._processes import check_replicas
from .._programs import all_equations, line_of
from .._text import counted, some
from .._tree import Outline, is_array, is_of_keys, outlined
from .arguments import alone, filled, perturbed, whole, widened
from .judge import Compared, coarsest, compare, largest_difference, largest_of
from .lines import Runnable, first_difference

# How often the reference is run with perturbed arguments, to see what rounding does; and how often
# again, if a result differs by more. The sign of a gradient near zero may be the same in a few.
_SHAKEN = 2, 14


class VerifyError(AssertionError):
    """A step differs from the same step on one device. `report` is the [`mylib.testing.Verified`][]
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
    """What [`mylib.testing.verify`][] has compared.

    **Attributes:**

    - `name`: the step's name.
    - `wide`: the results in float64; None if the step can't be traced in it, for the reason `why`.
    - `own`: the results in the step's own dtypes; empty for a machine that you don't have.
    - `replicas`: copies that differ; empty if none do.
    - `line`: the first line whose values differ, and by how much; empty if that is unknown.
    - `known`: faults of compilers that are known, and that the step may have met.
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
        return [x for x in (*(self.wide or ()), *self.own) if x.differs]

    def __str__(self) -> str:
        rows = [("in float64", self.wide or ()), ("in its own dtypes", self.own)]
        if not self.differs:
            sizes = [
                f"{max((x.difference for x in compared), default=0.0):.2g} {how}"
                for how, compared in rows
                if compared
            ]
            results = counted(len(self.own or self.wide or ()), "result")
            text = f"{self.name} is the same step on one device: {results}"
            return f"{text}, which differ by at most {', '.join(sizes)}{self._unseen}"
        lines = [f"{self.name} differs from the same step on one device:"]
        for how, compared in rows:
            wrong = [str(x) for x in compared if x.differs]
            if wrong:
                lines += listed({(): wrong}, f"{len(compared)} results in all, {how}")
        lines += [f"  {x}" for x in (self.replicas, self.line) if x]
        lines += [f"  a known fault: {x}" for x in self.known]
        return "\n".join(lines) + self._unseen

    @property
    def _unseen(self) -> str:
        odd = [x.name for x in self.own if not x.is_finite]
        lines = [f"(not compared in float64: {self.why})"] if self.why else []
        lines += [f"(NaN or infinite on one device, too: {some(odd)})"] if odd else []
        return "".join(f"\n{line}" for line in lines)


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
    reference also runs with arguments that are changed by as much as rounding would.

    **Arguments:**

    - `step`: a function of [`mylib.filter_jit`][], `jax.jit` or `equinox.filter_jit`, the step of a
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
    program is computed by [`mylib.testing.run_here`][], in float64 only.

    In float64 the arguments are float64, and `dtype=`, `reduce_dtype=` and `send_dtype=` of
    `fully_shard` are ignored; casts in the step stay. Other threads that use JAX meanwhile have
    float64, too.

    If there are several processes, all of them must call it.

    **Returns:**

    A [`mylib.testing.Verified`][]: what was compared.

    **Raises:**

    [`mylib.testing.VerifyError`][], an `AssertionError`: each result that differs by more than
    rounding explains, copies that differ, and the first line of the step whose values differ.
    `TypeError` if the step needs a `reference`, or integers need `high`.

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
    args = filled(args, high, seed)
    runs = _Runs(step, reference, args)
    traced = runs.traced(wide=False)
    device = _missing_device(traced.placed.program)
    if device is not None:
        report = runs.judged_elsewhere(device.platform)
        if report.differs:
            raise VerifyError(report)
        return report
    own = runs.judged(traced)
    wide, why = None, ""
    try:
        traced_wide = runs.traced(wide=True)
    except (TypeError, ValueError) as error:
        why = in_words(error)
    else:
        wide = runs.judged(traced_wide)
        if any(x.differs for x in wide):
            traced = traced_wide
    replicas = runs.differing_replicas()
    report = Verified(runs.name, wide, own, replicas, why=why)
    if not report.differs:
        return report
    line = traced.first_line() if report.wrong else ""
    known = tuple(known_faults_in(traced.placed.program, jax.default_backend()))
    raise VerifyError(replace(report, line=line, known=known))


class _Flat:
    """A function of the arrays of its arguments that returns the arrays of its results. `names` are
    the paths of the latest results.
    """

    def __init__(self, fun: Callable[..., Any], outline: Outline):
        self.fun, self._outline = fun, outline
        self.names: list[str] = []

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        result = to_plain(self.fun(*self._outline.fill(arrays)))
        leaves = [(p, x) for p, x in jtu.tree_flatten_with_path(result)[0] if _has_numbers(x)]
        self.names = [jtu.keystr(path) or "the result" for path, _ in leaves]
        return [x for _, x in leaves]


@dataclass(frozen=True)
class _BothTraced:
    """The step's program, and the reference's, which `run` runs; `eps` is of the least exact type
    in them.
    """

    placed: Runnable
    alone: Runnable
    run: Callable[..., Any]
    wide: bool
    eps: float

    def first_line(self) -> str:
        def differ(x: np.ndarray, want: np.ndarray) -> str:
            difference, largest = largest_difference(x, want), largest_of(want)
            rounding = self.eps * 1e4 if self.wide else self.eps**0.5
            return f"{difference:.2g} of {largest:.2g}" * (difference > rounding * largest)

        return str(first_difference(self.placed, self.alone, differ, _read))


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
        eps = max(coarsest(alone.program), coarsest(placed.program))
        return _BothTraced(placed, alone, run, wide, eps)

    def judged(self, traced: _BothTraced) -> tuple[Compared, ...]:
        """The results compared."""
        with _as_is(traced.wide):
            # Copies: the step may donate them.
            self._results = self._step(self._placed(traced.wide))
            got = list(map(_read, self._results))
        return self._compared(self._step.names, got, traced)

    def judged_elsewhere(self, platform: str) -> Verified:
        """The results of the program that is compiled for a machine that isn't here, without
        roundings, beside those of one device.
        """
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self._arrays]
        step: Any = self._step.fun
        compiled = step.lower(*self._outline.fill(shapes)).compile()
        program = _Flat(partial(run_here, compiled), self._outline)
        got = list(map(np.asarray, program(self._arrays)))
        alone, run = self._traced_alone(wide=True)
        # Compilers fold constants in float32.
        eps = float(jnp.finfo(jnp.float32).eps)
        wide = self._compared(program.names, got, _BothTraced(alone, alone, run, True, eps))
        return Verified(self.name, wide, (), known=tuple(known_faults_in(alone.program, platform)))

    def _compared(
        self, names: Sequence[str], got: Sequence[np.ndarray], traced: _BothTraced
    ) -> tuple[Compared, ...]:
        """The results beside those of the reference."""
        args, eps = traced.alone.args, traced.eps
        random = np.random.default_rng(0)
        compared: list[Compared] = []
        with _one_device(traced.wide):
            wanted, shaken = list(map(_read, traced.run(args))), []
            if self._alone.names != names:
                raise TypeError(
                    f"verify: the step returns {', '.join(names)}; its reference returns "
                    f"{', '.join(self._alone.names)}"
                )
            for count in _SHAKEN:
                others = [[perturbed(x, eps, random) for x in args] for _ in range(count)]
                shaken += [list(map(_read, traced.run(xs))) for xs in others]
                compared = compare(names, got, wanted, shaken, eps)
                if not any(x.differs for x in compared):
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

    def _traced_alone(self, wide: bool) -> tuple[Runnable, Callable[..., Any]]:
        with _as_is(wide):
            plain = outlined(to_plain(self._outline.fill(self._placed(wide))))[0]
        with _one_device(wide):
            device = jax.local_devices()[0]
            args = [alone(x, device) for x in plain]
            try:
                traced = jax.jit(self._alone).trace(args)
            except Exception as error:
                if self._own:
                    error.add_note(_NEEDS_REFERENCE)
                raise
            if self._own:
                _refuse_placed(traced.jaxpr)
            run = traced.lower().compile()
        return Runnable(traced.jaxpr, args, partial(_one_device, wide)), run


@contextmanager
def _as_is(wide: bool) -> Iterator[None]:
    with ExitStack() as stack:
        # Arguments that are filled here are not where the step keeps them.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", PlacementWarning)
        if wide:
            stack.enter_context(_in_float64())
            stack.enter_context(in_own_dtypes(True))
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
    "(verify runs the step on one device, without a mesh and without placements of mylib. If it "
    "has JAX's own constraints, or shard_map, give the function for one device: "
    "verify(step, ..., reference=))"
)


def _refuse_placed(program: Any) -> None:
    placed = (names.CONSTRAINT, names.RESHARD, names.SHARD_MAP)
    lines = [line_of(eqn) for eqn in all_equations(program) if eqn.primitive.name in placed]
    if lines:
        raise TypeError(
            f"verify: the step places values itself, at {some(list(dict.fromkeys(lines)))}. Give "
            "the function for one device: verify(step, ..., reference=)"
        )


def _read(x: Any) -> np.ndarray:
    x = whole(x)
    return np.asarray(jax.random.key_data(x) if is_of_keys(x) else x)
