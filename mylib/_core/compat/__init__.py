"""The private names of JAX and Equinox, and their names that are strings (`names`).

No other file uses them. Each has a test in `tests/test_compat.py` or `tests/test_compat_names.py`,
which says what to do when it moves.
"""

import copy
import dataclasses
import functools
import importlib
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from enum import Enum, auto
from itertools import chain
from operator import itemgetter
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, Protocol, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.core import AbstractValue, Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from ..lines import JAX, OURS
from . import names as names
from .replacement import Make, Replacement as Replacement

# The rule of a primitive: a function of its arrays.
Rule = Callable[..., list[Any]]
# A jaxpr, with its constants or without.
Program = Jaxpr | ClosedJaxpr
# The pickled fields of a tree's node: its kind, the number of its children, its data, ...
Node = tuple[Any, ...]


T = TypeVar("T")


class _Private:
    """A private module of JAX or Equinox. It is imported when one of its names is used: if a name
    disappears, the call that uses it fails, not `import mylib`.
    """

    def __init__(self, module: str, changing: tuple[str, ...] = ()):
        self.module_name = module
        # Names that must be looked up each time.
        self._changing = changing

    def __getattr__(self, name: str) -> Any:
        whole = f"{self.module_name}.{name}"
        try:
            value = getattr(importlib.import_module(self.module_name), name)
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"this needs {whole}, which JAX {jax.__version__} with Equinox {eqx.__version__} "
                "does not have. Install versions that this mylib supports, or a newer mylib",
                name=whole,
            ) from error
        if name not in self._changing:
            setattr(self, name, value)  # cached, because frequent calls use it
        return value


def _replacing(module: _Private, name: str, make: Make) -> Replacement:
    getattr(module, name)  # raises if this version does not have it
    return Replacement(importlib.import_module(module.module_name), name, make)


ad = _Private("jax._src.interpreters.ad")
api = _Private("jax._src.api")
array = _Private("jax._src.array")
batching = _Private("jax._src.interpreters.batching")
serialization = _Private("jax.experimental.serialize_executable")
config = _Private("jax._src.config")
core = _Private("jax._src.core")
cudnn = _Private(
    "jax._src.cudnn.fused_attention_stablehlo",
    changing=("check_cudnn_version", "check_compute_capability"),
)
dispatch = _Private("jax._src.dispatch")
distributed = _Private("jax._src.distributed")
equinox_errors = _Private("equinox._errors", changing=("_error",))
equinox_primitives = _Private("equinox.internal._primitive")
equinox_jit = _Private("equinox._jit", changing=("last_error_info",))
hardware_utils = _Private("jax._src.hardware_utils")
mesh_lib = _Private("jax._src.mesh")
mlir = _Private("jax._src.interpreters.mlir", changing=("warnings",))
name_stacks = _Private("jax._src.source_info_util")
partial_eval = _Private("jax._src.interpreters.partial_eval")
sharding_impls = _Private("jax._src.sharding_impls")
traceback_util = _Private("jax._src.traceback_util")
xla_bridge = _Private("jax._src.xla_bridge")
xla_client = _Private("jaxlib.xla_client")
hlo = _Private("jaxlib._hlo")


def jit(fun: Callable[..., object], **options: Any) -> Any:
    """`jax.jit`. If `EQX_ON_ERROR=breakpoint`, Equinox replaces it by one without methods."""
    return api.jit(fun, **options)


def mesh_with_devices() -> Mesh:
    """The mesh in force with its devices; an empty mesh if there is none."""
    mesh = mesh_lib.get_concrete_mesh()
    # `with mesh:` is deprecated, but still common.
    return mesh_lib.thread_resources.env.physical_mesh if mesh.empty else mesh


def vmapped_axes() -> Iterator[Any]:
    """JAX's data about the axis of each surrounding `vmap`."""
    trace = core.trace_ctx.trace
    while trace is not None:
        if isinstance(trace, batching.BatchTrace):
            yield trace.axis_data
        trace = getattr(trace, "parent_trace", None)


def traces_here() -> list[Any]:
    """The current trace and those under it, up to the one that records a program or computes."""
    traces = [core.trace_ctx.trace]
    while isinstance(traces[-1], ad.JVPTrace | ad.LinearizeTrace | batching.BatchTrace):
        traces.append(traces[-1].parent_trace)
    return traces


