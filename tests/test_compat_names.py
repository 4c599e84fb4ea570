"""That JAX still has the names that are strings: each is met by a real program."""

import ast
import functools
import importlib
import inspect
import re
import sys
import textwrap
import traceback
import warnings
from pathlib import Path

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import custom_partitioning as partitioning, io_callback, pallas as pl
from jax.experimental.buffer_callback import buffer_callback
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from kernels import tensor_cores
from scripts import printed_by

import mylib
from mylib._core.compat import cudnn_as_described, describe_cudnn, names, opened
from mylib._core.jaxprs import jaxprs_in

NEWER = not jax.__version__.startswith("0.10.")
AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
TYPED = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
SHARDED = NamedSharding(AUTO, P("data"))
X = jnp.arange(16.0)
IMAGE = jnp.ones((1, 1, 4, 4))
ON_TYPED = jax.device_put(X, NamedSharding(TYPED, P("data")))
PACKAGE = Path(mylib.__file__).parent


def traced(f, *args):
    return jax.jit(f).trace(*(args or (X,))).jaxpr


SPLIT = P("data")
SMALL = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), SPLIT)


def mapped(f, *args, in_specs=SPLIT, out_specs=SPLIT, mesh=AUTO):
    f = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return traced(f, *(args or (X,)))


def reduced(f):
    """On Explicit axes, where the cotangent of what it returns is summed over the devices later."""
    with jax.set_mesh(TYPED):
        return mapped(f, ON_TYPED, out_specs=P(reduced={"data"}), mesh=TYPED)


def gradient(f):
    return traced(jax.grad(lambda x: f(x).sum()))


def loop(x):
    return lax.scan(lambda c, y: (c + jnp.sin(y), c * y), x[0], x)[1]


def saved_loop():
    """A scan of which a policy saves a part."""
    policy = jax.checkpoint_policies.dots_saveable
    return gradient(jax.checkpoint(lambda x: loop(x) * jnp.dot(x, x), policy=policy))


def scattered(method):
    return traced(lambda x: getattr(x.at[jnp.argmin(x)], method)(2.0))


def custom_vmap(x):
    f = jax.custom_batching.custom_vmap(lambda x: x * 2)
    f.def_vmap(lambda size, batched, x: (x * 2, True))
    return f(x)


def custom_vjp(x, **options):
    f = jax.custom_vjp(lambda x: x * 2)
    f.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,), **options)
    return f(x)


def custom_jvp(x):
    f = jax.custom_jvp(lambda x: x * 2)
    f.defjvp(lambda primals, tangents: (primals[0] * 2, tangents[0] * 2))
    return f(x)


@partitioning.custom_partitioning
def partitioned(x):
    return x * 2


partitioned.def_partition(
    partition=lambda mesh, args, result: None,
    infer_sharding_from_operands=lambda mesh, args, result: None,
    sharding_rule="i -> i",
)


def kernel(source, target):
    target[...] = source[...]


def on_cores():
    """A kernel on the cores of a TPU that isn't here."""
    mesh = tensor_cores()

    def f(x):
        ref = jax.new_ref(x)

        @pl.core_map(mesh)
        def _():
            ref[...] = ref[...] * 2

        return ref[...]

    return traced(f)


def on_meshes():
    mesh = tensor_cores()
    from jax._src.pallas.mpmd import mpmd_map

    return traced(mpmd_map([(mesh, kernel)], out_types=LIKE))


def exported(x):
    return jax.export.export(jax.jit(lambda x: x * 2))(LIKE).call(x)


def on_gpu(x):
    from jax.experimental.mosaic.gpu.core import mosaic_gpu_p

    return mosaic_gpu_p.bind(x, module=None, out_types=(LIKE,), inout_types=())


def on_tpu(x):
    from jax._src.tpu_custom_call import tpu_custom_call_p

    return tpu_custom_call_p.bind(x, out_avals=(jax.typeof(x),))


def with_metadata():
    if NEWER:
        from jax.experimental.xla_metadata import xla_metadata_call
    else:
        from jax.experimental.scheduling_groups import xla_metadata_call
    return traced(xla_metadata_call(lambda x: x * 2, group="a"))


def on_host_cpu():
    from jax.experimental import compute_on as module

    compute_on = module.compute_on if NEWER else module.compute_on2

    return traced(compute_on(lambda x: x * 2, compute_type="device_host", out_memory_spaces=DEVICE))


def in_order():
    from jax._src.program_order import program_order

    return traced(program_order(lambda x: x * 2, enforce=False))


def run_state(x):
    from jax._src.state.discharge import run_state

    def double(ref):
        ref[...] = ref[...] * 2

    return run_state(double)(x)


def relayout():
    from jax._src.pjit import relayout

    return traced(lambda x: relayout(x, Layout((0,))))


LIKE = jax.ShapeDtypeStruct(X.shape, X.dtype)
DEVICE = jax.memory.Space.Device
CALLED = {"vmap_method": "sequential"}
TABLE = jnp.ones((4, 4))

