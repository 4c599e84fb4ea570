"""`fully_shard(prefetch=...)`: layers that gather their weights while earlier ones compute."""

import functools
import gc
import weakref
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from close import assert_close
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import Array

import mylib
from mylib.rules import batch, by_axes, fsdp, replicated

AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
GRID = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
KEPT = fsdp("data", min_size=64)
WIDTH, DEPTH = 16, 4
KEYS = jax.random.split(jax.random.key(0), DEPTH)
X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype(np.float32)


class Layer(eqx.Module):
    weight: Array
    table: Array  # integers
    key: Array

    def __init__(self, key):
        self.weight = jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5
        self.table = jnp.arange(WIDTH)[::-1]
        self.key = key

    def __call__(self, x, count, scale=lambda x: x, *, name="a layer"):
        """Floats, integers and static values go in and come out."""
        noise = jax.random.normal(self.key, x.shape[-1:])
        y = jnp.tanh(scale(x @ self.weight + noise))[..., self.table]
        return x + y, count + 1, name


LAYERS = [Layer(key) for key in KEYS]


def through(layers, x, **options):
    count = jnp.zeros((), jnp.int32)
    for layer in layers:
        x, count, name = layer(x, count, **options)
    assert name == "a layer"
    return x * count


def value_of(layers, x):
    return jnp.mean(through(layers, x) ** 2)


def value_by_example(layers, x):
    return jnp.mean(jax.vmap(lambda x: through(layers, x))(x) ** 2)


def verify(value, layers, x, mesh, kept=KEPT, used=None, layer=Layer, **options):
    """The value, and the gradients, with `fully_shard` are those of one device."""
    given = mylib.filter_shard((layers, x), (kept, batch("data")), mesh=mesh)

    @mylib.filter_jit(out_shardings=(None, kept))
    @eqx.filter_value_and_grad
    def run(layers, x):
        used_at = replicated() if used is None else used
        return value(mylib.fully_shard(layers, layer, kept, used_at, **options), x)

    with jax.set_mesh(mesh):
        mylib.testing.verify(run, *given)
        mylib.testing.assert_placed(run(*given)[1], kept, mesh=mesh)


@pytest.mark.parametrize(
    "mesh, value, prefetch",
    [  # every pair
        pytest.param(AUTO, value_of, 1, id="auto-1", marks=pytest.mark.slow),
        pytest.param(
            EXPLICIT, value_by_example, 1, id="explicit-examples-1", marks=pytest.mark.thorough
        ),
        pytest.param(EXPLICIT, value_of, 2, id="explicit-2"),
        pytest.param(AUTO, value_by_example, 2, id="auto-examples-2", marks=pytest.mark.thorough),
        pytest.param(AUTO, value_of, 9, id="auto-9", marks=pytest.mark.thorough),
        pytest.param(
            EXPLICIT, value_by_example, 9, id="explicit-examples-9", marks=pytest.mark.thorough
        ),
    ],
)
def test_numbers_are_those_of_one_device(mesh, value, prefetch):
    verify(value, LAYERS, X, mesh, prefetch=prefetch)


@pytest.mark.slow
def test_eager_gradient_of_examples_on_explicit_axes():
    """In an eager `vmap` with an axis name JAX can't reshard."""

    def value(layers, x):
        layers = mylib.fully_shard(layers, Layer, KEPT, mesh=EXPLICIT, prefetch=1)
        return jnp.mean(jax.vmap(lambda x: through(layers, x), axis_name="batch")(x) ** 2)

    with jax.set_mesh(EXPLICIT):
        layers = mylib.filter_shard(LAYERS, KEPT)
        found = eqx.filter_grad(value)(layers, mylib.filter_shard(X, P("data")))
    expected = eqx.filter_grad(lambda layers: value_by_example(layers, X))(LAYERS)
    assert_close(found, expected)