def trace_of(value: object) -> Any:
    """The trace of a traced value; None for other values."""
    return getattr(value, "_trace", None) if isinstance(value, Tracer) else None


def batched(
    program: ClosedJaxpr, axis: object, are_mapped: Sequence[bool]
) -> tuple[ClosedJaxpr, list[bool]]:
    """A closed jaxpr under `vmap`, with batch axes in front, and which of its results are batched.
    `axis` is JAX's data about the axis.
    """
    return batching.batch_jaxpr(program, axis, list(are_mapped), False)


def trace_kind() -> Literal["eager", "transformed", "staged"]:
    """How calls here run: at once, at once under an eager `grad`, `jvp` or `vmap`, or later, as a
    part of a program.
    """
    if type(core.trace_ctx.trace) is core.EvalTrace:
        return "eager"
    return "staged" if is_staged() else "transformed"


def nodes_of(treedef: Any) -> Sequence[Node]:
    """A tree's nodes and leaves. `PyTreeDef.walk` would call a Python function for each node."""
    return treedef.__getstate__()[1]


def data_of(nodes: Iterable[Node]) -> list[object]:
    """The nodes' own data: static fields, keys of dicts."""
    data = list(map(_data_of_node, nodes))
    if _USUAL.issuperset(map(type, data)):  # each call comes here
        return list(chain.from_iterable(filter(None, data)))
    present = [part for part in data if part is not None]
    return [x for part in present for x in (part if type(part) in _USUAL else (part,))]


def which_have_data(nodes: Iterable[Node]) -> list[int]:
    data = enumerate(map(_data_of_node, nodes))
    return [i for i, part in data if part or type(part) not in _USUAL]


def classes_in(nodes: Iterable[Node]) -> set[type]:
    """The classes of nodes that JAX doesn't know by itself."""
    return {cls for cls in map(_class_of_node, nodes) if cls is not None}


_data_of_node, _class_of_node = itemgetter(2), itemgetter(3)
_USUAL = frozenset({type(None), tuple, list})


class Uncommitted:
    """Marks an uncommitted array, which JAX may move."""


UNCOMMITTED = Uncommitted()


def sharding_under(x: Any) -> Sharding | Uncommitted | None:
    """The sharding of the concrete array behind `x`, without the dimensions added by `vmap`; None
    if there is no such array.
    """
    if isinstance(x, ad.JVPTracer | ad.LinearizeTracer):
        return sharding_under(x.primal)
    if isinstance(x, batching.BatchTracer):
        sharding = sharding_under(x.val)
        if x.batch_dim is None or not isinstance(sharding, NamedSharding):
            return sharding
        entries = list(sharding.spec.partitions) + [None] * (x.val.ndim - len(sharding.spec))
        del entries[x.batch_dim]
        return NamedSharding(
            sharding.mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind
        )
    # JAX converts Python numbers to a jax.Array without a sharding.
    if isinstance(x, jax.Array) and not isinstance(x, Tracer) and hasattr(x, "sharding"):
        return x.sharding if x.committed else UNCOMMITTED
    return None


def unreduced_kind(spec: PartitionSpec) -> str | None:
    """How values on unreduced axes are combined: `sum`, `max` or `min`; None without such axes."""
    # JAX 0.10 knows only sums.
    kind = getattr(spec, "unreduced_kind", None)
    return kind.name if kind is not None else "sum" if spec.unreduced else None


def value_under(x: Any) -> Any:
    """The concrete value behind `x` in an eager transformation."""
    while isinstance(x, ad.JVPTracer | ad.LinearizeTracer | batching.BatchTracer):
        x = x.val if isinstance(x, batching.BatchTracer) else x.primal
    return x


def in_host_memory(x: T) -> T | jax.Array:
    """A result of `jax.jit` that is in host memory, with this memory kind. JAX's sharding wrongly
    has "device" for keys, and for arrays that are split over only Explicit axes of a mesh that also
    has Auto axes: in 0.10.2 and 0.12.0, no public issue is known. The buffers are the same. May go
    once its tests in `tests/test_compat.py` fail on the oldest supported JAX.
    """
    if isinstance(x, Tracer) or not isinstance(x, jax.Array):
        return x
    sharding = x.sharding.with_memory_kind("pinned_host")
    return x if sharding == x.sharding else array_like(x, sharding)