# For each primitive a program that has it.
PROGRAMS = {
    "add": lambda: traced(lambda x: x + x),
    "add_any": lambda: gradient(lambda x: jnp.sin(x) * jnp.cos(x)),
    "all_gather": lambda: mapped(lambda x: lax.all_gather(x, "data")),
    "all_gather_done": lambda: gathered_later(),
    "all_gather_invariant": lambda: mapped(
        lambda x: lax.all_gather(x, "data", to="invarying"), out_specs=P()
    ),
    "all_gather_reduced": lambda: reduced(lambda x: lax.all_gather(x, "data", to="reduced")),
    "all_gather_reduced_start": lambda: gathered_later(to="reduced"),
    "all_gather_start": lambda: gathered_later(),
    "all_to_all": lambda: mapped(
        lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), jnp.ones(64)
    ),
    "axis_index": lambda: mapped(lambda x: x * lax.axis_index("data")),
    "broadcast_in_dim": lambda: traced(lambda x: jnp.broadcast_to(x, (2, 16))),
    "buffer_callback": lambda: traced(buffer_callback(lambda *args: None, LIKE)),
    "call_exported": lambda: traced(exported),
    "call_hi_primitive": lambda: traced(lambda x: jnp.searchsorted(x, x[:2])),
    "clamp": lambda: traced(lambda x: lax.clamp(0.0, x, 1.0)),
    "closed_call": saved_loop,
    "composite": lambda: traced(lax.composite(lambda x: x * 2, "mylib.double")),
    "compute_on": on_host_cpu,
    "concatenate": lambda: traced(lambda x: jnp.concatenate([x, x])),
    "cond": lambda: traced(lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)),
    "convert_element_type": lambda: traced(lambda x: x.astype(jnp.int32)),
    "copy": lambda: traced(lambda x: jnp.array(x, copy=True)),
    "core_map": on_cores,
    "custom_jvp_call": lambda: traced(custom_jvp),
    "custom_linear_solve": lambda: traced(lambda x: jnp.linalg.solve(TABLE, x[:4])),
    "custom_vjp_call": lambda: traced(custom_vjp),
    "custom_vmap_call": lambda: traced(custom_vmap),
    "device_put": lambda: traced(lambda x: jax.device_put(x, jax.devices()[0])),
    "div": lambda: traced(lambda x: x / 2),
    "dot_general": lambda: traced(lambda x: x @ x),
    "dynamic_slice": lambda: traced(lambda x: lax.dynamic_slice(x, (jnp.argmin(x),), (2,))),
    "dynamic_update_slice": lambda: traced(
        lambda x: lax.dynamic_update_slice(x, x[:2], (jnp.argmin(x),))
    ),
    "eval_jaxpr": saved_loop,
    "ffi_call": lambda: traced(jax.ffi.ffi_call("anything", LIKE)),
    "io_callback": lambda: traced(lambda x: io_callback(np.sin, LIKE, x)),
    "jit": lambda: traced(jax.jit(jnp.sin)),
    "layout_constraint": lambda: traced(lambda x: with_layout_constraint(x, Layout((0,)))),
    "linear_call": lambda: traced(
        lambda x: jax.custom_derivatives.linear_call(lambda r, x: x * 2, lambda r, x: x * 2, (), x)
    ),
    "max": lambda: traced(lambda x: jnp.maximum(x, 1)),
    "min": lambda: traced(lambda x: jnp.minimum(x, 1)),
    "mosaic_gpu_p": lambda: traced(on_gpu),
    "mpmd_map": on_meshes,
    "mul": lambda: traced(lambda x: x * x),
    "name": lambda: traced(lambda x: checkpoint_name(x, "kept")),
    "neg": lambda: traced(lambda x: -x),
    "optimization_barrier": lambda: traced(lax.optimization_barrier),
    "pad": lambda: traced(lambda x: jnp.pad(x, 1)),
    "pallas_call": lambda: traced(pl.pallas_call(kernel, out_shape=LIKE)),
    "pbroadcast": lambda: unchecked(lambda x: lax.pbroadcast(x, ("data",), 0)),
    "pmax": lambda: mapped(lambda x: lax.pmax(x, "data"), out_specs=P()),
    "pmin": lambda: mapped(lambda x: lax.pmin(x, "data"), out_specs=P()),
    "ppermute": lambda: mapped(lambda x: lax.ppermute(x, "data", PAIR)),
    "precv": lambda: unchecked(sent),
    "preduced": lambda: reduced(lambda x: lax.pcast(lax.psum(x, "data"), "data", to="reduced")),
    "program_order": in_order,
    "psend": lambda: unchecked(sent),
    "psum": lambda: unchecked(lambda x: lax.psum(x, "data")),
    "psum_invariant": lambda: mapped(lambda x: lax.psum(x, "data"), out_specs=P()),
    "pure_callback": lambda: traced(lambda x: jax.pure_callback(np.sin, LIKE, x, **CALLED)),
    "pvary": lambda: mapped(lambda x: lax.pcast(x, "data", to="varying"), in_specs=P()),
    "ragged_all_to_all": lambda: unchecked(ragged),
    "reduce": lambda: traced(lambda x: lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0,))),
    "reduce_precision": lambda: traced(lambda x: lax.reduce_precision(x, 5, 10)),
    "reduce_scatter": lambda: mapped(
        lambda x: lax.psum_scatter(x, "data", tiled=True), jnp.ones(64)
    ),
    "reduce_sum": lambda: traced(lambda x: x.sum()),
    "reduce_window": lambda: traced(
        lambda x: lax.reduce_window(x, 0.0, lambda a, b: a + 2 * b, (2,), (1,), "SAME")
    ),
    "reduced_vary_cast": lambda: varied(),
    "reduced_vary_cast_p": lambda: varied(),
    "relayout": relayout,
    "remat2": lambda: gradient(jax.checkpoint(jnp.sin)),
    "remat_opt": lambda: gradient(functools.partial(custom_vjp, optimize_remat=True)),
    "reshape": lambda: traced(lambda x: x.reshape(4, 4)),
    "reshard": lambda: traced(
        lambda x: jax.sharding.reshard(x, NamedSharding(TYPED, P())),
        ON_TYPED,
    ),
    "rev": lambda: traced(jnp.flip),
    "run_state": lambda: traced(run_state),
    "scan": lambda: traced(loop),
    "conv_general_dilated": lambda: traced(lambda x: lax.conv(IMAGE, IMAGE, (1, 1), "SAME") * x[0]),
    "cholesky": lambda: traced(jnp.linalg.cholesky, TABLE),
    "eigh": lambda: traced(jnp.linalg.eigh, TABLE),
    "lu": lambda: traced(jax.scipy.linalg.lu_factor, TABLE),
    "qr": lambda: traced(jnp.linalg.qr, TABLE),
    "svd": lambda: traced(jnp.linalg.svd, TABLE),
    "triangular_solve": lambda: traced(jax.scipy.linalg.solve_triangular, TABLE, TABLE),
    "ragged_dot_general": lambda: traced(
        lambda x: lax.ragged_dot(x[:, None], x[None, None], jnp.array([16]))
    ),
    "scatter": lambda: scattered("set"),
    "scatter-add": lambda: scattered("add"),
    "scatter-max": lambda: scattered("max"),
    "scatter-min": lambda: scattered("min"),
    "scatter-mul": lambda: scattered("mul"),
    "scatter-sub": lambda: scattered("subtract"),
    "select_and_scatter": lambda: selected(),
    "select_n": lambda: traced(lambda x: jnp.where(x > 0, x, 1)),
    "shard_map": lambda: mapped(jnp.sin),
    "sharding_constraint": lambda: traced(lambda x: lax.with_sharding_constraint(x, SHARDED)),
    "slice": lambda: traced(lambda x: lax.slice(x, (1,), (3,))),
    "split": lambda: traced(lambda x: jnp.split(x, 2)),
    "squeeze": lambda: traced(lambda x: lax.squeeze(x, (0,)), X[None]),
    "stack": lambda: traced(lambda x: jnp.stack([x, x])),
    "stop_gradient": lambda: traced(lax.stop_gradient),
    "sub": lambda: traced(lambda x: x - x),
    "tile": lambda: traced(lambda x: lax.tile(x, (2,))),
    "tpu_custom_call": lambda: traced(on_tpu),
    "transpose": lambda: traced(jnp.transpose, TABLE),
    "unreduced_psum": lambda: unreduced(lambda x: lax.psum(x, "data"), P()),
    "unreduced_reduce_scatter": lambda: unreduced(
        lambda x: lax.psum_scatter(x, "data", tiled=True), SPLIT
    ),
    "unstack": lambda: traced(lambda x: jnp.unstack(x)),
    "while": lambda: traced(lambda x: lax.while_loop(lambda x: x[0] < 3, lambda x: x + 1, x)),
    "xla_metadata_call": with_metadata,
}