def test_error_checks_in_forward_mode():
    class Checked(eqx.Module):
        weight: Array

        def __call__(self, x):
            @jax.jit
            def product(x):
                return eqx.error_if(x, jnp.any(x > 1e6), "too large") @ self.weight

            return product(x)

    layers = [Checked(jax.random.normal(key, (WIDTH, WIDTH))) for key in KEYS[:2]]

    def value(layers, x):
        layers = mylib.fully_shard(layers, Checked, KEPT, prefetch=1)
        return jnp.mean(layers[1](layers[0](x)) ** 2)

    @mylib.filter_jit
    def moved(layers, x):
        return jax.jvp(lambda layers: value(layers, x), (layers,), (layers,))[1]

    with jax.set_mesh(AUTO):
        there, x = mylib.filter_shard((layers, X), (KEPT, batch("data")))
        found = moved(there, x)
        with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
            moved(there, x * 1e9)
    # Of degree 4.
    expected = 4 * jnp.mean((X @ layers[0].weight @ layers[1].weight) ** 2)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_a_rule_that_is_no_derivative_in_a_second_one():
    """JAX differentiates the rules of a `jax.custom_vjp`, both."""

    @jax.custom_vjp
    def sign(x):
        return jnp.sign(x)

    sign.defvjp(lambda x: (jnp.sign(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))

    class Straight(eqx.Module):
        weight: Array

        def __call__(self, x):
            return x + sign(x @ self.weight)

    def value(layers, x):
        return jnp.mean(jnp.sin(layers[1](layers[0](x))) ** 2)

    def sharded(layers, x):
        return value(mylib.fully_shard(layers, Straight, KEPT, prefetch=1), x)

    def times_a_vector(value, layers, x):
        return jax.jvp(lambda layers: jax.grad(value)(layers, x), (layers,), (layers,))[1]

    layers = [Straight(jax.random.normal(key, (WIDTH, WIDTH))) for key in KEYS[:2]]
    with jax.set_mesh(AUTO):
        there, x = mylib.filter_shard((layers, X), (KEPT, batch("data")))
        found = jax.jit(lambda layers, x: times_a_vector(sharded, layers, x))(there, x)
    assert_close(found, times_a_vector(value, layers, X), rtol=1e-3)


@pytest.mark.slow
def test_with_tensor_parallelism():
    tensor = by_axes({"out": "model"}, names={Layer: {"weight": "in out"}}) | replicated()
    verify(value_of, LAYERS, X, GRID, tensor & KEPT, tensor, prefetch=1)


@pytest.mark.thorough
def test_kept_in_another_dtype():
    verify(value_of, LAYERS, X, AUTO, prefetch=1, dtype=jnp.bfloat16)


@pytest.mark.slow
def test_kept_in_host_memory():
    def kept(leaf):
        spec = P("data") if leaf.ndim == 2 else P()
        return NamedSharding(AUTO, spec, memory_kind="pinned_host")

    layers = mylib.filter_device_put(LAYERS, kept)

    @eqx.filter_jit
    def run(layers, prefetch):
        def value(layers):
            return value_of(mylib.fully_shard(layers, Layer, kept, mesh=AUTO, prefetch=prefetch), X)

        return eqx.filter_grad(value)(layers)

    assert_close(run(layers, 1), run(layers, 0))


@pytest.mark.slow
def test_gradients_of_each_example():
    def one(x):
        def value(layers):
            return value_of(mylib.fully_shard(layers, Layer, KEPT, mesh=AUTO, prefetch=1), x)

        return eqx.filter_grad(value)(LAYERS)

    found = eqx.filter_jit(jax.vmap(one))(X)
    expected = eqx.filter_jit(jax.vmap(lambda x: eqx.filter_grad(value_of)(LAYERS, x)))(X)
    assert found[0].weight.shape == (16, WIDTH, WIDTH)
    assert_close(found, expected)


@pytest.mark.thorough
def test_what_a_method_closes_over_has_a_gradient():
    def value(layers, factors):
        count, x = jnp.zeros((), jnp.int32), X
        for layer, factor in zip(layers, factors, strict=True):
            x, count, _ = layer(x, count, lambda x, factor=factor: x * factor)
        return jnp.mean(x**2)

    def sharded(factors):
        return value(mylib.fully_shard(LAYERS, Layer, KEPT, mesh=AUTO, prefetch=1), factors)

    factors = jnp.linspace(0.5, 2, DEPTH)
    expected = jax.grad(lambda factors: value(LAYERS, factors))(factors)
    assert_close(jax.jit(jax.grad(sharded))(factors), expected)


@pytest.mark.slow
def test_under_a_checkpoint_a_jit_and_a_branch():
    def value(layers, x):
        run = jax.checkpoint(jax.jit(lambda x: through(layers, x)))
        return jnp.sum(jax.lax.cond(x[0, 0] > -9, run, lambda x: x, x) ** 2)

    verify(value, LAYERS, X, AUTO, prefetch=1)


def test_without_a_gradient_and_without_jit():
    model = mylib.fully_shard(LAYERS, Layer, KEPT, mesh=AUTO, prefetch=1)
    assert_close(through(model, X), through(LAYERS, X))


@pytest.mark.slow
def test_a_layer_that_prints(capfd):
    class Loud(Layer):
        def __call__(self, x, count):
            jax.debug.print("here is layer {}", count)
            return super().__call__(x, count)

    layers = [Loud(key) for key in KEYS]
    verify(value_of, layers, X, AUTO, layer=Loud, prefetch=1)
    jax.effects_barrier()
    assert "here is layer 3" in capfd.readouterr().out


@pytest.mark.slow
def test_the_same_layers_twice():
    def value(layers, x):
        return jnp.mean(through(layers, through(layers, x)) ** 2)

    verify(value, LAYERS, X, AUTO, prefetch=1)


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    wrap: Callable = eqx.field(static=True)

    def __call__(self, x, state):
        x, state = self.wrap(lambda norm, x, state: norm(x, state))(
            self.norm, self.linear(x), state
        )
        return jnp.tanh(x) * (1 + jax.lax.axis_index("batch")), state


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda fun: fun, id="plain", marks=pytest.mark.thorough),
        pytest.param(eqx.filter_jit, id="filter_jit", marks=pytest.mark.slow),
        pytest.param(eqx.filter_checkpoint, id="filter_checkpoint", marks=pytest.mark.thorough),
    ],
)
def test_state_of_a_batch(wrap):
    def make():
        norm = lambda: eqx.nn.BatchNorm(WIDTH, "batch", mode="batch")  # noqa: E731
        return [Normed(eqx.nn.Linear(WIDTH, WIDTH, key=key), norm(), wrap) for key in KEYS]

    layers, state = eqx.nn.make_with_state(make)()

    def value(layers, x):
        def one(x, state):
            for layer in layers:
                x, state = layer(x, state)
            return x, state

        y, new = jax.vmap(one, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean(jnp.sin(y)) + sum(jnp.mean(x) for x in jax.tree.leaves(new))

    verify(value, layers, X, AUTO, layer=Normed, prefetch=1)


@pytest.mark.slow
def test_a_transformer():
    model = models.Transformer(key=KEYS[0])
    tokens = np.random.default_rng(0).integers(0, models.VOCAB, (8, models.LENGTH))

    def value(model, tokens):
        return jnp.mean(jnp.sin(jax.vmap(model)(tokens)))

    verify(value, model, tokens, AUTO, layer=models.Block, prefetch=1)


@pytest.mark.slow
def test_no_tracer_leaks():
    with jax.checking_leaks():
        verify(value_of, LAYERS, X, AUTO, prefetch=2)


def waits(value, layers):
    """How many gathers of the forward pass wait for an earlier layer."""

    def run(layers, x):
        return value(mylib.fully_shard(layers, Layer, KEPT, mesh=AUTO, prefetch=1), x)

    # The first layer waits for its input by one more barrier.
    barriers = str(jax.make_jaxpr(run)(layers, X)).count(" = optimization_barrier")
    return len(layers) - (barriers - 4 * len(layers))


def each_alone(transform, layers, x):
    count = jnp.zeros((), jnp.int32)
    for layer in layers:
        x = transform(lambda x, layer=layer: layer(x, count)[0])(x)
    return jnp.mean(x**2)


@pytest.mark.thorough
def test_where_another_axis_is_manual():
    def value(layers, x):
        def inside(x):
            return through(layers, x)

        specs = {"in_specs": P("model"), "out_specs": P("model")}
        return jnp.mean(jax.shard_map(inside, axis_names={"model"}, **specs)(x) ** 2)

    with jax.set_mesh(GRID):
        gathering, x = mylib.filter_shard((LAYERS, X), (KEPT, P()))

        @mylib.filter_jit
        @eqx.filter_grad
        def gradient(layers, x):
            return value(mylib.fully_shard(layers, Layer, KEPT, prefetch=1), x)

        found = gradient(gathering, x)
    assert_close(found, eqx.filter_grad(value_of)(LAYERS, X))


@pytest.mark.thorough
def test_each_layer_in_a_vmap_of_its_own():
    def value(layers, x):
        return each_alone(jax.vmap, layers, x)

    assert (
        waits(value, LAYERS)
        == waits(value_of, LAYERS)
        == waits(value_by_example, LAYERS)
        == DEPTH - 1
    )
    verify(value, LAYERS, X, AUTO, prefetch=1)


@pytest.mark.parametrize(
    "transform", [pytest.param(jax.checkpoint, marks=pytest.mark.thorough), jax.jit]
)
@pytest.mark.slow
def test_each_layer_in_a_program_of_its_own(transform):
    def value(layers, x):
        return each_alone(transform, layers, x)

    with pytest.warns(mylib.errors.PrefetchWarning, match="no effect across transformations"):
        verify(value, LAYERS, X, AUTO, prefetch=1)


def skipping(layers, x):
    return through(layers[:3], x)


def twice_and_backwards(layers, x):
    return through([*layers, *layers[::-1][1:]], x)


def in_parts(layers, x):
    middle = jax.checkpoint(lambda x: through(layers[1:3], x))
    return through(layers[3:], middle(through(layers[:1], x)))


def traced_twice(layers, x):
    half = lambda x: through(layers[:3], x)  # noqa: E731
    return jax.jit(half)(x) + jax.vmap(half)(x[:, None])[:, 0]


@pytest.mark.parametrize(
    "model",
    [
        skipping,
        pytest.param(twice_and_backwards, id="twice_and_backwards", marks=pytest.mark.slow),
        pytest.param(in_parts, id="in_parts", marks=pytest.mark.thorough),
        pytest.param(traced_twice, id="traced_twice", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.filterwarnings("error::mylib.errors.PrefetchWarning")
def test_any_number_of_calls(model):
    def value(layers, x):
        return jnp.mean(model(layers, x) ** 2)

    verify(value, LAYERS, X, AUTO, prefetch=2)


def tokens_of(model):
    (turns,) = {layer._fully_shard_plan.turns for layer in model}
    return [token() for token in turns._forward]


@pytest.mark.slow
def test_structures_keep_no_values_of_a_trace():
    structures, seen = [], []

    def value(layers, x):
        model = mylib.fully_shard(layers, Layer, KEPT, mesh=AUTO, prefetch=2)
        structures.append(jax.tree.structure(model))
        seen.extend(map(weakref.ref, [layers[0].weight, *tokens_of(model)]))

        def inner(x):
            y = through(model[:3], x)
            seen.extend(map(weakref.ref, [x, y, *tokens_of(model)]))
            return y

        return jnp.mean(jax.jit(inner)(inner(x)))

    program = eqx.filter_jit(eqx.filter_grad(value))
    program(LAYERS, X)
    gc.collect()
    assert len(seen) == 1 + 2 * (2 + 2)
    assert [x() for x in seen] == [None] * len(seen)


@pytest.mark.slow
def test_error_checks():
    class Checked(Layer):
        def __call__(self, x, count):
            check = eqx.filter_jit(lambda x: eqx.error_if(x, x > 1e3, "too large"))
            return super().__call__(check(x), count)

    layers = [Checked(key) for key in KEYS]
    verify(value_of, layers, X, AUTO, layer=Checked, prefetch=1)

    @mylib.filter_jit
    def run(layers, x):
        model = mylib.fully_shard(layers, Checked, KEPT, mesh=AUTO, prefetch=1)
        return through(model, x)

    assert_close(run(layers, X), through(LAYERS, X))
    loss = eqx.filter_value_and_grad(lambda layers, x: jnp.sum(run(layers, x)))
    for program in (run, mylib.filter_jit(loss)):
        with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
            program(layers, X * 1e6)
    # What `prefetch` is built of has rules of its own.
    with pytest.raises(ValueError, match=r"test_prefetch.py:.* Put filter_jit around"):
        loss(layers, X * 1e6)


@pytest.mark.thorough
def test_primitives_of_a_layer_with_rules_of_their_own():
    class Rotation(Layer):
        def __call__(self, x, count):
            turned = jax.scipy.linalg.expm(self.weight - self.weight.T) @ x[..., None]
            return super().__call__(turned[..., 0], count)

    layers = [Rotation(key) for key in KEYS[:2]]
    verify(value_by_example, layers, X, AUTO, layer=Rotation, prefetch=1)


@pytest.mark.slow
def test_a_callback_of_an_input_without_gradient():
    class Logged(Layer):
        def __call__(self, x, count):
            if count.ndim:
                x = jax.pure_callback(np.asarray, jax.typeof(x), x, vmap_method="expand_dims")
            return super().__call__(x, count)

    layers = [Logged(key) for key in KEYS]

    def value(layers, x):
        x, count, _ = layers[0](x, jnp.ones((1,), jnp.int32))
        return jnp.mean(through(layers[1:], x) ** 2)

    verify(value, layers, X, AUTO, layer=Logged, prefetch=1)


def test_stacked_layers():
    stacked = eqx.filter_vmap(Layer)(KEYS)

    def run(layers, x):
        model = mylib.fully_shard(layers, Layer, replicated(), mesh=AUTO, prefetch=1)
        arrays, rest = eqx.partition(model, eqx.is_array)
        return jax.lax.scan(lambda x, a: (eqx.combine(a, rest)(x, 0)[0], None), x, arrays)[0]

    with pytest.raises(mylib.PlacementError, match=r"stacked.*\n.*unroll=2"):
        jax.eval_shape(run, stacked, X)


def test_a_stacked_ensemble():
    stacked = eqx.filter_vmap(Layer)(KEYS)

    def run(layers, x):
        model = mylib.fully_shard(layers, Layer, replicated(), mesh=AUTO, prefetch=1)
        return eqx.filter_vmap(lambda layer: layer(x, 0)[0])(model)

    with pytest.raises(mylib.PlacementError, match="ensemble under jax.vmap"):
        jax.eval_shape(run, stacked, X)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"prefetch": -1}, "prefetch=-1 is not a number of layers"),
        ({"prefetch": True}, "prefetch=True is not a number of layers"),
        ({"prefetch": 1, "checkpoint": False}, "can't be combined with checkpoint=False"),
        ({"prefetch": 1, "in_turn": False}, "can't be combined with in_turn=False"),
        (
            {"prefetch": 1, "policy": jax.checkpoint_policies.everything_saveable},
            "can't be combined with policy=",
        ),
    ],
)
def test_options_that_can_not_be(options, words):
    with pytest.raises(TypeError, match=words):
        mylib.fully_shard(LAYERS, Layer, KEPT, mesh=AUTO, **options)