def array_like(x: Any, sharding: Sharding, shards: Sequence[jax.Array] | None = None) -> jax.Array:
    """An array of these shards, by default those of `x`, with the type of `x`: in all processes
    that of the program which made it, or other programs would differ between them.
    """
    if shards is None:
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            numbers = array_like(jax.random.key_data(x), sharding)
            return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
        shards = [shard.data for shard in x.addressable_shards]
    y = jax.make_array_from_single_device_arrays(x.shape, sharding, shards, dtype=x.dtype)
    return weakly_typed(y) if getattr(x, "weak_type", False) else y


class CoordinationClient(Protocol):
    """The methods used of JAX's coordination service client. Times are in milliseconds."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...
    def key_value_try_get(self, key: str) -> str: ...
    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...
    def key_value_increment(self, key: str, increment: int) -> int: ...
    def key_value_delete(self, key: str) -> None: ...
    def get_live_nodes(self, process_ids: Sequence[int]) -> Mapping[int, int]: ...


def coordination_client() -> CoordinationClient | None:
    """The client by which processes exchange messages without their devices; None with a single
    process, or before `jax.distributed.initialize`.
    """
    return distributed.global_state.client


def index_of_process() -> int:
    """This process's index, without starting its devices."""
    return distributed.global_state.process_id


def number_of_processes() -> int:
    """The number of processes, without starting this one's devices."""
    return distributed.global_state.num_processes


def is_recoverable() -> bool:
    """Whether processes outlive the loss of another one."""
    is_on = jax.config.values["jax_enable_recoverability"]
    return coordination_client() is not None and bool(is_on)


def devices_have_started() -> bool:
    return xla_bridge.backends_are_initialized()


def living(client: CoordinationClient, count: int) -> set[int]:
    """Waits until all processes that are alive have called this, and returns them."""
    # JAX lets those wait for each other who name the same processes. A number that none has keeps
    # this apart from a program's own `live_devices`.
    return {*client.get_live_nodes(range(count + 1))}


def forget_effects() -> None:
    """Leaves out effects of programs that have failed, for which JAX would wait at the end, and
    then not leave the other processes.
    """
    dispatch.runtime_tokens.clear()


@contextmanager
def _unless(status: str) -> Iterator[None]:
    """Ends silently if the service answers with this status."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if status not in str(error):
            raise


def set_once(client: CoordinationClient, key: str, value: str) -> bool:
    """False if the service has this key already."""
    with _unless(names.TEXT_ALREADY_EXISTS):
        client.key_value_set(key, value)
        return True
    return False


def value_at(client: CoordinationClient, key: str) -> str | None:
    """The value of a key; None if the service doesn't have it."""
    with _unless(names.TEXT_NOT_FOUND):
        return client.key_value_try_get(key)
    return None


def values_by_process(client: CoordinationClient, place: str) -> dict[int, str]:
    """The values of the keys `place/0`, `place/1`, ..."""
    pairs = client.key_value_dir_get(f"{place}/")
    return {int(key.rsplit("/", 1)[1]): value for key, value in pairs}


class TransferServer(Protocol):
    """The methods used of JAX's transfer server."""

    def address(self) -> str: ...
    def await_pull(self, uuid: int, arrays: object) -> None: ...
    def connect(self, address: str) -> Any: ...


def start_transfer_server(client: object, host: str) -> TransferServer | None:
    """A server that gives arrays of this process to others, at a port of its own; None if this JAX
    has none, as on Windows.
    """
    try:
        from jax.experimental import transfer
    except (ImportError, AttributeError):
        return None
    # Several sockets for each other process: large arrays come faster than by one.
    return transfer.start_transfer_server(client, f"{host}:0", [f"{host}:0"] * 4)


def break_connection(connection: Any) -> None:
    """Ends a connection to a transfer server: what it waits for becomes an error."""
    connection._poison_connection()


def data_of_shards(x: Any) -> Sequence[jax.Array]:
    """The arrays of `x.addressable_shards`, in their order, in a tenth of the time."""
    return x._arrays


def set_label(x: Any, text: str) -> None:
    """Labels an array, this object alone."""
    x._mylib_label = text


def label_of(x: object) -> str:
    return getattr(x, "_mylib_label", "")