def gathered_later(to="varying"):
    from jax._src.lax.parallel import all_gather_start

    def f(x):
        return all_gather_start(x, "data", to=to).done()

    return reduced(f) if to == "reduced" else mapped(f)


PAIR = [(0, 1)]


def unchecked(f):
    return traced(jax.shard_map(f, mesh=AUTO, in_specs=SPLIT, out_specs=SPLIT, check_vma=False))


def sent(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        token = lax.psend(x, "data", PAIR)
        return lax.precv(token, jax.ShapeDtypeStruct(x.shape, x.dtype), "data", PAIR)


def ragged(x):
    i, one = jnp.arange(8, dtype=jnp.int32), jnp.ones(8, jnp.int32)
    return lax.ragged_all_to_all(x, x, i, one, i, one, axis_name="data")


def unreduced(f, out):
    def whole(x):
        return f(lax.pcast(jnp.tile(x, 8), "data", to="unreduced"))

    with jax.set_mesh(TYPED):
        return mapped(whole, ON_TYPED, out_specs=out, mesh=TYPED)


def varied():
    def f(x):
        whole = lax.all_gather(x, "data", to="reduced")
        return lax.pcast(whole, "data", to="varying")

    with jax.set_mesh(TYPED):
        return mapped(f, ON_TYPED, mesh=TYPED)


def selected():
    from jax._src.lax.windowed_reductions import _select_and_scatter

    f = functools.partial(
        _select_and_scatter,
        select=lax.ge,
        window_dimensions=(2,),
        window_strides=(2,),
        padding=((0, 0),),
        init_value=np.float32(0),
        scatter=lambda a, b: a + 2 * b,
    )
    return traced(lambda x: f(x, source=x[:8]))


UNARY = """
    abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil cos cosh digamma erf
    erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p logistic round rsqrt sign sin sinh
    sqrt square tan tanh
"""
BINARY = "atan2 eq ge gt le lt ne nextafter pow rem".split()
WHOLE = {
    "and": lambda x: x & x,
    "not": lambda x: ~x,
    "or": lambda x: x | x,
    "population_count": lax.population_count,
    "xor": lambda x: x ^ x,
}
SHIFTS = "shift_left shift_right_arithmetic shift_right_logical".split()
REDUCED = {
    "argmax": jnp.argmax,
    "argmin": jnp.argmin,
    "reduce_and": lambda x: jnp.all(x > 0),
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_or": lambda x: jnp.any(x > 0),
    "reduce_prod": jnp.prod,
}
ALONG = "cumlogsumexp cummax cummin cumprod cumsum sort".split()
KEY = jax.random.key(0)
PICTURE = jnp.ones((3, 4, 4))
KEYED = {
    "random_bits": lambda key: jax.random.bits(key, (2,)),
    "random_fold_in": lambda key: jax.random.fold_in(key, 1),
    "random_split": jax.random.split,
    "random_unwrap": jax.random.key_data,
    "random_wrap": lambda key: jax.random.wrap_key_data(jax.random.key_data(key)),
}


def cudnn():
    describe_cudnn(91000, (9, 0))
    q = jnp.ones((1, 64, 1, 64), jnp.bfloat16)
    attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    with cudnn_as_described():
        return traced(jax.grad(lambda q: attention(q, q, q).sum().astype(jnp.float32)), q)


def pooled(layer, transformed):
    return lambda: traced(lambda x: transformed(layer(2, 2), x), PICTURE)


def _gradient_of(f, x):
    return jax.grad(lambda x: f(x).sum())(x)


def _derivative_of(f, x):
    return jax.jvp(f, (x,), (x,))


# How operations relate dimensions.
PROGRAMS |= {
    **{x: lambda x=x: traced(getattr(lax, x), X) for x in UNARY.split()},
    **{x: lambda x=x: traced(getattr(lax, x), X + 1j) for x in ("conj", "imag", "real")},
    **{x: lambda x=x: traced(lambda y: getattr(lax, x)(y, y)) for x in BINARY},
    **{x: lambda f=f: traced(f, jnp.arange(4)) for x, f in WHOLE.items()},
    **{x: lambda x=x: traced(lambda y: getattr(lax, x)(y, y), jnp.arange(4)) for x in SHIFTS},
    **{x: lambda f=f: traced(f) for x, f in REDUCED.items()},
    **{x: lambda x=x: traced(getattr(lax, x)) for x in ALONG},
    **{x: lambda f=f: traced(f, KEY) for x, f in KEYED.items()},
    "bitcast_convert_type": lambda: traced(lambda x: lax.bitcast_convert_type(x, jnp.int32)),
    "complex": lambda: traced(lambda x: lax.complex(x, x)),
    "debug_callback": lambda: traced(lambda x: jax.debug.callback(lambda x: None, x)),
    "debug_print": lambda: traced(lambda x: jax.debug.print("{}", x)),
    "empty": lambda: traced(lambda x: jnp.empty(3) + x[0]),
    "empty2": lambda: gradient(lambda x: jnp.diag(jnp.outer(x, x))),
    "gather": lambda: traced(lambda x: x[jnp.argsort(x)]),
    "integer_pow": lambda: traced(lambda x: x**3),
    "iota": lambda: traced(lambda x: lax.iota(jnp.int32, 3) + x[0]),
    "lt_to": lambda: traced(lambda x: jnp.interp(x, x, x)),
    "one_minus_square": lambda: gradient(jnp.tanh),
    "platform_index": lambda: traced(lambda x: jnp.diag(jnp.outer(x, x))),
    "random_gamma": lambda: traced(lambda key: jax.random.gamma(key, 2.0), KEY),
    "random_seed": lambda: traced(jax.random.key, jnp.int32(0)),
    "reduce_window_max": pooled(eqx.nn.MaxPool2d, lambda f, x: f(x)),
    "reduce_window_min": lambda: traced(
        lambda x: lax.reduce_window(x, jnp.inf, lax.min, (2,), (1,), "SAME")
    ),
    "reduce_window_sum": pooled(eqx.nn.AvgPool2d, lambda f, x: f(x)),
    "select_and_gather_add": pooled(eqx.nn.MaxPool2d, _derivative_of),
    "select_and_scatter_add": pooled(eqx.nn.MaxPool2d, _gradient_of),
    "threefry2x32": lambda: traced(
        lambda x: jax.extend.random.threefry2x32_p.bind(x, x, x, x), jnp.uint32(1)
    ),
    "top_k": lambda: traced(lambda x: lax.top_k(x, 2)),
    "dot_product_attention_bwd_wrapper": lambda: cudnn(),
    "dot_product_attention_fwd_wrapper": lambda: cudnn(),
    "unvmap_all": lambda: traced(lambda x: eqxi.unvmap_all(x > 0)),
    "unvmap_any": lambda: traced(lambda x: eqxi.unvmap_any(x > 0)),
    "unvmap_max": lambda: traced(eqxi.unvmap_max, jnp.arange(4)),
}


# Those that one of the supported versions has only.
ONLY = {
    "0.10.2": {"closed_call", "core_map", "lt_to", "reduced_vary_cast_p"},
    "0.12.0.1": {
        "call_hi_primitive",
        "empty",
        "eval_jaxpr",
        "one_minus_square",
        "program_order",
        "reduced_vary_cast",
        "relayout",
    },
}
ELSEWHERE = ONLY["0.10.2" if NEWER else "0.12.0.1"]


KINDS = tuple(
    f"{kind}_"
    for kind in """
        ARGUMENT EVENT FRAMES KERNEL PARAM PICKLED PROFILE SCOPE STACK TEXT
    """.split()
)


def listed(prefix=""):
    """What `names` has: of primitives, or the constants that begin so."""
    found = {}
    for constant, value in vars(names).items():
        if constant.isupper() and (
            constant.startswith(prefix) if prefix else not constant.startswith(KINDS)
        ):
            found[constant] = value
    return found


def primitives():
    values = listed().values()
    return set().union(*({x} if isinstance(x, str) else x for x in values))


def equations(program):
    for eqn in opened(program).eqns:
        yield eqn
        for inner in jaxprs_in(eqn):
            yield from equations(inner)


@functools.cache
def equation(name):
    """One of a primitive, from a program that has it."""
    return next((e for e in equations(PROGRAMS[name]()) if e.primitive.name == name), None)


def advice(name):
    return (
        f"JAX {jax.__version__} makes no {name!r} any more, where _core/compat/names.py says so. "
        "Find what its program makes now (print the jaxpr), and write that name beside this one, "
        "as long as a supported version has the old one, or in its place. Say in ONLY (here) which "
        "version has which. See in _core/compat/names.py what it is used for, and whether the new "
        "one is used alike"
    )


@pytest.mark.parametrize("module", sorted(names.PICKLED_PARTS))
def test_what_executables_are_made_of(module):
    """tests/lowered/test_saved_programs.py saves programs with each kind of them."""
    found = vars(importlib.import_module(module))
    missing = set(names.PICKLED_PARTS[module].split()) - set(found)
    assert not missing, (
        f"JAX {jax.__version__} has no {missing} in {module} any more. Print the names that "
        "`find_class` in mylib/_core/compat/__init__.py is asked for, and change the list"
    )


class TestPrimitives:
    def test_each_has_a_program(self):
        assert primitives() == set(PROGRAMS)
        assert set().union(*ONLY.values()) < set(PROGRAMS)

    @pytest.mark.parametrize("name", sorted(set(PROGRAMS) - ELSEWHERE))
    def test_is_met(self, name):
        assert equation(name) is not None, advice(name)


# For each parameter the primitives whose equations have it.
CALLS = ("jit", "remat2", "shard_map", "scan")
PARAMS = {
    "PARAM_AXES": ("psum", "psum_invariant", "pvary", "reduce_max", "reduce_sum"),
    "PARAM_AXIS": ("cumsum", "stack", "unstack"),
    "PARAM_AXIS_NAME": ("all_gather", "axis_index", "reduce_scatter"),
    "PARAM_BATCH_GROUPS": ("conv_general_dilated",),
    "PARAM_BODY_JAXPR": ("while",),
    "PARAM_BODY_NCONSTS": ("while",),
    "PARAM_BROADCAST_DIMENSIONS": ("broadcast_in_dim",),
    "PARAM_CHECK_VMA": ("shard_map",),
    "PARAM_COND_JAXPR": ("while",),
    "PARAM_COND_NCONSTS": ("while",),
    "PARAM_COST": ("pallas_call",),
    "PARAM_DEVICES": ("device_put",),
    "PARAM_DIFFERENTIATED": ("remat2",),
    "PARAM_DIMENSION": ("sort",),
    "PARAM_DIMENSIONS": ("squeeze",),
    "PARAM_DIMENSION_NUMBERS": ("conv_general_dilated", "dot_general", "gather", "scatter-add"),
    "PARAM_DST_SHARDING": ("reshard",),
    "PARAM_FEATURE_GROUPS": ("conv_general_dilated",),
    "PARAM_FT_IN": ("scan",) if NEWER else (),
    "PARAM_IN_SHARDINGS": ("jit",),
    "PARAM_IN_SPECS": ("shard_map",),
    "PARAM_INLINE": ("jit",),
    "PARAM_JAXPR": CALLS,
    "PARAM_LAYOUT": ("dot_product_attention_bwd_wrapper", "dot_product_attention_fwd_wrapper"),
    "PARAM_LENGTH": ("scan",),
    "PARAM_LHS_DILATION": ("conv_general_dilated",),
    "PARAM_LIMITS": ("slice",),
    "PARAM_MANUAL_AXES": ("shard_map",),
    "PARAM_MESH": ("shard_map",),
    "PARAM_NAME": ("jit", "name"),
    "PARAM_NEW_DTYPE": ("convert_element_type",),
    "PARAM_NUM_CARRY": () if NEWER else ("scan",),
    "PARAM_NUM_CONSTS": ("custom_vjp_call",) if NEWER else ("custom_vjp_call", "scan"),
    "PARAM_OUT_LAYOUTS": ("jit",),
    "PARAM_OUT_SHARDING": ("dot_general", "reduce_sum"),
    "PARAM_OUT_SHARDINGS": ("jit",),
    "PARAM_OUT_SPECS": ("shard_map",),
    "PARAM_OUT_TREES": ("custom_vjp_call",),
    "PARAM_PADDING": ("conv_general_dilated",),
    "PARAM_PADDING_CONFIG": ("pad",),
    "PARAM_PERMUTATION": ("transpose",),
    "PARAM_POLICY": ("remat2",),
    "PARAM_PREFERRED": ("conv_general_dilated", "dot_general", "ragged_dot_general"),
    "PARAM_PREVENT_CSE": ("remat2",),
    "PARAM_RAGGED": ("ragged_dot_general",),
    "PARAM_REVERSE": ("scan",),
    "PARAM_RHS_DILATION": ("conv_general_dilated",),
    "PARAM_SHARDING": ("broadcast_in_dim", "reshape", "sharding_constraint"),
    "PARAM_SLICE_SIZES": ("gather",),
    "PARAM_STARTS": ("slice",),
    "PARAM_STRIDES": ("conv_general_dilated",),
    "PARAM_SYMBOLIC_ZEROS": ("custom_jvp_call", "custom_vjp_call"),
    "PARAM_UNROLL": ("scan",),
    "PARAM_WINDOW": ("reduce_window_sum", "select_and_gather_add", "select_and_scatter_add"),
}


class TestParameters:
    def test_each_is_looked_for(self):
        assert set(listed("PARAM_")) == set(PARAMS)

    @pytest.mark.parametrize("constant", PARAMS)
    def test_is_met(self, constant):
        for primitive in PARAMS[constant]:
            params = equation(primitive).params
            assert getattr(names, constant) in params, (
                f"{advice(constant)}. The parameters of {primitive} are {', '.join(params)}"
            )

    @pytest.mark.parametrize("function", [lax.psum, lax.pmax, lax.all_gather, lax.axis_index])
    def test_of_the_arguments(self, function):
        for constant, value in listed("ARGUMENT_").items():
            taken = inspect.signature(function).parameters
            assert value in taken, f"{advice(constant)}. {function.__name__} takes {list(taken)}"

    def test_of_the_transformations(self):
        def entries(f):
            found = equations(traced(jax.grad(lambda x: f(x).sum())))
            return {x.name for eqn in found for x in eqn.source_info.name_stack.stack}

        met = entries(jnp.sin) | entries(jax.checkpoint(jnp.sin)) | entries(jax.vmap(jnp.sin))
        for constant, value in listed("STACK_").items():
            assert value in met, f"{advice(constant)}. The entries are {sorted(met)}"

    def test_of_the_scopes_of_compiled_programs(self):
        @jax.jit
        def f(x):
            x = jax.lax.cond(x.sum() > 1, jnp.sin, jnp.cos, x)
            x = jax.lax.while_loop(lambda x: jnp.cos(x).sum() > 1, lambda x: x - 1, x)
            return jax.grad(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum()))(x)

        text = f.lower(X).compile().as_text()
        met = {part for name in re.findall(r'op_name="([^"]*)"', text) for part in name.split("/")}
        for constant, value in listed("SCOPE_").items():
            assert any(x.startswith(value) for x in met), f"{advice(constant)}. {sorted(met)}"


