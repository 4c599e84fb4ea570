"""A function without its arrays, its options, and what a call of it does."""

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.tree_util as jtu

from .. import _watched
from .._advice import (
    Compilation,
    about_arrivals,
    about_captured,
    about_gathered,
    about_not_taken,
    about_order,
    about_replicated,
    about_spared,
    devices_of,
)
from .._compat import (
    DELETED_ARRAYS_END_IT,
    donation_warning,
    is_staged,
    jit,
    names,
    new_id,
    trace_kind,
    with_actual_memory_kind,
)
from .._errors import PlacementError, not_here
from .._placement import AnyMesh, current_world, is_described
from .._transfer import filter_device_put
from .._tree import Arrays, Made, Rest, Split, outlined
from .donation import Donate, Donated, let_go_of_moved, spares_the_first, used_once, warns
from .error_checks import CheckFound, Checks, Errors, calling, has_check, with_checks_as_values
from .inputs import Inputs, Resolved, Targets
from .naming import about_static, leaves_of, names_of
from .placed_after import placed_after, targets_after
from .signature import Function
from .traces import Trace, expect, outermost, tracing
from .variants import Call, Variant, Variants

Mode = Literal["eager", "transformed", "staged"]


class _Counts(threading.local):
    """The number of programs that JAX has compiled in this thread."""

    compiled = 0


_counts = _Counts()


def _count(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == names.EVENT_COMPILED:
        _counts.compiled += 1


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_count)


@dataclass(frozen=True, eq=False)
class _Traced(Rest):
    """Everything but arrays in what a trace returns."""

    trace: Trace
    # Whether results are in host memory.
    in_host_memory: bool
    # The targets of results that are placed after the program.
    later: Targets
    checks: Checks | None = None