# Until JAX 0.11 a program for several devices that is called with a deleted array ends the process
# (as in https://github.com/openxla/xla/issues/22604). May go once JAX 0.12 is the oldest supported.
DELETED_ARRAYS_END_IT = jax.__version_info__ < (0, 12)


def weakly_typed(x: jax.Array) -> jax.Array:
    """The same shards as an array of a weak type. JAX makes arrays from shards of strong types
    only.
    """
    aval = x.aval.update(weak_type=True)
    return array.ArrayImpl(aval, x.sharding, data_of_shards(x), committed=x.committed)


def is_compile_only(device: Any) -> bool:
    """Whether this device is only a description for a compiler: it can't hold arrays or run
    programs.
    """
    return type(device.client).__name__ == "CompileOnlyPyClient"


def ran_on_a_description(text: str) -> bool:
    """Whether this is the text of JAX's error for using a compile-only device."""
    no_program = "Executable" in text and "no attribute 'local_devices'" in text
    return no_program or "not available with compile-only client" in text


def is_sharding_type_error(error: Exception) -> bool:
    """Whether this is JAX's error for an operation on Explicit axes whose result could have several
    shardings.
    """
    return isinstance(error, core.ShardingTypeError)


def lowered_for_a_missing_backend(text: str) -> bool:
    """Whether this is JAX's error, as `Type: text`, for lowering a callback for a platform that
    this process doesn't have.
    """
    return text.partition(": ")[2].startswith("Unknown backend: ")


def nvidia_gpu_is_here() -> bool:
    """Whether JAX finds the driver of an NVIDIA GPU."""
    return hardware_utils.has_visible_nvidia_gpu()


def describe_cudnn(version: int, capability: tuple[int, int]) -> None:
    """For `cudnn_as_described`: a GPU of this compute capability with this version of cuDNN, such
    as 91000.
    """
    _cudnn[:] = [(version, capability)]


# Its version and its compute capability.
_cudnn: list[tuple[int, tuple[int, int]]] = []
_as_described: ContextVar[bool] = ContextVar("cudnn_as_described", default=False)


@contextmanager
def cudnn_as_described() -> Iterator[None]:
    """Lets `jax.nn.dot_product_attention(implementation="cudnn")` be traced here for the GPU that
    `describe_cudnn` was last called for, if any. JAX asks the GPU and the cuDNN of this process,
    and refuses to trace without them.
    """
    if not _cudnn:
        yield
        return
    token = _as_described.set(True)
    try:
        with _replacing(cudnn, "check_cudnn_version", _described(lambda: _cudnn[0][0])):
            with _replacing(cudnn, "check_compute_capability", _described(_reaches)):
                yield
    finally:
        _as_described.reset(token)


def _described(answer: Callable[..., object]) -> Make:
    """Other threads go on asking the cuDNN of this process."""

    def make(original: Callable[..., object]) -> Callable[..., object]:
        return lambda *args: (answer if _as_described.get() else original)(*args)

    return make


def _reaches(minimum: str) -> bool:
    return _cudnn[0][1] >= tuple(map(int, minimum.split(".")))


def tpu_is_here() -> bool:
    """Whether JAX finds a TPU among the PCI devices."""
    return hardware_utils.num_available_tpu_chips_and_device_id()[0] > 0


def is_staged() -> bool:
    """Whether calls here become part of a program that runs later."""
    # Fast path: every call needs this, and usually nothing is traced.
    if type(core.trace_ctx.trace) is core.EvalTrace:
        return False
    # An eager `grad`, `jvp` or `vmap` computes at once, so the trace below it decides. Every other
    # trace records a program.
    return not isinstance(traces_here()[-1], core.EvalTrace | None)


def opened(jaxpr: Program) -> Jaxpr:
    """A jaxpr, without constants if it is closed."""
    # Newer JAX has one class for both.
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def is_of_jax(jaxpr: Program) -> bool:
    """Whether it is a function of JAX's own, such as `jnp.where`."""
    about = opened(jaxpr).debug_info
    return about is not None and (about.func_filename or "").startswith(JAX)


def closed_or_open(jaxpr: ClosedJaxpr, as_in: Program) -> Program:
    """A closed jaxpr, opened if `as_in` is open. Newer JAX has one class for both."""
    return jaxpr if hasattr(as_in, "consts") else opened(jaxpr)


