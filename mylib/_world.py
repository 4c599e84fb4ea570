"""Which world a call is made in: eager or staged, and which mesh surrounds it.

Beside `mylib.testing` this is the one file that touches names which JAX and Equinox keep private.
Each of them has a test in `tests/test_world.py` that says what to do when it is moved.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import equinox._jit as equinox_jit
import jax
from jax._src import core, distributed, mesh as mesh_lib
from jax._src.interpreters import ad, batching
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding


@dataclass(frozen=True)
class World:
    """What surrounds a call.

    `mesh` carries the axis names, sizes and types that are in force here (empty outside any mesh);
    `devices` is the same mesh with its devices, where they are known.
    """

    staged: bool
    mesh: AbstractMesh
    devices: Mesh | None
    # The mesh axes that a surrounding `vmap` splits its batch over: because the batch came so, on
    # Explicit axes, and because of `spmd_axis_name`.
    batch_axes: frozenset[Any] = frozenset()
    spmd_axes: frozenset[Any] = frozenset()

    @property
    def manual_axes(self) -> frozenset[str]:
        """The axes over which a surrounding `shard_map` has already split the arrays."""
        return frozenset(
            name
            for name, kind in zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
            if kind == AxisType.Manual
        )

    def size_at(self, x: jax.Array) -> int | None:
        """On how many devices the program runs that `x` is a value of, if that is known. Constants
        say nothing: they are copied into whatever program uses them.
        """
        mesh = self.mesh
        if mesh.empty and isinstance(x, Tracer):
            mesh = jax.typeof(x).sharding.mesh
        if not mesh.empty:
            return mesh.size
        return None if self.devices is None else self.devices.size


def current_world() -> World:
    concrete = mesh_lib.get_concrete_mesh()
    if concrete.empty:
        # `with mesh:`, deprecated but still what much code has.
        concrete = mesh_lib.thread_resources.env.physical_mesh
    mesh, trace = jax.sharding.get_abstract_mesh(), core.trace_ctx.trace
    if isinstance(trace, core.EvalTrace):
        return _eager_world(mesh, concrete)
    batches = list(_batches(trace))
    return World(
        staged=_is_staged(trace),
        batch_axes=_named(batch.explicit_mesh_axis for batch in batches),
        spmd_axes=_named(batch.spmd_name for batch in batches),
        mesh=mesh,
        devices=None if concrete.empty else concrete,
    )


@functools.lru_cache(maxsize=64)
def _eager_world(mesh: AbstractMesh, concrete: Mesh) -> World:
    """The world of every call that no transformation surrounds; most ask for nothing else."""
    return World(staged=False, mesh=mesh, devices=None if concrete.empty else concrete)


def _batches(trace: Any) -> Iterator[Any]:
    while trace is not None:
        if isinstance(trace, batching.BatchTrace):
            yield trace.axis_data
        trace = getattr(trace, "parent_trace", None)


def _named(axes: Iterable[Any]) -> frozenset[Any]:
    names = [axis if isinstance(axis, tuple | list) else (axis,) for axis in axes]
    return frozenset(name for group in names for name in group if name is not None)


def _is_staged(trace: Any) -> bool:
    # An eager `grad`, `jvp` or `vmap` computes at once, whatever it records beside that; what lies
    # under it decides. Every other trace writes a program down for later.
    while isinstance(trace, ad.JVPTrace | ad.LinearizeTrace | batching.BatchTrace):
        trace = trace.parent_trace
    return not (trace is None or isinstance(trace, core.EvalTrace))


class Uncommitted:
    """The place of an array that JAX may move as it likes."""


UNCOMMITTED = Uncommitted()


def sharding_under(x: Any) -> Sharding | Uncommitted | None:
    """Where the concrete array behind `x` lies, seen without the dimensions that `vmap` has added;
    None if there is no array with a place of its own behind it.
    """
    if isinstance(x, ad.JVPTracer | ad.LinearizeTracer):
        return sharding_under(x.primal)
    if isinstance(x, batching.BatchTracer):
        sharding = sharding_under(x.val)
        if x.batch_dim is None or not isinstance(sharding, NamedSharding):
            return sharding
        entries = list(sharding.spec) + [None] * (x.val.ndim - len(sharding.spec))
        del entries[x.batch_dim]
        return NamedSharding(
            sharding.mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind
        )
    # What JAX makes of Python's numbers is a jax.Array without a place.
    if isinstance(x, jax.Array) and not isinstance(x, Tracer) and hasattr(x, "sharding"):
        return x.sharding if x.committed else UNCOMMITTED
    return None


def value_under(x: Any) -> Any:
    """What an eager transformation has computed so far behind `x`."""
    while isinstance(x, ad.JVPTracer | ad.LinearizeTracer | batching.BatchTracer):
        x = x.val if isinstance(x, batching.BatchTracer) else x.primal
    return x


def coordination_client() -> Any:
    """Through which processes talk to each other without their devices; None if there is one
    process only, or they have not been joined.
    """
    return distributed.global_state.client


def has_error_check(program: Any) -> bool:
    """Whether a program, given as a jaxpr, raises by way of `equinox.error_if`."""
    return any(_is_error_check(eqn) for part in parts_of(program) for eqn in opened(part).eqns)


def parts_of(program: Any, without: Callable[[Any], bool] = lambda eqn: False) -> list[Any]:
    """The jaxprs that a jaxpr is made of, itself the first, each once. What a kernel does inside is
    not among them, nor what is inside of equations `without` which they are wanted.
    """
    parts = {id(opened(program)): program}
    queue = [program]
    while queue:
        for eqn in opened(queue.pop()).eqns:
            inner = jaxprs_in(eqn)
            if not inner or eqn.primitive.name == "pallas_call" or without(eqn):
                continue
            for x in inner:
                if id(opened(x)) not in parts:
                    parts[id(opened(x))] = x
                    queue.append(x)
    return list(parts.values())


def jaxprs_in(eqn: Any) -> list[Any]:
    """The jaxprs among an equation's parameters. Programs are large, so this has to be quick."""
    found: list[Any] = []
    for param in eqn.params.values():
        if isinstance(param, _JAXPRS):
            found.append(param)
        elif isinstance(param, tuple | list):
            found += [x for x in param if isinstance(x, _JAXPRS)]
    return found