def squared(model, x):
    return jnp.sum(jnp.sin(through(model, x)) ** 2)


def along(f, x):
    return jax.jvp(f, (x,), (jnp.cos(x),))[1]


DERIVATIVES = {
    "jvp": along,
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "forward over reverse": lambda f, x: along(jax.grad(f), x),
    "reverse over forward": lambda f, x: jax.grad(lambda x: along(f, x))(x),
    "reverse over reverse": lambda f, x: jax.grad(lambda x: jax.grad(f)(x) @ jnp.cos(x))(x),
}


@pytest.mark.slow
@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.everyday("reverse over reverse", rest="thorough")
def test_other_derivatives(derivative):
    model = mylib.fully_shard(LAYERS, Layer, KEPT, mesh=AUTO, prefetch=1)
    found = jax.jit(lambda x: derivative(lambda x: squared(model, x), x))(X[0])
    assert_close(found, derivative(lambda x: squared(LAYERS, x), X[0]), rtol=1e-4)


@pytest.mark.thorough
def test_forward_mode_by_weights():
    def directional(run):
        _, tangent = eqx.filter_jvp(run, (LAYERS,), (eqx.filter(LAYERS, eqx.is_inexact_array),))
        return tangent

    def sharded(layers):
        return squared(mylib.fully_shard(layers, Layer, KEPT, mesh=AUTO, prefetch=1), X[0])

    expected = directional(lambda layers: squared(layers, X[0]))
    assert_close(directional(sharded), expected, rtol=1e-4)