def rule_of_custom_jvp(eqn: JaxprEqn) -> Rule:
    """The rule of a `custom_jvp` in a program, as a function of the equation's arguments and their
    tangents that returns a list of results and their tangents.
    """
    _, rule = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
    return rule.call_wrapped


def rules_of_custom_vjp(eqn: JaxprEqn) -> tuple[Rule, Rule]:
    """The rules of a `custom_vjp` in a program. The first takes a flag for each argument of the
    equation (whether it is differentiated) and the arguments, and returns results and residuals.
    The second takes residuals and cotangents, and returns the arguments' cotangents, None if they
    are zero.
    """
    _, forward, backward = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
    constants = _parameter(eqn, names.PARAM_NUM_CONSTS)
    results = len(eqn.outvars)

    def fwd(perturbed: Sequence[bool], *args: object) -> list[object]:
        pairs = enumerate(zip(args, perturbed, strict=True))
        outs = forward.call_wrapped(*[y for i, (x, p) in pairs for y in (x, p and i >= constants)])
        _, _, forwarded = _parameter(eqn, names.PARAM_OUT_TREES)()
        residuals, primals = iter(outs[: len(outs) - results]), outs[len(outs) - results :]
        return [*primals, *(next(residuals) if i is None else args[i] for i in forwarded)]

    def bwd(*args: object) -> list[object]:
        returned = backward.call_wrapped(*args)
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], list):
            returned, _ = returned  # JAX 0.12 returns logs, too
        return [x if isinstance(x, jax.Array | np.ndarray) else None for x in returned]

    return fwd, bwd


def type_under(aval: AbstractValue) -> AbstractValue | None:
    """The type of a reference's value; None if it is not a reference."""
    return getattr(aval, "inner_aval", None)


def function_of_equinox(eqn: JaxprEqn) -> Rule | None:
    """The implementation of a primitive of Equinox (such as `lineax.linear_solve`) as a function of
    its arrays; None for other primitives. JAX sees it only when it lowers the program.
    """
    registry = equinox_primitives._vprim_impl_registry
    function = registry.get(eqn.primitive)
    return None if function is None else functools.partial(function, **eqn.params)


def is_filter_jit(fun: object) -> bool:
    """Whether `equinox.filter_jit` has made it."""
    return isinstance(fun, equinox_jit._JitWrapper)


class UnknownParameter(Exception):
    """This JAX has another name for a parameter of an equation."""


def _parameter(eqn: JaxprEqn, name: str) -> Any:
    if name not in eqn.params:
        raise UnknownParameter(f"JAX's {eqn.primitive.name} has no parameter {name!r}")
    return eqn.params[name]


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """The number of a `scan`'s constants, and of its carried arrays."""
    if names.PARAM_FT_IN in eqn.params:  # JAX 0.12
        constants, carried, _ = eqn.params[names.PARAM_FT_IN].unpack()
        return len(constants), len(carried)
    return _parameter(eqn, names.PARAM_NUM_CONSTS), _parameter(eqn, names.PARAM_NUM_CARRY)


def while_body(eqn: JaxprEqn) -> ClosedJaxpr:
    """The jaxpr of the body of a `while_loop`."""
    return _parameter(eqn, names.PARAM_BODY_JAXPR)


def axes_of_cast_or_sum(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes of a `pvary` or `psum_invariant`."""
    return _parameter(eqn, names.PARAM_AXES)


def without_dead_code(program: ClosedJaxpr) -> ClosedJaxpr:
    """A closed jaxpr without unused equations."""
    jaxpr, _ = partial_eval.dce_jaxpr(opened(program), True, instantiate=True)
    return ClosedJaxpr(jaxpr, program.consts) if jaxpr is not program else program


@functools.cache
def error_check_replaced(make: Make) -> Replacement:
    """Makes `equinox.error_if` call another function."""
    return _replacing(equinox_errors, "_error", make)


def unspecified() -> object:
    """The parameter of a call of `jax.jit` that leaves an array's sharding open."""
    return sharding_impls.UNSPECIFIED


def devices_of_lowering(ctx: Any) -> int:
    """The number of devices of the program that is being lowered."""
    axes = ctx.module_context.axis_context
    return axes.num_devices if hasattr(axes, "num_devices") else axes.mesh.size


def mesh_of_lowering(ctx: Any) -> AbstractMesh:
    """The mesh of the program that is being lowered: that of the context of the equation, else of
    the program's shardings. Its axis "devices" is all of them, if it has no mesh.
    """
    axes = ctx.module_context.axis_context
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        mesh = getattr(axes, "abstract_mesh", None)
    if mesh is None or mesh.empty:
        devices = getattr(axes, "device_assignment", None)
        if devices is None:
            return AbstractMesh((devices_of_lowering(ctx),), ("devices",))
        mesh = Mesh(np.array(devices), ("devices",)).abstract_mesh
    return mesh


def spec_of_compiler(sharding: Any, mesh: Mesh) -> PartitionSpec | None:
    """A sharding that the compiler's partitioner gives; None if it splits a part of an axis."""
    try:
        (spec,) = sharding_impls.parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(0), mesh)
    except ValueError:  # `IndivisibleError`, which is private
        return None
    return spec