def other_mesh():
    there = jax.device_put(X, SHARDED)
    jax.shard_map(lambda x: x + there[:2], mesh=AUTO, in_specs=SPLIT, out_specs=SPLIT)(X)


def closing_over():
    there = jax.device_put(X, NamedSharding(TYPED, SPLIT))
    jax.shard_map(lambda x: x + there, mesh=TYPED, in_specs=SPLIT, out_specs=SPLIT)(there)


def donated_again():
    f = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = X + 1
    f(x), f(x)


def no_mesh():
    try:
        jax.jit(lambda x: jax.sharding.reshard(x, SPLIT))(X)
    except ValueError as error:
        assert names.TEXT_NO_MESH in str(error)
    jax.jit(lambda x: lax.with_sharding_constraint(x, SPLIT))(X)


def check_fails():
    jax.block_until_ready(jax.jit(lambda x: eqx.error_if(x, x[0] == 0, "zero"))(X))


def value_of_other_mesh():
    def look(x):
        for kind in (AxisType.Auto, AxisType.Explicit):
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((8,), ("x",), (kind,))):
                x = jnp.sin(x)
        return x

    jax.make_jaxpr(look)(X)


def other_type():
    jax.tree.map(jnp.add, [1.0], (1.0,))


def size_of_mesh():
    w, x = jax.device_put(jnp.ones(8), SMALL), np.ones((16, 8))
    with jax.set_mesh(AUTO):
        jax.jit(jax.vmap(jnp.add, (None, 0)))(w, x)