@pytest.mark.slow
def test_an_ensemble_of_models():
    def loss(layers, x):
        return value_of(mylib.fully_shard(layers, Layer, KEPT, mesh=AUTO, prefetch=1), x)

    members = [eqx.filter_vmap(Layer)(jax.random.split(key, 3)) for key in KEYS]
    found = eqx.filter_jit(
        eqx.filter_grad(lambda ls: jnp.sum(eqx.filter_vmap(loss, in_axes=(0, None))(ls, X)))
    )(members)
    expected = eqx.filter_jit(
        eqx.filter_grad(lambda ls: jnp.sum(eqx.filter_vmap(value_of, in_axes=(0, None))(ls, X)))
    )(members)
    assert_close(found, expected)


class Dense(eqx.Module):
    up: Array
    down: Array

    def __call__(self, x):
        return jax.nn.relu(x @ self.up) @ self.down


DEEP, WIDE, HIDDEN, ROWS = 6, 1024, 4096, 1024
WEIGHTS = 2 * 2 * WIDE * HIDDEN  # the bytes of a layer's weights, in bf16


@pytest.mark.compilers
@pytest.mark.compiles_for("h100 x 16", "v5e 4x4")
def test_programs(machine):
    """Half of the gathers run while the device computes, for the memory of one layer more."""
    mesh = machine.mesh(data=-1)
    shapes = [(WIDE, HIDDEN), (HIDDEN, WIDE)]
    layers = [Dense(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))] * DEEP
    layers = mylib.filter_shard(layers, fsdp("data"), mesh=mesh)
    kept = jax.tree.map(lambda x: x.sharding, layers)
    rows = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((ROWS * 16, WIDE), jnp.bfloat16, sharding=rows)

    def compiled(prefetch):
        def loss(layers, x):
            layers = mylib.fully_shard(layers, Dense, fsdp("data"), mesh=mesh, prefetch=prefetch)
            for layer in layers:
                x = layer(x)
            return jnp.mean(x.astype(jnp.float32) ** 2)

        lowered = jax.jit(jax.grad(loss), out_shardings=kept).lower(layers, x)
        # By default a GPU runs one collective at a time.
        gpu = {"xla_gpu_experimental_parallel_collective_overlap_limit": 2}
        program = lowered.compile(gpu if machine.chip.platform == "gpu" else None)
        report = mylib.audit(program, mesh=mesh)
        gathers = [c for c in report.collectives if c.kind == "all-gather"]
        share = sum(c.bytes for c in gathers if c.overlapped) / sum(c.bytes for c in gathers)
        return program.memory_analysis().temp_size_in_bytes, share, report.wire_bytes()

    (memory, share, sent), (more_memory, larger_share, as_much) = compiled(0), compiled(1)
    assert share == 0 and larger_share >= 0.5
    assert more_memory <= memory + WEIGHTS
    assert as_much <= 1.01 * sent