def without_types_of_shard_map() -> AbstractContextManager[None]:
    """A context in which nothing is asked for its `manual_axis_type`, also inside `shard_map`."""
    return config._check_vma(False)


def requires_devices(primitive: Primitive) -> None:
    """Lets the rule that lowers a primitive see the program's mesh and devices."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


@functools.cache
def hide_from_breakpoints(file: str) -> None:
    """Hides the frames of a file in the stack that JAX shows."""
    traceback_util.register_exclusion(file)


def error_with(
    message: str, stack: Sequence[bytes | str], jit_id: bytes
) -> eqx.EquinoxRuntimeError:
    """The error that `equinox.filter_jit` would raise. When the check was traced, `jit_id` must
    have been the local variable `__equinox_jit_id__` of a running function.
    """
    inside = stack[: stack.index(jit_id)] if jit_id in stack else stack
    # Like Equinox, which leaves out its own frames and JAX's.
    frames = (piece for piece in reversed(inside) if isinstance(piece, str))
    shown = "".join(piece for piece in frames if not piece.startswith(_OWN_FRAME))
    text = equinox_jit._on_error_msg
    return eqx.EquinoxRuntimeError(text.format(msg=message, stack=shown))


_OWN_FRAME = f'  File "{OURS}'


class GradientPass(Enum):
    """The pass of a gradient that an equation belongs to."""

    NONE = auto()
    FORWARD = auto()
    TRANSPOSED = auto()


def pass_of(eqn: JaxprEqn, around: GradientPass) -> GradientPass:
    """The pass according to the name stack, or else that of the surrounding equation."""
    stack = eqn.source_info.name_stack.stack
    transforms = {x.name for x in stack if isinstance(x, name_stacks.Transform)}
    if any(x.name == names.STACK_RECOMPUTED for x in stack):
        return GradientPass.FORWARD
    if names.STACK_TRANSPOSE in transforms:
        return GradientPass.TRANSPOSED
    return GradientPass.FORWARD if names.STACK_JVP in transforms else around


def frames_of(eqn: JaxprEqn) -> Sequence[Any]:
    """The frames in which an equation was made, the innermost first. They have `file_name`,
    `line_num` and `function_name`, which is qualified.
    """
    traceback = eqn.source_info.traceback
    return traceback.frames if traceback else ()


def readable_error(text: str, jit_id: bytes) -> eqx.EquinoxRuntimeError | None:
    """Converts an error with this text like `equinox.filter_jit`; None if it is not of Equinox's
    callback.
    """
    if f"{names.TEXT_EQUINOX_ERROR}: " not in text:
        return None
    last = equinox_jit.last_error_info
    if last is None:
        return None
    message, stack = last
    return error_with(message, stack, jit_id)


@functools.cache
def donation_warning_silenced(where: Callable[[], bool]) -> Replacement:
    """Silences JAX's warning about donated buffers where this is so. It names no array, and is
    missing if only the shardings differ.

    A filter of `warnings` would affect all threads, and threads that change filters at the same
    time leave some behind.
    """

    def silenced(original: ModuleType) -> object:
        def warn(
            message: object, category: Any = None, stacklevel: int = 1, **options: Any
        ) -> None:
            about_donation = str(message).startswith(names.TEXT_NOT_DONATED)
            if not (about_donation and where()):
                original.warn(message, category, stacklevel + 1, **options)

        return SimpleNamespace(**vars(original) | {"warn": warn})

    return _replacing(mlir, "warnings", silenced)


def devices_of_lowered(lowered: jax.stages.Lowered) -> tuple[Any, ...]:
    """The devices that a lowered program is for, in its order."""
    return tuple(lowered._lowering._device_list)  # pyright: ignore


def _unloaded(compiled: jax.stages.Compiled) -> Any:
    """The parts of an executable that JAX keeps to serialise it."""
    return compiled._executable._unloaded_executable  # pyright: ignore


def text_with_constants(compiled: jax.stages.Compiled) -> str:
    """The text of a compiled program, without lines of Python. `as_text` leaves the numbers of
    large constants out.
    """
    options = hlo.HloPrintOptions()
    options.print_large_constants = True
    options.print_backend_config = True
    options.print_metadata = False
    (module,) = compiled.runtime_executable().hlo_modules()  # pyright: ignore
    return module.to_string(options)


def host_callbacks(compiled: jax.stages.Compiled) -> int:
    """How many functions of Python a compiled program may call. What `custom_partitioning` used
    while it was compiled counts, too, though it is not called any more.
    """
    program = _unloaded(compiled)
    return len(program.host_callbacks) + len(program.keepalive or ())


def serialized(compiled: jax.stages.Compiled) -> bytes:
    """JAX's form of an executable: a pickle. Raises `pickle.UnpicklingError` if `deserialized`
    would not make something that is in it. The program must not call functions of Python.
    """
    executable, compiled = copy.copy(compiled._executable), copy.copy(compiled)  # pyright: ignore
    unloaded = dataclasses.replace(_unloaded(compiled), keepalive=None)
    executable._unloaded_executable = unloaded  # pyright: ignore
    compiled._executable = executable  # pyright: ignore
    content, _, _ = serialization.serialize(compiled)
    _unpickler(content, tuple(unloaded.device_list), loads=False).load()
    return content


def deserialized(
    content: bytes, lowered: jax.stages.Lowered, devices: Sequence[Any]
) -> jax.stages.Compiled:
    """The executable of a program that is lowered here, too. JAX's own function would make whatever
    the pickle asks for.
    """
    unloaded, infos, no_kwargs = _unpickler(content, devices, loads=True).load()
    infos = lowered.in_tree.unflatten(infos)
    return jax.stages.Compiled(unloaded.load(), [], infos, lowered.out_tree, no_kwargs=no_kwargs)


# The first bytes of what the CPU runs, on Linux and macOS.
_CODE = (b"\x7fELF", b"\xcf\xfa\xed\xfe")


def lacks_code(compiled: jax.stages.Compiled, content: bytes) -> bool:
    """Whether the serialised form of a program for CPUs has no code. A program without loops and
    arithmetic has none, and one that was deserialised before has lost it.
    """
    device = _unloaded(compiled).device_list[0]
    return device.platform == "cpu" and not any(x in content for x in _CODE)


def _unpickler(content: bytes, devices: Sequence[Any], loads: bool) -> pickle.Unpickler:
    class Unpickler(serialization._JaxPjrtUnpickler):
        def find_class(self, module: str, name: str) -> object:
            if f"{module}.{name}" not in names.PICKLED_NAMES:
                raise pickle.UnpicklingError(f"{module}.{name} is no part of an executable")
            return super().find_class(module, name)

        def persistent_load(self, pid: tuple[str, object]) -> object:
            return None if pid[0] == "exec" and not loads else super().persistent_load(pid)

    return Unpickler(io.BytesIO(content), devices[0].client, devices)


def compilation_cache() -> str | None:
    """Where JAX keeps compiled programs; None if it keeps none."""
    options = jax.config.values
    folder = options["jax_compilation_cache_dir"] or None
    return folder if options["jax_enable_compilation_cache"] else None


def names_in_cache_keys() -> AbstractContextManager[None]:
    """Adds names and source lines to the key of the compilation cache."""
    return config.compilation_cache_include_metadata_in_key(True)


def add_cpu_backend(name: str, devices: int) -> None:
    """Adds a backend of CPU devices to JAX that is never the default one."""
    xla_bridge.register_backend_factory(
        name, lambda: xla_client.make_cpu_client(num_devices=devices), priority=-100
    )
    if xla_bridge.backends_are_initialized():
        # JAX has already initialised its backends, which it does only once.
        xla_bridge._backends[name] = xla_bridge._init_backend(name)