def devices_of_mesh():
    with jax.set_mesh(AUTO):
        jax.jit(jnp.sin)(jax.device_put(X, SMALL))


# Programs that fail with an error in which the text is.
def callback_raises():
    def wrong(x):
        raise ZeroDivisionError

    jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(wrong, x, x))(X))


ERRORS = {
    "TEXT_CALLBACK": callback_raises,
    "TEXT_CLOSING_OVER": closing_over,
    "TEXT_CONTEXT_MESH": devices_of_mesh,
    "TEXT_DELETED": donated_again,
    "TEXT_EQUINOX_ERROR": check_fails,
    "TEXT_NO_MESH": no_mesh,
    "TEXT_OTHER_MESH": other_mesh,
    "TEXT_OTHER_TYPE": other_type,
    "TEXT_SIZE_OF_MESH": size_of_mesh,
    "TEXT_VALUE_OF_OTHER_MESH": value_of_other_mesh,
}
STATUSES = {"TEXT_ALREADY_EXISTS", "TEXT_DEADLINE", "TEXT_NOT_FOUND"}


def run(program, env):
    return printed_by("-c", textwrap.dedent(program), env=env)


def test_the_kernels_of_splash_attention():
    mask = splash.MultiHeadMask([splash.CausalMask((128, 128))])
    blocks = splash.BlockSizes(*[128] * 8)
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=blocks)
    x = jnp.ones((1, 128, 128))
    found = equations(traced(jax.grad(lambda x: kernel(x, x, x).sum()), x))
    met = [x.params["name"] for x in found if x.primitive.name == names.PALLAS]
    of = {re.fullmatch(names.KERNEL_SPLASH, name)["of"] for name in met}
    assert of == {"fwd", "dkv", "dq"}, f"{advice('KERNEL_SPLASH')}: {met}"