_JAXPRS = (Jaxpr, ClosedJaxpr)


def opened(jaxpr: Any) -> Any:
    """A jaxpr, without the constants that may come with it."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _is_error_check(eqn: Any) -> bool:
    callback = getattr(eqn.params.get("callback"), "callback_func", None)
    return getattr(callback, "__module__", None) == "equinox._errors"


def readable_error(error: Exception, jit_id: bytes) -> eqx.EquinoxRuntimeError | None:
    """What `equinox.filter_jit` makes of the error that `equinox.error_if` raises at run time, or
    None if this is another one. `jit_id` must have been the local variable `__equinox_jit_id__`
    of a function that was running when the check was traced.
    """
    if "_EquinoxRuntimeError: " not in str(error) or equinox_jit.last_error_info is None:
        return None
    message, pieces = equinox_jit.last_error_info
    own = pieces[: pieces.index(jit_id)] if jit_id in pieces else pieces
    stack = "".join(piece for piece in reversed(own) if isinstance(piece, str))
    text = equinox_jit._on_error_msg  # pyright: ignore[reportPrivateUsage]
    return eqx.EquinoxRuntimeError(text.format(msg=message, stack=stack))


def _keep_quiet(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__name__ != "_EquinoxRuntimeError"


# JAX logs the error of every callback, also of those whose only job it is to raise one that is then
# shown as it should be.
logging.getLogger("jax._src.callback").addFilter(_keep_quiet)
