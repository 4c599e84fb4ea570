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
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from itertools import chain
from operator import itemgetter
from typing import Any, Literal, Protocol

import equinox as eqx
import jax
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from .._lines import OURS, spot
from . import names as names


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


def _replaced(module: _Private, name: str, new: Any) -> Any:
    """Replaces a name by `new`, and returns the old object."""
    former = getattr(module, name)
    setattr(importlib.import_module(module.module_name), name, new)
    return former


ad = _Private("jax._src.interpreters.ad")
ad_util = _Private("jax._src.ad_util")
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


def jit(fun: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit`. If `EQX_ON_ERROR=breakpoint`, Equinox replaces it by one without methods."""
    return api.jit(fun, **options)


def mesh_with_devices() -> Mesh:
    """The mesh in force with its devices; an empty mesh if there is none."""
    mesh = mesh_lib.get_concrete_mesh()
    # `with mesh:` is deprecated, but still common.
    return mesh_lib.thread_resources.env.physical_mesh if mesh.empty else mesh


def is_eager(trace: Any) -> bool:
    """Whether the current trace is outside all transformations."""
    return isinstance(trace, core.EvalTrace)


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


def trace_of(x: Any) -> Any:
    """The trace of a traced value; None for other values."""
    return getattr(x, "_trace", None) if isinstance(x, Tracer) else None


def batched(program: Any, axis: Any, are_mapped: Sequence[bool]) -> tuple[Any, list[bool]]:
    """A closed jaxpr under `vmap`, with batch axes in front, and which of its results are batched.
    `axis` is JAX's data about the axis.
    """
    return batching.batch_jaxpr(program, axis, list(are_mapped), False)


@functools.cache
def compute_on_meshes_of_values() -> None:
    """Lets JAX's rules move values with Auto axes, and make zeros like them, in code on Explicit
    axes. JAX does this on the mesh of the code, and refuses: where a `vmap` or a second gradient is
    around the gradient of a loop whose iterations use `auto_axes`. In JAX 0.10.2 and 0.12.0; no
    public issue is known. Other rules do what is done here (`batching.broadcast`).
    """
    move, zeros = batching.moveaxis, ad_util.aval_zeros_likers
    _replaced(batching, "moveaxis", _on_mesh_of(move, jax.typeof))
    zeros[ShapedArray] = _on_mesh_of(zeros[ShapedArray], lambda aval: aval)
    # JAX 0.10.2 also makes parts of a loop on the mesh of the code, for a checkpoint.
    rules = partial_eval.partial_eval_jaxpr_custom_rules
    (scan,) = [primitive for primitive in rules if primitive.name == names.SCAN]
    rules[scan] = _in_place_of_equation(rules[scan])


def _in_place_of_equation(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule that splits an equation, in the context of the equation."""

    @functools.wraps(rule)
    def split(saveable: Any, unknown: Any, instantiated: Any, eqn: Any, **options: Any) -> Any:
        with eqn.ctx.manager:
            return rule(saveable, unknown, instantiated, eqn, **options)

    return split


def _on_mesh_of(fun: Callable[..., Any], type_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function of a value that runs on its mesh, if it has one."""

    @functools.wraps(fun)
    def on_its_mesh(x: Any, *args: Any) -> Any:
        mesh: Any = getattr(type_of(x), "sharding", _NO_MESH).mesh
        if mesh.empty or mesh == jax.sharding.get_abstract_mesh():
            return fun(x, *args)
        with jax.sharding.use_abstract_mesh(mesh):
            return fun(x, *args)

    return on_its_mesh


# For values without a sharding in their type, such as a Ref.
_NO_MESH: Any = NamedSharding(AbstractMesh((), ()), PartitionSpec())


def trace_kind() -> Literal["eager", "transformed", "staged"]:
    """How calls here run: at once, at once under an eager `grad`, `jvp` or `vmap`, or later, as a
    part of a program.
    """
    trace = core.trace_ctx.trace
    if type(trace) is core.EvalTrace:
        return "eager"
    return "staged" if _is_staged_trace(trace) else "transformed"


def nodes_of(treedef: Any) -> Sequence[Any]:
    """A tree's nodes and leaves. `PyTreeDef.walk` would call a Python function for each node."""
    return treedef.__getstate__()[1]


def data_of(nodes: Iterable[Any]) -> list[Any]:
    """The nodes' own data: static fields, keys of dicts."""
    # The pickled fields of a node: its kind, the number of its children, its data, ...
    data = list(map(_data_of_node, nodes))
    if _USUAL.issuperset(map(type, data)):  # each call comes here
        return list(chain.from_iterable(filter(None, data)))
    present = [x for x in data if x is not None]
    return [x for part in present for x in (part if type(part) in _USUAL else (part,))]


def which_have_data(nodes: Iterable[Any]) -> list[int]:
    data = enumerate(map(_data_of_node, nodes))
    return [i for i, x in data if x or not (x is None or type(x) in _USUAL)]


_data_of_node = itemgetter(2)
_USUAL = frozenset({type(None), tuple, list})


def _is_staged_trace(trace: Any) -> bool:
    """Whether a trace records a program that runs later."""
    # An eager `grad`, `jvp` or `vmap` computes at once, so the trace below it decides. Every other
    # trace records a program.
    while isinstance(trace, ad.JVPTrace | ad.LinearizeTrace | batching.BatchTrace):
        trace = trace.parent_trace
    return not (trace is None or isinstance(trace, core.EvalTrace))


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


def with_actual_memory_kind(x: Any) -> Any:
    """A result of `jax.jit`, with the right memory kind if it is in host memory. JAX's sharding
    wrongly has "device" for arrays that are split over only Explicit axes of a mesh that also has
    Auto axes: in 0.10.2 and 0.12.0, no public issue is known. The buffers are the same. May go once
    its test in `tests/test_compat.py` fails on the oldest supported JAX.
    """
    if isinstance(x, Tracer) or not isinstance(x, jax.Array):
        return x
    if x.aval.memory_space != jax.memory.Space.Host:
        return x
    sharding = x.sharding.with_memory_kind("pinned_host")
    if sharding == x.sharding:
        return x
    return array_like(x, sharding)


def array_like(x: Any, sharding: Sharding, shards: Sequence[jax.Array] | None = None) -> jax.Array:
    """An array of these shards, by default those of `x`, with the type of `x`: in all processes
    that of the program which made it, or other programs would differ between them.
    """
    if shards is None:
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


def coordination_client() -> CoordinationClient | None:
    """The client by which processes exchange messages without their devices; None with a single
    process, or before `jax.distributed.initialize`.
    """
    return distributed.global_state.client


def index_of_process() -> int:
    """This process's index, without starting its devices."""
    return distributed.global_state.process_id


def set_once(client: CoordinationClient, key: str, value: str) -> bool:
    """False if the service has this key already."""
    try:
        client.key_value_set(key, value)
    except jax.errors.JaxRuntimeError as error:
        if names.TEXT_ALREADY_EXISTS not in str(error):
            raise
        return False
    return True


def value_at(client: CoordinationClient, key: str) -> str | None:
    """The value of a key; None if the service doesn't have it."""
    try:
        return client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if names.TEXT_NOT_FOUND not in str(error):
            raise
        return None


def values_by_process(client: CoordinationClient, place: str) -> dict[int, str]:
    """The values of the keys `place/0`, `place/1`, ..."""
    pairs = client.key_value_dir_get(f"{place}/")
    return {int(key.rsplit("/", 1)[1]): value for key, value in pairs}


class TransferServer(Protocol):
    """The methods used of JAX's transfer server."""

    def address(self) -> str: ...
    def await_pull(self, uuid: int, arrays: Any) -> None: ...
    def connect(self, address: str) -> Any: ...


def start_transfer_server(client: Any, host: str) -> TransferServer | None:
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


def data_of_shards(x: jax.Array) -> Sequence[jax.Array]:
    """The arrays of `x.addressable_shards`, in their order, in a tenth of the time."""
    whole: Any = x
    return whole._arrays


def set_label(x: jax.Array, text: str) -> None:
    """Labels an array, this object alone."""
    whole: Any = x
    whole._mylib_label = text


def label_of(x: Any) -> str:
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
    """Makes `jax.nn.dot_product_attention(implementation="cudnn")` trace as for a GPU of this
    compute capability with this version of cuDNN, such as 91000. JAX asks the GPU and the cuDNN of
    this process, and refuses to trace without them.
    """

    def reaches(minimum: str) -> bool:
        return capability >= tuple(map(int, minimum.split(".")))

    _replaced(cudnn, "check_cudnn_version", lambda: version)
    _replaced(cudnn, "check_compute_capability", reaches)


def tpu_is_here() -> bool:
    """Whether JAX finds a TPU among the PCI devices."""
    return hardware_utils.num_available_tpu_chips_and_device_id()[0] > 0


def is_staged() -> bool:
    """Whether calls here become part of a program that runs later."""
    trace = core.trace_ctx.trace
    # Fast path: every call needs this, and usually nothing is traced.
    return type(trace) is not core.EvalTrace and _is_staged_trace(trace)


def opened(jaxpr: Any) -> Any:
    """A jaxpr, without constants if it is closed."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def closed_or_open(jaxpr: Any, as_in: Any) -> Any:
    """A closed jaxpr, opened if `as_in` is open. Newer JAX has one class for both."""
    return jaxpr if hasattr(as_in, "consts") else opened(jaxpr)


def rule_of_custom_jvp(eqn: Any) -> Callable[..., list[Any]]:
    """The rule of a `custom_jvp` in a program, as a function of the equation's arguments and their
    tangents that returns a list of results and their tangents.
    """
    _, rule = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
    return rule.call_wrapped


def rules_of_custom_vjp(eqn: Any) -> tuple[Callable[..., list[Any]], Callable[..., list[Any]]]:
    """The rules of a `custom_vjp` in a program. The first takes a flag for each argument of the
    equation (whether it is differentiated) and the arguments, and returns results and residuals.
    The second takes residuals and cotangents, and returns the arguments' cotangents, None if they
    are zero.
    """
    _, forward, backward = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
    constants = _parameter(eqn, names.PARAM_NUM_CONSTS)
    results = len(eqn.outvars)

    def fwd(perturbed: Sequence[bool], *args: Any) -> list[Any]:
        pairs = enumerate(zip(args, perturbed, strict=True))
        outs = forward.call_wrapped(*[y for i, (x, p) in pairs for y in (x, p and i >= constants)])
        _, _, forwarded = _parameter(eqn, names.PARAM_OUT_TREES)()
        residuals, primals = iter(outs[: len(outs) - results]), outs[len(outs) - results :]
        return [*primals, *(next(residuals) if i is None else args[i] for i in forwarded)]

    def bwd(*args: Any) -> list[Any]:
        returned = backward.call_wrapped(*args)
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], list):
            returned, _ = returned  # JAX 0.12 returns logs, too
        return [x if isinstance(x, jax.Array | np.ndarray) else None for x in returned]

    return fwd, bwd


def type_under(aval: Any) -> Any:
    """The type of a reference's value; None if it is not a reference."""
    return getattr(aval, "inner_aval", None)


def function_of_equinox(eqn: Any) -> Callable[..., list[Any]] | None:
    """The implementation of a primitive of Equinox (such as `lineax.linear_solve`) as a function of
    its arrays; None for other primitives. JAX sees it only when it lowers the program.
    """
    registry = equinox_primitives._vprim_impl_registry
    function = registry.get(eqn.primitive)
    return None if function is None else functools.partial(function, **eqn.params)


def is_filter_jit(fun: Any) -> bool:
    """Whether `equinox.filter_jit` has made it."""
    return isinstance(fun, equinox_jit._JitWrapper)


class UnknownParameter(Exception):
    """This JAX has another name for a parameter of an equation."""


def _parameter(eqn: Any, name: str) -> Any:
    if name not in eqn.params:
        raise UnknownParameter(f"JAX's {eqn.primitive.name} has no parameter {name!r}")
    return eqn.params[name]


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """The number of a `scan`'s constants, and of its carried arrays."""
    if names.PARAM_FT_IN in eqn.params:  # JAX 0.12
        constants, carried, _ = eqn.params[names.PARAM_FT_IN].unpack()
        return len(constants), len(carried)
    return _parameter(eqn, names.PARAM_NUM_CONSTS), _parameter(eqn, names.PARAM_NUM_CARRY)


def while_body(eqn: Any) -> Any:
    """The jaxpr of the body of a `while_loop`."""
    return _parameter(eqn, names.PARAM_BODY_JAXPR)


def axes_of_cast_or_sum(eqn: Any) -> tuple[Any, ...]:
    """The mesh axes of a `pvary` or `psum_invariant`."""
    return _parameter(eqn, names.PARAM_AXES)


def without_dead_code(program: Any) -> Any:
    """A closed jaxpr without unused equations."""
    jaxpr, _ = partial_eval.dce_jaxpr(opened(program), True, instantiate=True)
    return ClosedJaxpr(jaxpr, program.consts) if jaxpr is not program else program


def replace_error_check(error: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `equinox.error_if` call `error`, and returns the function that it called before."""
    return _replaced(equinox_errors, "_error", error)


def unspecified() -> Any:
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


def spec_of_compiler(sharding: Any, mesh: Any) -> PartitionSpec | None:
    """A sharding that the compiler's partitioner gives; None if it splits a part of an axis."""
    try:
        (spec,) = sharding_impls.parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(0), mesh)
    except ValueError:  # `IndivisibleError`, which is private
        return None
    return spec


def without_types_of_shard_map() -> Any:
    """A context in which nothing is asked for its `manual_axis_type`, also inside `shard_map`."""
    return config._check_vma(False)


def requires_devices(primitive: Any) -> None:
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


def pass_of(eqn: Any, around: GradientPass) -> GradientPass:
    """The pass according to the name stack, or else that of the surrounding equation."""
    stack = eqn.source_info.name_stack.stack
    transforms = {x.name for x in stack if isinstance(x, name_stacks.Transform)}
    if any(x.name == names.STACK_RECOMPUTED for x in stack):
        return GradientPass.FORWARD
    if names.STACK_TRANSPOSE in transforms:
        return GradientPass.TRANSPOSED
    return GradientPass.FORWARD if names.STACK_JVP in transforms else around


def functions_of(eqn: Any) -> list[str]:
    """The qualified names of the functions that made an equation, the innermost first."""
    traceback = eqn.source_info.traceback
    return [] if traceback is None else [frame.function_name for frame in traceback.frames]


def lines_of(eqn: Any) -> list[str]:
    """The lines that made an equation, as `train.py:31`, the innermost first."""
    traceback = eqn.source_info.traceback
    frames = () if traceback is None else traceback.frames
    return [spot(frame.file_name, frame.line_num) for frame in frames]


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
def silence_donation_warning(where: Callable[[], bool]) -> None:
    """Silences JAX's warning about donated buffers where this is so. It names no array, and is
    missing if only the shardings differ.

    A filter of `warnings` would affect all threads, and threads that change filters at the same
    time leave some behind.
    """
    _replaced(mlir, "warnings", _Warnings(where))


class _Warnings:
    """Replaces the module `warnings` in the file of JAX that warns about donated buffers."""

    def __init__(self, is_silent: Callable[[], bool]):
        self._is_silent = is_silent

    def __getattr__(self, name: str) -> Any:
        return getattr(warnings, name)

    def warn(self, message: Any, category: Any = None, stacklevel: int = 1, **options: Any) -> None:
        about_donation = str(message).startswith(names.TEXT_NOT_DONATED)
        if not (about_donation and self._is_silent()):
            warnings.warn(message, category, stacklevel + 1, **options)


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


def _unpickler(content: bytes, devices: Sequence[Any], loads: bool) -> Any:
    class Unpickler(serialization._JaxPjrtUnpickler):
        def find_class(self, module: str, name: str) -> Any:
            if f"{module}.{name}" not in names.PICKLED_NAMES:
                raise pickle.UnpicklingError(f"{module}.{name} is no part of an executable")
            return super().find_class(module, name)

        def persistent_load(self, pid: Any) -> Any:
            return None if pid[0] == "exec" and not loads else super().persistent_load(pid)

    return Unpickler(io.BytesIO(content), devices[0].client, devices)


def compilation_cache() -> str | None:
    """Where JAX keeps compiled programs; None if it keeps none."""
    options = jax.config.values
    folder = options["jax_compilation_cache_dir"] or None
    return folder if options["jax_enable_compilation_cache"] else None


@contextmanager
def names_in_cache_keys() -> Iterator[None]:
    """Adds names and source lines to the key of the compilation cache."""
    with config.compilation_cache_include_metadata_in_key(True):
        yield


def add_cpu_backend(name: str, devices: int) -> None:
    """Adds a backend of CPU devices to JAX that is never the default one."""
    xla_bridge.register_backend_factory(
        name, lambda: xla_client.make_cpu_client(num_devices=devices), priority=-100
    )
    if xla_bridge.backends_are_initialized():
        # JAX has already initialised its backends, which it does only once.
        xla_bridge._backends[name] = xla_bridge._init_backend(name)