class TestTexts:
    def test_each_is_looked_for(self):
        assert set(listed("TEXT_")) == {*ERRORS, *STATUSES, "TEXT_NOT_DONATED"}

    @pytest.mark.parametrize("constant", ERRORS)
    def test_of_errors(self, constant):
        with pytest.raises(Exception) as caught:
            ERRORS[constant]()
        assert getattr(names, constant) in str(caught.value), advice(constant)

    def test_of_the_warning(self):
        with pytest.warns(UserWarning) as caught:
            jax.jit(lambda x: x.sum(), donate_argnums=0)(X + 1)
        assert str(caught[0].message).startswith(names.TEXT_NOT_DONATED), advice("TEXT_NOT_DONATED")

    @pytest.mark.slow
    def test_of_the_coordination_service(self, checkout_env):
        """In a process of its own; its methods are all called."""
        program = """
            import jax, socket
            from mylib._core.compat import CoordinationClient, coordination_client, names
            with socket.socket() as s:
                s.bind(("127.0.0.1", 0))
                address = "127.0.0.1:%d" % s.getsockname()[1]
            jax.distributed.initialize(address, 1, 0, cluster_detection_method="deactivate")
            client = coordination_client()
            def status(call, *args):
                try:
                    call(*args)
                except jax.errors.JaxRuntimeError as error:
                    return str(error)
            client.key_value_set("a/b", "1")
            assert names.TEXT_ALREADY_EXISTS in status(client.key_value_set, "a/b", "2")
            client.key_value_set("a/b", "2", True)
            assert client.blocking_key_value_get("a/b", 1000) == "2"
            assert names.TEXT_DEADLINE in status(client.blocking_key_value_get, "none", 10)
            assert client.key_value_try_get("a/b") == "2"
            assert names.TEXT_NOT_FOUND in status(client.key_value_try_get, "none")
            assert client.key_value_dir_get("a/") == [("a/b", "2")]
            assert client.key_value_increment("c", 2) == 2
            assert client.key_value_try_get("c") == "2"
            client.key_value_delete("a/")
            assert client.key_value_dir_get("a/") == []
            # One that no process has is left out.
            assert [*client.get_live_nodes([0, 1])] == [0]
            methods = {x for x in vars(CoordinationClient) if not x.startswith("_")}
            assert all(hasattr(client, x) for x in methods)
            print(*sorted(methods))
        """
        told = run(program, checkout_env)
        for method in told.split():
            assert f"client.{method}" in program, f"call {method} in the program above"


