"""Kernels in programs for GPUs and TPUs that are not here."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from example_models import program
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import mylib

pytestmark = [
    pytest.mark.compilers,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
OPTIM = optax.adam(1e-3)


@pytest.fixture(autouse=True)
def by_triton():
    """JAX 0.10.2 makes Mosaic kernels for GPUs, which lack reductions along one dimension."""
    option = "jax_pallas_use_mosaic_gpu"
    is_there = hasattr(jax.config, option)
    if is_there:
        jax.config.update(option, False)
    yield
    if is_there:
        jax.config.update(option, True)


BOTH = pytest.mark.compiles_for("h100 x 8", "v5e 2x4")
SENT = re.compile(
    r"= [^=]* (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def normalise(x, scale, y):
    size = jnp.sqrt(jnp.mean(x[...] ** 2, axis=-1, keepdims=True) + 1e-6)
    y[...] = x[...] / size * scale[...]


def kernel(x, scale):
    """A kernel that knows nothing of meshes."""
    rows, width = 64, x.shape[1]
    return pl.pallas_call(
        normalise,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // rows,),
        in_specs=[
            pl.BlockSpec((rows, width), lambda i: (i, 0)),
            pl.BlockSpec((1, width), lambda i: (0, 0)),
        ],
        out_specs=pl.BlockSpec((rows, width), lambda i: (i, 0)),
    )(x, scale[None])


def reference(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def placed(machine, kind):
    mesh = machine.mesh(data=4, model=2)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * 2)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 128), (128,))]
    return mylib.filter_shard(shapes, [P("data"), P()], mesh)


def text_of(f, *args):
    text = jax.jit(f).lower(*args).compile().as_text()
    assert "tpu_custom_call" in text or "triton" in text
    return SENT.findall(text)


def gradient(f):
    return jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1))


@BOTH
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_what_is_sent_is_the_gradient_of_the_scale(machine, kind):
    is_unknown = kind == AxisType.Auto and machine.chip.platform == "tpu"
    axes = {"axes": {("x", 0): "data"}} if is_unknown else {}
    f = mylib.opaque(kernel, like=reference, **axes)
    args = placed(machine, kind)
    assert text_of(f, *args) == []
    assert text_of(gradient(f), *args) == ["all-reduce"]


@pytest.mark.compiles_for("v5e 2x4")
def test_without_axes_the_error_has_the_line(machine):
    f = mylib.opaque(kernel, like=reference)
    with pytest.raises(mylib.PlacementError, match=r'axes=\{\("x", 0\): "data"\}') as caught:
        text_of(f, *placed(machine, AxisType.Auto))
    assert "the kernel kernel (a b, b -> a b), on TPUs" in str(caught.value)


class Layer(eqx.Module):
    up: eqx.nn.Linear
    scale: jax.Array
    down: eqx.nn.Linear

    def __call__(self, x):
        y = mylib.opaque(kernel, like=reference)(jax.vmap(self.up)(x), self.scale)
        return x + jax.vmap(self.down)(y)


@BOTH
def test_layers_know_their_axes(machine):
    mesh = machine.mesh(data=4, model=2)
    kept = mylib.rules.fsdp("data")

    def make(key):
        up, down = eqx.nn.Linear(128, 256, key=key), eqx.nn.Linear(256, 128, key=key)
        return Layer(up, jnp.ones(256), down)

    def step(model, x):
        def loss(model):
            return jnp.mean(mylib.fully_shard(model, Layer, kept, mesh=mesh)(x) ** 2)

        return eqx.filter_grad(loss)(model)

    model = mylib.filter_shard(eqx.filter_eval_shape(make, jax.random.key(0)), kept, mesh)
    x = mylib.filter_shard(
        jax.ShapeDtypeStruct((1024, 128), jnp.float32), P(("data", "model")), mesh
    )
    compiled = mylib.filter_jit(step, out_shardings=kept, mesh=mesh).lower(model, x).compile()
    report = mylib.audit(compiled)
    report.expect(mylib.contracts.fsdp("data", argument="model"))


@BOTH
@pytest.mark.parametrize("strategy", ["FSDP", "FSDP, tensor parallel"])
def test_flash(machine, strategy):
    """Nothing is moved for the kernels, and for the derivative of their reference."""
    example = program("flash")
    how = example.STRATEGIES[strategy]
    report = program("running").report(example.task(example.LARGE), how, machine.mesh(**how.axes))
    assert not [x for x in report.collectives if x.source.startswith("flash.py")]


def planned(example, make, heads, **options):
    """The plan of a step of a language model that `make` makes of its size and a key."""
    sizes = {"width": 1024, "groups": heads // 2, "hidden": 2048, "vocab": 1024, "time": 256}
    size = example.Size(2, heads=heads, **sizes, rows=32, dtype=jnp.bfloat16)

    def start(key):
        model = make(size, key)
        return model, OPTIM.init(eqx.filter(model, eqx.is_inexact_array))

    model, state = eqx.filter_eval_shape(start, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((size.rows, size.time + 1), jnp.int32)

    def step(tokens, model, state):
        loss, grads = eqx.filter_value_and_grad(example.loss)(model, tokens)
        updates, state = OPTIM.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    plan = mylib.plan(step, tokens, model, state, compile=1, **options)
    assert plan.chosen.source == "compiled", plan
    return plan


@BOTH
def test_a_plan(machine):
    """The kernels are in layers, so that plans for TPUs need no `axes=`."""
    example = program("flash")
    planned(example, example.make, heads=16, machine=machine)


def splashed(q, k, v):
    """Splash attention of one example, `[time, heads, size]`."""
    time, heads = q.shape[:2]
    mask = splash.MultiHeadMask([splash.CausalMask((time, time))] * heads)
    blocks = splash.BlockSizes(*[128] * 8)
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=blocks)
    return jnp.swapaxes(kernel(*(jnp.swapaxes(x, 0, 1) for x in (q, k, v))), 0, 1)


@pytest.mark.compiles_for("v5e 2x4")
def test_a_plan_with_splash_attention(machine):
    """It is known by its name: each device calls it for its rows and heads, forward and backward,
    and what it computes is counted.
    """
    llama = program("llama")
    attention = mylib.opaque(splashed, like=splashed)

    class SplashBlock(llama.Block):
        def __call__(self, x):
            return self.finish(x, attention(*self.project(x, jnp.arange(len(x)))))

    def make(size, key):
        blocks = eqx.filter_vmap(lambda key: SplashBlock(size, key))(jax.random.split(key, 2))
        return eqx.tree_at(lambda model: model.blocks, llama.Llama(size, key), blocks)

    options = {"machine": machine, "axes": {"data": 4, "model": 2}, "policies": ("full",)}
    report = planned(llama, make, heads=8, **options).audit
    assert not [x for x in report.collectives if __file__.endswith(x.source.partition(":")[0])]
    assert report.work.unknown == 0