@dataclass(frozen=True, eq=False)
class Program:
    """A function without its arrays, and its options."""

    fun: Split
    code: Any
    about: Mapping[str, Any]
    function: Function
    donate: Donate
    inputs: Inputs | None = None
    out_shardings: Any = None
    mesh: AnyMesh | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    variants: Variants = field(default_factory=Variants)
    # Equinox looks for this id on the stack, to show only the frames inside the program.
    id: bytes = field(default_factory=new_id)

    @property
    def name(self) -> str:
        return self.function.name

    def jit(self, variant: Variant) -> Any:
        def run(mode: Mode, targets: Resolved | None, kept: Arrays, donated: Arrays) -> Made:
            # As a part of another program, or without checks (see `_use`). `jax.disable_jit` runs
            # this at once, and checks raise at once.
            if mode == "staged" or not is_staged():
                return self._trace(variant, targets, kept, donated)
            return self._with_checks(variant, mode, targets, kept, donated)

        _listen()
        run.__name__ = run.__qualname__ = self.name
        return jit(run, static_argnums=(0, 1), donate_argnums=3, **self.options)

    def prepare(self, fun_arrays: Arrays, args: Any, kwargs: Any, abstract: bool = False) -> Call:
        """A call with these arguments. If it is only lowered, arrays may be `abstract`."""
        call = self.read(fun_arrays, args, kwargs, abstract)
        latest = self.variants.latest
        try:
            # Usually the same variant is called again, and then nothing need be hashed.
            if latest is None or latest.split != call.split:
                latest = self.variants.find(call.split) or self._new_variant(call)
        except Exception as error:
            about_static(error, call)
            raise
        self.variants.latest = call.variant = latest
        return call

    def read(self, fun_arrays: Arrays, args: Any, kwargs: Any, abstract: bool = False) -> Call:
        """A call with these arguments, of no variant yet."""
        if self.inputs is not None:
            args, kwargs = self.inputs.bind(self.function, args, kwargs)
        elif kwargs:
            args, kwargs = self.function.bind(args, kwargs)
        # Without keyword arguments a tree of the positional ones (a tuple) is enough.
        arrays, split = outlined([args, kwargs] if kwargs else args, abstract)
        if self.fun.state:
            # What is static in the function can change, too.
            split.state += self.fun.state_now()
        return Call(self, args, kwargs, arrays, split, fun_arrays, abstract)

    def _new_variant(self, call: Call) -> Variant:
        variants = self.variants
        mesh = self.mesh if self.mesh is not None else current_world().devices
        if not call.is_abstract and is_described(mesh) and not is_staged():
            raise not_here(self.name)
        latest = None if variants.latest is None else variants.latest.split
        variants.numbers.look_at(call.split, latest, self.name, partial(leaves_of, call))
        if self.inputs is not None and isinstance(self.inputs.placement, dict):
            arguments = [*enumerate(call.args), *call.kwargs.items()]
            given = {self.function.parameter(key): x for key, x in arguments}
            about_order(self.name, self.inputs.placement, given)
        variant = Variant(call.split, Donated.of(call), self.jit)
        return variants.add(variant.split, variant)

    def call(self, call: Call, ahead: Any = None, first: bool = False) -> Any:
        """Calls the function. `ahead` is the program compiled ahead of time, if any, and `first`
        whether this is its first call.
        """
        __equinox_jit_id__ = self.id  # noqa: F841
        compiled, mode, variant = _counts.compiled, trace_kind(), call.variant
        placed, fun_arrays, targets = call.arrays, call.fun_arrays, None
        if self.inputs is not None:
            placed, fun_arrays, targets = self.inputs.place(call)
        arrays = kept = placed + fun_arrays if fun_arrays else placed
        donated: Arrays = []
        if variant.donated is not None:
            kept, donated = used_once(call, arrays, variant.donated)
        if DELETED_ARRAYS_END_IT and variant.is_parallel and mode == "eager":
            _refuse_deleted(arrays)
        operands = targets, kept, donated
        if ahead is not None:  # without static operands
            returned = _call_jit(ahead, (kept, donated), "returned")
        else:
            returned = _use(variant.jitted, variant, mode, operands)
        rest: _Traced = returned.rest
        if _watched.record is not None and mode == "eager":
            _watched.record.started(call, rest.trace.memo, returned.arrays)
        if rest.checks is not None:
            rest.checks.raise_if(returned.failed, returned.arrays, self.id)
        if rest.in_host_memory:
            returned.arrays = list(map(with_actual_memory_kind, returned.arrays))
        if rest.trace.is_new:
            traced = _use(variant.jitted.trace, variant, mode, operands)  # JAX still has it
            self._about_captured(rest.trace, traced.jaxpr)
        if rest.trace.kept and mode == "staged":
            # The surrounding program expects what this one does of the arguments that it got.
            expect([arrays[i] for i in rest.trace.kept], list(rest.trace.kept.values()))
        result = rest.split.fill(returned.arrays)
        if rest.later and mode != "staged":  # else the surrounding program decides
            result = placed_after(result, rest.later)
        if first or _counts.compiled != compiled:
            variant.is_parallel |= any(devices_of(x) > 1 for x in (*arrays, *returned.arrays))
            compilation = Compilation(self.name, partial(names_of, call), arrays, returned.arrays)
            about_arrivals(compilation, rest.trace.kept)
            if mode == "eager":
                self._advise(call, compilation, donated, result, None if ahead else operands)
        if placed is not call.arrays and variant.donated is not None and mode == "eager":
            let_go_of_moved(call, placed, variant.donated)
        return result

    def _advise(
        self, call: Call, compilation: Compilation, donated: Arrays, result: Any, operands: Any
    ) -> None:
        """Warns after a call outside all transformations that has compiled the program, from its
        `operands`, which are None if that was done ahead of time.
        """
        donation, variants = call.variant.donated, self.variants
        if donation is not None and warns(self.donate):
            about_not_taken(self.name, donated, lambda: donation.parted(compilation.names)[1])
        call.variant.earlier.about_moved(compilation)
        if isinstance(self.donate, str) and spares_the_first(self.donate):
            about_spared(self.name, self.donate, call.args, result, self.function.parameter)
        if operands is not None and not variants.is_replicated_told:
            # JAX has both in its caches, and finds them there in the context of the call alone.
            program = partial(_lowered, call.variant, operands)
            given = compilation, call.split.count, program
            variants.is_replicated_told = about_replicated(*given) or about_gathered(*given)

    def _about_captured(self, trace: Trace, program: Any) -> None:
        """Warns, once for a trace, of large arrays that it has captured."""
        trace.is_new = False
        around = outermost()
        if around is not None:  # its program is looked at instead
            around.nested.append(self.code)
        else:
            about_captured(self.name, (self.code, *trace.nested), program)
            # JAX keeps the trace among the structures of results.
            trace.nested.clear()

    def lower(self, call: Call) -> tuple[jax.stages.Lowered, Any, Arrays]:
        """The program lowered, and as a jaxpr; and the arrays that it was lowered for."""
        __equinox_jit_id__ = self.id  # noqa: F841
        placed, fun_arrays, targets = call.arrays, call.fun_arrays, None
        if self.inputs is not None:
            placed, fun_arrays, targets = self.inputs.place(call)
        arrays, donation = placed + fun_arrays, call.variant.donated
        kept, donated = (arrays, []) if donation is None else donation.parted(arrays)
        traced, lowered = _lowered(call.variant, (targets, kept, donated))
        trace = traced.out_info.rest.trace
        if trace.is_new:
            # Now: the program may be called in another process.
            self._about_captured(trace, traced.jaxpr)
        return lowered, traced.jaxpr, arrays

    def _trace(
        self, variant: Variant, targets: Resolved | None, kept: Arrays, donated: Arrays
    ) -> Made:
        donation = variant.donated
        arrays = kept if donation is None else donation.joined(kept, donated)
        with tracing(arrays) as trace, donation_warning(silenced=False):
            result, later = self._called(variant.split, targets, arrays)
        trace.is_new = is_staged()
        returned, split = outlined(result)
        in_host_memory = any(map(_is_in_host_memory, returned))
        return Made(returned, _Traced(split, trace, in_host_memory, later))

    def _called(
        self, split: Split, targets: Resolved | None, arrays: Arrays
    ) -> tuple[Any, Targets]:
        """What the function returns, and what of it is placed after the program."""
        arguments = split.fill(arrays[: split.count])
        args, kwargs = arguments if isinstance(arguments, list) else (arguments, {})
        fun = self.fun.fill(arrays[split.count :])
        if targets is None:
            result = fun(*args, **kwargs)
        else:
            result = fun.resolved(targets.targets, args, kwargs)
        if self.out_shardings is None:
            return result, ()
        try:
            placed = filter_device_put(result, self.out_shardings, mesh=self.mesh)
        except PlacementError as error:
            error.add_note(f"(the tree is what {self.name} returns, placed by its out_shardings)")
            raise
        return placed, targets_after(placed, self.out_shardings, self.mesh)

    def _with_checks(
        self,
        variant: Variant,
        mode: Mode,
        targets: Resolved | None,
        kept: Arrays,
        donated: Arrays,
    ) -> Made:
        """The traced function, with its checks of errors as values."""
        with calling("unknown" if mode == "eager" else "raised"):
            traced = variant.jitted.trace("staged", targets, kept, donated)
        arrays = jtu.tree_leaves((kept, donated))
        values, failed, checks = with_checks_as_values(traced.jaxpr, arrays, mode == "transformed")
        returned = jtu.tree_unflatten(jtu.tree_structure(traced.out_info), values)
        return Made(returned.arrays, replace(returned.rest, checks=checks), failed)