@pytest.mark.parametrize("tangents", [P(), P(None, "data")], ids=["whole", "split"])
def test_tangents_that_are_split_otherwise_than_weights(tangents):
    """Products with the Hessian, several at once, on Explicit axes."""
    mesh = jax.make_mesh(
        (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    w, x = jnp.arange(64.0).reshape(8, 8) / 64, jnp.arange(32.0).reshape(4, 8) / 32
    several = jnp.arange(192.0).reshape(3, 8, 8) / 192

    def products(w, x, several, wrap):
        layer = eqx.nn.Linear(8, 8, use_bias=False, key=jax.random.key(0))

        def loss(w):
            return jnp.mean(jax.vmap(wrap(eqx.tree_at(lambda m: m.weight, layer, w)))(x) ** 3)

        return jax.vmap(lambda v: jax.jvp(jax.grad(loss), (w,), (v,))[1])(several)

    def sharded(layer):
        return mylib.fully_shard(layer, eqx.nn.Linear, P("data"), prefetch=1)

    with jax.set_mesh(mesh):
        placed = mylib.filter_shard((w, x, several), (P("data"), P("model"), tangents))
        found = mylib.filter_jit(functools.partial(products, wrap=sharded))(*placed)
    expected = jax.jit(functools.partial(products, wrap=lambda m: m))(w, x, several)
    np.testing.assert_allclose(found, expected, atol=1e-6)
