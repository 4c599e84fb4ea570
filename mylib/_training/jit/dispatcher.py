"""Calls of a function: the variant for each is found or made, and its steps are taken."""

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from ..._core import watched as _watched
from ..._core.compat import DELETED_ARRAYS_END_IT, is_staged, names, trace_kind
from ..._core.errors import not_here
from ..._core.placement import current_world, is_described
from ..._core.tree import Arrays, Outline, outlined
from ..advice import ChangingNumbers, about_captured, devices_of
from .advise import Advise
from .donation import Donate, Donation
from .error_checks import calling
from .inputs import Args, Inputs, Kwargs, Placing
from .naming import about_static, leaves_of
from .recent import Recent
from .running import Running, Trace, outermost
from .steps import Call, Step, Variant, Wrapped

# The most variants that are kept for a function: as many as JAX keeps traces.
_MOST = 2048


class _Counts(threading.local):
    """The number of programs that JAX has compiled in this thread."""

    compiled = 0


_counts = _Counts()


def _count(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == names.EVENT_COMPILED:
        _counts.compiled += 1


@cache
def _listen() -> None:
    jax.monitoring.register_event_duration_secs_listener(_count)


@dataclass(eq=False, kw_only=True)
class Dispatcher(Wrapped):
    """A function without its arrays, and its options. Finds the variant for a call, and takes the
    call through its steps.
    """

    about: Mapping[str, object]
    donate: Donate = "none"
    inputs: Inputs | None = None
    variants: Recent[Outline, Variant] = field(default_factory=lambda: Recent(_MOST))
    # The variant that was called last. Usually it is called again.
    _latest: Variant | None = None
    _numbers: ChangingNumbers = field(default_factory=ChangingNumbers)

    def prepare(
        self, fun_arrays: Arrays, args: Args, kwargs: Kwargs, abstract: bool = False
    ) -> Call:
        """A call with these arguments. If it is only lowered, arrays may be `abstract`."""
        call = self.read(fun_arrays, args, kwargs, abstract)
        latest = self._latest
        try:
            # Usually the same variant is called again, and then nothing need be hashed.
            if latest is None or latest.outline != call.outline:
                latest = self.variants.find(call.outline) or self._new_variant(call)
        except Exception as error:
            about_static(error, call)
            with nullcontext() if self.inputs is None else self.inputs.raised_in_all(abstract):
                raise
        self._latest = call.variant = latest
        return call

    def read(self, fun_arrays: Arrays, args: Args, kwargs: Kwargs, abstract: bool = False) -> Call:
        """A call with these arguments, of no variant yet."""
        if self.inputs is not None:
            args, kwargs = self.inputs.bind(self.function, args, kwargs)
        elif kwargs:
            args, kwargs = self.function.bind(args, kwargs)
        # Without keyword arguments a tree of the positional ones (a tuple) is enough.
        arrays, outline = outlined([args, kwargs] if kwargs else args, abstract)
        if self.fun.state:
            # What is static in the function can change, too.
            outline.state += self.fun.state_now()
        return Call(self, args, kwargs, arrays + fun_arrays, outline, abstract)

    def _new_variant(self, call: Call) -> Variant:
        mesh = self.mesh if self.mesh is not None else current_world().devices
        if not call.is_abstract and is_described(mesh) and not is_staged():
            raise not_here(self.name)
        latest = None if self._latest is None else self._latest.outline
        self._numbers.look_at(call.outline, latest, self.name, partial(leaves_of, call))
        _listen()
        steps: list[Step] = [] if self.inputs is None else [Placing(self.inputs)]
        donated = [] if self.donate == "none" else [Donation(self.donate, call)]
        steps += donated
        if DELETED_ARRAYS_END_IT:
            steps.append(_RefuseDeleted())
        steps.append(Advise())
        running = Running(self, call.outline, [i for step in donated for i in step.positions])
        return self.variants.add(call.outline, Variant(call.outline, steps, running))

    def call(
        self, call: Call, ahead: jax.stages.Compiled | None = None, first: bool = False
    ) -> Any:
        """Calls the function. `ahead` is the program compiled ahead of time, if any, and `first`
        whether this is its first call.
        """
        __equinox_jit_id__ = self.id  # noqa: F841
        compiled, variant = _counts.compiled, call.variant
        arrays = call.arrays
        for before in variant.before:
            arrays = before(arrays, call)
        call.taken, call.mode, call.is_ahead = arrays, trace_kind(), ahead is not None
        running = variant.running
        if ahead is None:
            call.returned = returned = running.use(running.jitted, call.mode, arrays)
        else:
            with calling("returned"):
                call.returned = returned = ahead(*arrays)
        rest = returned.rest
        if _watched.record is not None and call.mode == "eager":
            _watched.record.started(call, rest.trace.memo, returned.arrays)
        for after in rest.after:
            after(call)
        if rest.trace.is_new:
            traced = running.use(running.jitted.trace, call.mode, arrays)  # JAX still has it
            self._about_captured(rest.trace, traced.jaxpr)
        if first or _counts.compiled != compiled:
            for advise in variant.compiled:
                advise(call)
        for after in variant.after:
            after(call)
        return rest.outline.fill(returned.arrays)

    def lower(self, call: Call) -> tuple[jax.stages.Lowered, ClosedJaxpr]:
        """The program lowered, and as a jaxpr. The call then has the arrays that it takes."""
        __equinox_jit_id__ = self.id  # noqa: F841
        arrays = call.arrays
        for before in call.variant.before:
            arrays = before(arrays, call)
        call.taken = arrays
        traced, lowered = call.variant.running.lowered(arrays)
        trace = traced.out_info.rest.trace
        if trace.is_new:
            # Now: the program may be called in another process.
            self._about_captured(trace, traced.jaxpr)
        return lowered, traced.jaxpr

    def _about_captured(self, trace: Trace, program: ClosedJaxpr) -> None:
        """Warns, once for a trace, of large arrays that it has captured."""
        trace.is_new = False
        around = outermost()
        if around is not None:  # its program is looked at instead
            around.nested.append(self.code)
        else:
            about_captured(self.name, (self.code, *trace.nested), program)
            # JAX keeps the trace among the structures of results.
            trace.nested.clear()


class _RefuseDeleted(Step):
    """Raises the error of newer versions of JAX, where older ones would abort the process."""

    def __init__(self) -> None:
        # Whether several devices took part in a call.
        self._is_parallel = False

    def before(self, arrays: Arrays, call: Call) -> Arrays:
        if self._is_parallel and trace_kind() == "eager":
            if any([x.is_deleted() for x in arrays if hasattr(type(x), "is_deleted")]):
                raise RuntimeError("Array has been deleted.")
        return arrays

    def compiled(self, call: Call) -> None:
        self._is_parallel |= any(devices_of(x) > 1 for x in (*call.taken, *call.returned.arrays))