def _lowered(variant: Variant, operands: Any) -> tuple[Any, jax.stages.Lowered]:
    """The program traced, and lowered."""

    def lower(*operands: Any) -> tuple[Any, jax.stages.Lowered]:
        traced = variant.jitted.trace(*operands)
        return traced, traced.lower()

    return _use(lower, variant, "eager", operands)


def _use(use: Callable[..., Any], variant: Variant, mode: Mode, operands: tuple[Any, ...]) -> Any:
    """Calls the variant's `jax.jit`, or traces or lowers it. Outside of other programs its checks
    are values only if it has some: making each equation twice would take longer than all else.
    """
    if mode == "eager" and not variant.has_checks:
        plain = "staged", *operands
        if variant.has_checks is None:
            variant.has_checks = _has_check(variant, plain)
        # Those for arrays of other shapes, and those hidden in primitives, are found by JAX.
        if not variant.has_checks:
            try:
                return _call_jit(use, plain, "unknown")
            except CheckFound:
                variant.has_checks = True
    errors = "returned" if mode == "eager" else "raised"
    return _call_jit(use, (mode, *operands), errors)


def _has_check(variant: Variant, operands: tuple[Any, ...]) -> bool | None:
    """Whether the program has error checks, by its trace; None with `jax.disable_jit`."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    return has_check(_call_jit(variant.jitted.trace, operands, "unknown").jaxpr)


def _call_jit(function: Callable[..., Any], operands: tuple[Any, ...], errors: Errors) -> Any:
    """Calls `function` with a program's operands. The last one is a list of donated arrays."""
    with calling(errors):
        if not operands[-1]:
            return function(*operands)
        with donation_warning(silenced=True):
            return function(*operands)


def _refuse_deleted(arrays: Arrays) -> None:
    """Raises what newer versions of JAX raise."""
    if any([x.is_deleted() for x in arrays if hasattr(type(x), "is_deleted")]):
        raise RuntimeError("Array has been deleted.")


def _is_in_host_memory(x: Any) -> bool:
    space = getattr(getattr(x, "aval", None), "memory_space", None)
    return space is jax.memory.Space.Host