class TestEventsAndLoggers:
    def test_compiling(self):
        found = []
        listen = lambda event, seconds, **more: found.append(event)  # noqa: E731
        jax.monitoring.register_event_duration_secs_listener(listen)
        jax.jit(lambda x: x * 3 + 1)(X)
        jax.monitoring.unregister_event_duration_listener(listen)
        assert names.EVENT_COMPILED in found, f"{advice('EVENT_COMPILED')}. These came: {found}"

    def test_each_is_looked_for(self):
        assert set(listed("EVENT_")) == {"EVENT_COMPILED"}


class TestFrames:
    """The functions of JAX that are on the stack while it traces, lowers, compiles, calls back."""

    def test_each_is_entered(self):
        entered = set()

        def look(frame, event, arg):
            if event == "call" and "jax" in frame.f_code.co_filename:
                entered.add((Path(frame.f_code.co_filename).name, frame.f_code.co_name))

        def called(x):
            entered.add("traced")
            return jax.pure_callback(heard, LIKE, x) + io_callback(heard, LIKE, x)

        def heard(x):
            found = {(Path(frame.filename).name, frame.name) for frame in traceback.extract_stack()}
            entered.update(found & names.FRAMES_CALLBACK)
            return x

        before = sys.getprofile()
        sys.setprofile(look)
        try:
            compiled = jax.jit(called)
            compiled(X)
        finally:
            sys.setprofile(before)
        jax.block_until_ready(compiled(X))
        assert entered & names.FRAMES_TRACING, advice("FRAMES_TRACING")
        assert entered >= names.FRAMES_COMPILING, advice("FRAMES_COMPILING")
        assert entered >= names.FRAMES_CALLBACK, advice("FRAMES_CALLBACK")

    def test_each_is_looked_for(self):
        told = {"FRAMES_TRACING", "FRAMES_COMPILING", "FRAMES_CALLBACK"}
        assert set(listed("FRAMES_")) == told


def literal_names(source):
    """The lines that compare the name of a primitive with a literal, look it up in a table of
    literals, or read an equation's parameter by one.
    """
    tree = ast.parse(source)
    tables = {
        ast.unparse(target)
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if has_literal_key(node.value)
    }

    def is_literal(node):
        return has_literal(node) or ast.unparse(node) in tables

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(map(is_name_of_primitive, sides)) and any(map(is_literal, sides)):
                yield node.lineno
        elif isinstance(node, ast.Subscript):
            read = is_params(node.value) and has_literal(node.slice)
            if read or (is_name_of_primitive(node.slice) and is_literal(node.value)):
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            asked, table = node.args[:1], node.func.value
            read = is_params(table) and any(map(has_literal, asked))
            if read or (any(map(is_name_of_primitive, asked)) and is_literal(table)):
                yield node.lineno


def is_name_of_primitive(node):
    return ast.unparse(node) == "name" or ast.unparse(node).endswith("primitive.name")


def is_params(node):
    return ast.unparse(node).split(".")[-1] == "params"


def has_literal(node):
    return any(isinstance(x, ast.Constant) and isinstance(x.value, str) for x in ast.walk(node))


def has_literal_key(node):
    if isinstance(node, ast.Dict):
        return any(
            has_literal(key or value) for key, value in zip(node.keys, node.values, strict=True)
        )
    return has_literal(node)


class TestNoOtherModule:
    def test_has_such_literals(self):
        for path in PACKAGE.rglob("*.py"):
            source = path.read_text()
            if PACKAGE / "_core" / "compat" in path.parents:
                continue
            if ".primitive" in source or ".params" in source:
                found = list(literal_names(source))
                assert not found, f"{path}:{found}: write the name into mylib/_core/compat/names.py"

    @pytest.mark.parametrize(
        "source",
        [
            "eqn.primitive.name == 'cond'",
            "name = eqn.primitive.name\nname in ('cond', 'scan')",
            "eqn.params['jaxpr']",
            "params = eqn.params\nparams['jaxpr']",
            "eqn.params.get('name')",
            "KNOWN = ('cond', 'scan')\neqn.primitive.name in KNOWN",
            "KNOWN: dict[str, int] = {'cond': 1}\nKNOWN.get(eqn.primitive.name)",
            "KNOWN = dict.fromkeys('cond scan'.split(), 1)\nKNOWN[eqn.primitive.name]",
        ],
    )
    def test_they_would_be_found(self, source):
        assert list(literal_names(source))


@pytest.mark.slow
class TestMoved:
    """A JAX that has moved a name: `import mylib` works, and who needs the name says so."""

    @pytest.mark.parametrize(
        ("module", "name", "needs"),
        [
            pytest.param(
                "jax._src.interpreters.partial_eval",
                "dce_jaxpr",
                "mylib.filter_jit(lambda x: eqx.error_if(x, x < 0, 'no'))(jnp.ones(3))",
                marks=pytest.mark.thorough,
            ),
            pytest.param(
                "jax._src.traceback_util",
                "register_exclusion",
                "f = lambda x: eqx.error_if(x, x < 0, 'no', on_error='breakpoint')\n"
                "                mylib.filter_jit(f)(jnp.ones(3))",
                marks=pytest.mark.thorough,
            ),
            ("equinox._errors", "_error", "mylib.filter_jit(lambda x: x + 1)(jnp.ones(3))"),
            ("jax._src.xla_bridge", "register_backend_factory", "mylib.testing.second_backend()"),
        ],
    )
    def test_who_needs_it_says_so(self, module, name, needs, checkout_env):
        program = f"""
            import importlib, sys, types
            import jax, jax.numpy as jnp, equinox as eqx
            from jax.sharding import PartitionSpec as P
            # JAX itself goes on as before.
            moved, module = types.ModuleType({module!r}), importlib.import_module({module!r})
            vars(moved).update((k, v) for k, v in vars(module).items() if k != {name!r})
            sys.modules[{module!r}] = moved
            import mylib
            mesh = jax.make_mesh((8,), ("data",))
            assert mylib.filter_shard(jnp.ones(8), P("data"), mesh=mesh).sharding.spec == P("data")
            try:
                {needs}
            except ImportError as error:
                print(error)
        """
        told = run(program, checkout_env)
        assert f"{module}.{name}" in told and jax.__version__ in told and eqx.__version__ in told


def test_what_a_profile_is_made_of(tmp_path):
    """Of CPUs. Those of GPUs and TPUs are from public descriptions."""
    x = jax.device_put(X, SHARDED)
    f = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(AUTO, P())).lower(x).compile()
    f(x).block_until_ready()
    with jax.profiler.trace(tmp_path):
        f(x).block_until_ready()
    (file,) = tmp_path.rglob("*.xplane.pb")
    with warnings.catch_warnings():
        # On Python 3.13, of the extension module's own type.
        warnings.filterwarnings("ignore", "builtin type event_stats", DeprecationWarning)
        planes = [*jax.profiler.ProfileData.from_file(str(file)).planes]
        (host,) = (plane for plane in planes if plane.name == names.PROFILE_HOST_PLANE)
        lines = {line.name: [(e.name, dict(e.stats)) for e in line.events] for line in host.lines}
    assert names.PROFILE_PYTHON_LINE in lines, advice("PROFILE_PYTHON_LINE")
    events = [event for line in lines.values() for event in line]
    stats = [stats for _, stats in events if names.PROFILE_HLO_OP in stats]
    wanted = listed("PROFILE_") | {}
    for name in ("HLO_OP", "HLO_MODULE", "PROGRAM_ID", "RUN_ID", "DEVICE_ORDINAL", "PRODUCER"):
        constant = wanted.pop(f"PROFILE_{name}")
        assert stats and all(constant in each for each in stats), advice(f"PROFILE_{name}")
    assert {each[names.PROFILE_DEVICE_ORDINAL] for each in stats} == set(range(8))
    ends = [x for name, x in events if name.startswith(names.PROFILE_END_OF_EVENT)]
    numbers = {each[names.PROFILE_PRODUCER] for each in stats}
    assert numbers <= {x.get(names.PROFILE_CONSUMER) for x in ends}, advice("PROFILE_CONSUMER")
    assert not any(re.fullmatch(names.PROFILE_DEVICE_PLANE, plane.name) for plane in planes)
    of_cpus = {"HOST_PLANE", "PYTHON_LINE", "END_OF_EVENT", "CONSUMER"}
    assert {x.removeprefix("PROFILE_") for x in wanted} - of_cpus == {
        "DEVICE_PLANE", "STREAM_LINE", "COMMAND_BUFFER", "COPIES",
    }  # fmt: skip
