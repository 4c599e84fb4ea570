"""Layers written for Explicit axes, and layers on meshes that mix both types of axes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import crossed
from jax.sharding import AxisType, PartitionSpec as P
from jaxtyping import Array, Float

import mylib
from mylib.rules import by_axes, fsdp, replicated

EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def mesh_of(*types):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=types)


MESHES = {
    "Explicit": mesh_of(EXPLICIT, EXPLICIT),
    "Explicit and Auto": mesh_of(EXPLICIT, AUTO),
    "Auto and Explicit": mesh_of(AUTO, EXPLICIT),
}
GRID = MESHES["Explicit"]
RNG = np.random.default_rng(0)
WEIGHT = RNG.normal(size=(8, 8)).astype(np.float32) / 3
X = RNG.normal(size=(8, 8)).astype(np.float32)
KEPT = fsdp("data", min_size=0)


class Layer(eqx.Module):
    weight: Array

    def __call__(self, x):
        raise NotImplementedError


class Plain(Layer):
    def __call__(self, x):
        return jnp.tanh(x @ self.weight)


class OutSharding(Layer):
    def __call__(self, x):
        return jnp.dot(x, self.weight, out_sharding=P("data", None))


class Types(Layer):
    def __call__(self, x):
        assert jax.typeof(x).sharding.spec == P("data", None)
        assert jax.typeof(self.weight).sharding.spec == P(None, None)
        return x @ self.weight


class Reshards(Layer):
    def __call__(self, x):
        whole = jax.sharding.reshard(x, P())
        assert jax.typeof(whole).sharding.spec == P(None, None)
        return jax.sharding.reshard(whole[::-1] @ self.weight, P("data"))


class Looks(Layer):
    def __call__(self, x):
        rows = jnp.arange(8)[::-1] + jnp.zeros_like(x, jnp.int32)[:, 0]
        return x + self.weight.at[rows].get(out_sharding=P("data", None))


class Checked(Layer):
    def __call__(self, x):
        x = eqx.error_if(x, jnp.any(x > 1e6), "too large")
        return x @ self.weight


class CheckedWithinAuto(Layer):
    def __call__(self, x):
        def inside(x):
            return eqx.error_if(x, jnp.any(x > 1e6), "too large")

        return jax.sharding.auto_axes(inside, out_sharding=P("data", None))(x) @ self.weight


class Branches(Layer):
    def __call__(self, x):
        def product(x):
            return jnp.dot(x, self.weight, out_sharding=P("data", None))

        times = jax.lax.while_loop(lambda n: n < 2, lambda n: n + 1, 0)
        return jax.lax.cond(times == 2, product, lambda x: 2 * x, x)


class Loops(Layer):
    def __call__(self, x):
        def turn(x, _):
            return jnp.tanh(jnp.dot(x, self.weight, out_sharding=P("data", None))), x.sum()

        x, sums = jax.lax.scan(turn, x, None, length=3)
        return x + sums[-1]


class Nested(Layer):
    def __call__(self, x):
        @jax.jit
        def product(x, w):
            return jnp.dot(x, w, out_sharding=P("data", None))

        return jax.checkpoint(lambda x: jnp.sin(product(x, self.weight)))(x)


class CustomVJP(Layer):
    def __call__(self, x):
        @jax.custom_vjp
        def product(x, w, n):
            return jnp.dot(x, w, out_sharding=P("data", None)) * n

        def forward(x, w, n):
            assert jax.typeof(x).sharding.spec == P("data", None)
            return product(x, w, n), (x, w)

        def backward(residuals, ct):
            x, w = residuals
            assert jax.typeof(ct).sharding.spec == P("data", None)
            of_w = jnp.dot(x.T, ct, out_sharding=P(None, None))
            return 3 * jnp.dot(ct, w.T, out_sharding=P("data", None)), 3 * of_w, None

        product.defvjp(forward, backward)
        return product(x, self.weight, 3)


class CustomJVP(Layer):
    def __call__(self, x):
        @jax.custom_jvp
        def product(x, w):
            return jnp.dot(x, w, out_sharding=P("data", None))

        @product.defjvp
        def _(primals, tangents):
            (x, w), (dx, dw) = primals, tangents
            moved = jnp.dot(dx, w, out_sharding=P("data", None)) + jnp.dot(
                x, dw, out_sharding=P("data", None)
            )
            return product(x, w), moved

        return jax.nn.silu(product(x, self.weight))


class SymbolicVJP(Layer):
    """Its rules are told which arguments are constants. One residual is a Python number."""

    def __call__(self, x):
        @eqx.filter_custom_vjp
        def product(xw, scale):
            return jnp.dot(*xw, out_sharding=P("data", None)) * scale, jnp.sum(scale)

        @product.def_fwd
        def _(perturbed, xw, scale):
            assert perturbed[1]
            return product(xw, scale), True

        @product.def_bwd
        def _(residual, cts, perturbed, xw, scale):
            (x, w), (ct, of_sum) = xw, cts
            assert of_sum is None
            of_x = jnp.dot(ct * scale, w.T, out_sharding=P("data", None))
            return of_x, jnp.dot(x.T, ct * scale, out_sharding=P(None, None)) * residual

        scaled, _ = product((x, self.weight), jax.lax.stop_gradient(self.weight[0]))
        return scaled


class SymbolicJVP(Layer):
    def __call__(self, x):
        @eqx.filter_custom_jvp
        def product(x, w, *, scale):
            return jnp.dot(x, w, out_sharding=P("data", None)) * scale

        @product.def_jvp
        def _(primals, tangents, *, scale):
            (x, w), (dx, dw) = primals, tangents
            assert dx is None
            moved = jnp.dot(x, dw, out_sharding=P("data", None))
            return product(x, w, scale=scale), moved * scale

        fixed = jax.lax.stop_gradient(self.weight[0])
        return product(jax.lax.stop_gradient(x), self.weight, scale=fixed) + x


class Mapped(Layer):
    def __call__(self, x):
        def inside(x, w):
            return jax.lax.psum(x @ w, "data") + x @ w

        specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
        return jax.shard_map(inside, axis_names={"data"}, **specs)(x, self.weight)


class Solves(Layer):
    def __call__(self, x):
        matrix = self.weight @ self.weight.T + jnp.eye(8)
        return x + jax.scipy.linalg.solve(matrix, jnp.ones(8), assume_a="pos")


class ClosesOver(Layer):
    def __call__(self, x):
        return x @ self.weight + BIAS["array"]


class Places(Layer):
    def __call__(self, x):
        return mylib.filter_shard(x @ self.weight, P("data", "model")) ** 2


class Searches(Layer):
    def __call__(self, x):
        return x @ self.weight * jnp.searchsorted(jnp.arange(3.0), x.sum())


class Several(Layer):
    """Results that depend on nothing, text and None."""

    def __call__(self, x, scale=2):
        noise = jax.random.normal(jax.random.key(0), (8,))
        return x @ self.weight * scale + noise, jnp.arange(3), "text", None


BIAS = {}
KINDS = [*Layer.__subclasses__()]
# Written without a word of the mesh's axes.
UNTYPED = [Plain, Checked, Places, Several, Solves]


def loss_of(layers, x):
    for layer in layers:
        x = layer(x)
        if isinstance(x, tuple):
            assert x[2:] == ("text", None)
            x = x[0] + x[1].sum()
    return jnp.mean(jnp.sin(x) ** 2)


def compare(cls, mesh, *, loss_of=loss_of, kept=KEPT, layers=2, **options):
    """The value and gradients of layers that gather, and of the same layers with whole weights in
    plain JAX, on the same mesh.
    """
    model = [cls(jnp.asarray(WEIGHT * (i + 1))) for i in range(layers)]

    def gathering(model, x):
        return loss_of(mylib.fully_shard(model, cls, kept, **options), x)

    with jax.set_mesh(mesh):
        BIAS["array"] = jax.device_put(np.linspace(0, 1, 8, dtype=np.float32), P())
        there, whole, x = (
            mylib.filter_shard(tree, placement)
            for tree, placement in ((model, kept), (model, replicated()), (X, P("data")))
        )
        found, grads = mylib.filter_jit(eqx.filter_value_and_grad(gathering))(there, x)
        wanted, plain = mylib.filter_jit(eqx.filter_value_and_grad(loss_of))(whole, x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    for old, new, right in zip(*map(jax.tree.leaves, (there, grads, plain)), strict=True):
        np.testing.assert_allclose(new, right, rtol=1e-4, atol=1e-6)
        assert new.sharding.is_equivalent_to(old.sharding, new.ndim)


ON_EXPLICIT = pytest.mark.parametrize("mesh", ["Explicit", "Explicit and Auto"])


@crossed(cls={x.__name__: x for x in KINDS}, mesh=["Explicit", "Explicit and Auto"])
@pytest.mark.everyday(
    "OutSharding-Explicit and Auto",
    "CustomVJP-Explicit",
    "Nested-Explicit and Auto",
    "Mapped-Explicit",
    "Places-Explicit and Auto",
    rest="thorough",
)
def test_as_in_plain_jax(cls, mesh):
    compare(cls, MESHES[mesh])


@pytest.mark.parametrize("cls", UNTYPED, ids=lambda cls: cls.__name__)
@pytest.mark.everyday("Plain", "Checked", rest="thorough")
def test_layers_that_name_no_axis(cls):
    compare(cls, MESHES["Auto and Explicit"])


OPTIONS = {
    "checkpoint=False": {"checkpoint": False},
    "policy": {"policy": jax.checkpoint_policies.everything_saveable},
    "in_turn=False": {"in_turn": False},
    "prefetch": {"prefetch": 1},
    "reduce_dtype": {"reduce_dtype": jnp.float32},
}


@crossed(
    option=[*OPTIONS],
    cls={x.__name__: x for x in (OutSharding, Types, CustomVJP)},
)
def test_options(cls, option):
    compare(cls, GRID, **OPTIONS[option])


def test_used_as_kept():
    compare(OutSharding, GRID, used=None)


@ON_EXPLICIT
@pytest.mark.parametrize("cls", [Plain, CustomVJP], ids=lambda cls: cls.__name__)
@pytest.mark.everyday("Plain-Explicit and Auto", "CustomVJP-Explicit", rest="thorough")
def test_under_vmap(cls, mesh):
    def by_example(layers, x):
        x = jnp.stack([x, x / 2], 1)
        for layer in layers:
            x = jax.vmap(layer, 1, 1)(x)
        return jnp.mean(jnp.sin(x) ** 2)

    compare(cls, MESHES[mesh], loss_of=by_example)


@ON_EXPLICIT
def test_stacked(mesh):
    def scanned(stack, x):
        return jnp.mean(jax.lax.scan(lambda x, layer: (layer(x), None), x, stack[0])[0] ** 2)

    class Stack(OutSharding):
        def __init__(self, weight):
            self.weight = jnp.stack([weight, 2 * weight, 3 * weight])

    kept = jax.tree.map(lambda x: P(None, "data"), [Stack(jnp.asarray(WEIGHT))])
    compare(Stack, MESHES[mesh], loss_of=scanned, kept=kept, layers=1)


def scanned(layer, x):
    turns = jax.tree.map(lambda w: jnp.stack([w, 2 * w]), layer)
    return jnp.mean(jax.lax.scan(lambda x, layer: (layer(x), None), x, turns)[0] ** 2)


def by_map(layer, x):
    return jnp.mean(jax.lax.map(layer, jnp.stack([x, 2 * x])) ** 2)


def times_a_vector(value):
    """The product of the Hessian and the weights, by two backward passes."""
    return jax.grad(lambda w: jnp.sum(jax.grad(value)(w) * jax.lax.stop_gradient(w)))


REFUSED = r"^jax.vmap, or another derivative, around (.|\n)*should match the (aval mesh|mesh of)"


@pytest.mark.parametrize(
    "loss, option",
    [
        (scanned, "checkpoint=False"),
        (by_map, "prefetch"),
        pytest.param(scanned, "policy", marks=pytest.mark.thorough),
        pytest.param(by_map, "reduce_dtype", marks=pytest.mark.thorough),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_derivatives_of_loops_under_vmap(loss, option):
    """JAX moves what a loop saves, on the axes of the loop."""

    def gathering(layer, x):
        return loss(mylib.fully_shard(layer, Plain, KEPT, **OPTIONS[option]), x)

    def by_scale(layer, x):
        def scaled(scale):
            return times_a_vector(lambda w: gathering(Plain(w * scale), x))(layer.weight)

        return jax.vmap(scaled)(jnp.arange(1.0, 3.0))

    with jax.set_mesh(GRID):
        layer, x = mylib.filter_shard((Plain(jnp.asarray(WEIGHT)), X), (KEPT, P("data")))
        with pytest.raises(ValueError, match=REFUSED):
            mylib.filter_jit(by_scale)(layer, x)


def test_gradients_of_loops_by_example():
    """What the loop saves has the batch in front, and needs no moving."""

    def loss(layer, x):
        return jnp.sum(jax.vmap(jax.grad(scanned), (None, 0))(layer, x[:, None]).weight, 0)

    def gathering(layer, x):
        def one(layer, x):
            return scanned(mylib.fully_shard(layer, Plain, KEPT, checkpoint=False), x)

        return jnp.sum(jax.vmap(jax.grad(one), (None, 0))(layer, x[:, None]).weight, 0)

    layer = Plain(jnp.asarray(WEIGHT))
    with jax.set_mesh(GRID):
        there, x = mylib.filter_shard((layer, X), (KEPT, P()))
        found = mylib.filter_jit(gathering)(there, x)
    np.testing.assert_allclose(found, loss(layer, X), rtol=1e-4, atol=1e-6)


def test_two_backward_passes_through_a_loop():
    class Recurs(Layer):
        def __call__(self, x):
            def turn(x, _):
                return jnp.tanh(x @ self.weight + self.weight[0]), None

            return jax.lax.scan(turn, x, None, length=2)[0]

    def twice(weight, x):
        def loss(weight):
            return jnp.mean(mylib.fully_shard(Recurs(weight), Recurs, KEPT)(x) ** 2)

        return times_a_vector(loss)(weight)

    with jax.set_mesh(GRID):
        weight, x = mylib.filter_shard((jnp.asarray(WEIGHT), X), (KEPT, P("data")))
        with pytest.raises(ValueError, match=REFUSED):
            mylib.filter_jit(twice)(weight, x)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_weights_that_are_computed(prefetch):
    """They aren't placed as `kept`, and their gradients have the types that they have."""

    class Top(eqx.Module):
        layer: Plain
        weight: Array

    def loss(model, x):
        return jnp.mean((model.layer(x) @ model.weight) ** 2)

    def gathering(model, x):
        return loss(mylib.fully_shard(model, Plain, KEPT, prefetch=prefetch), x)

    def gradient(loss, model, x):
        return jax.grad(loss)(jax.tree.map(lambda w: w * 2, model), x)

    model = Top(Plain(jnp.asarray(WEIGHT)), jnp.asarray(WEIGHT[::-1].copy()))
    with jax.set_mesh(GRID):
        x = mylib.filter_shard(X, P("data"))
        found = jax.jit(lambda model, x: gradient(gathering, model, x))(model, x)
    for new, right in zip(*map(jax.tree.leaves, (found, gradient(loss, model, X))), strict=True):
        np.testing.assert_allclose(new, right, rtol=1e-4, atol=1e-6)
        assert new.sharding.is_fully_replicated


@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_layer_that_calls_another(prefetch):
    class Calls(Layer):
        def __call__(self, x, other):
            return other(jnp.tanh(x @ self.weight))

    def loss(layers, x):
        outer, inner = layers
        return jnp.mean(jnp.sin(inner(outer(x, inner))) ** 2)

    layers = Calls(jnp.asarray(WEIGHT)), Plain(jnp.asarray(2 * WEIGHT))
    with jax.set_mesh(GRID):
        there, x = mylib.filter_shard((layers, X), (KEPT, P("data")))

        @mylib.filter_jit
        @eqx.filter_grad
        def gradient(layers, x):
            layers = mylib.fully_shard(layers, (Calls, Plain), KEPT, prefetch=prefetch)
            return loss(layers, x)

        found = gradient(there, x)
    expected = eqx.filter_grad(loss)(layers, X)
    for new, right in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(new, right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("checkpoint", [True, False])
def test_eager(checkpoint):
    with jax.set_mesh(GRID):
        layer, x = mylib.filter_shard((OutSharding(jnp.asarray(WEIGHT)), X), (KEPT, P("data")))

        def loss(layer):
            layer = mylib.fully_shard(layer, OutSharding, KEPT, checkpoint=checkpoint)
            return jnp.mean(layer(x) ** 2)

        grads = eqx.filter_grad(loss)(layer)
    np.testing.assert_allclose(grads.weight, X.T @ (X @ WEIGHT) * 2 / 64, rtol=1e-4, atol=1e-6)
    assert grads.weight.sharding.spec == P("data", None)


class Megatron(eqx.Module):
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]

    def __call__(self, x):
        hidden = jax.nn.gelu(x @ self.up)
        assert jax.typeof(hidden).sharding.spec == P("data", "model")
        return x + jnp.dot(hidden, self.down, out_sharding=P("data", None))


def test_tensor_parallelism():
    tensor = by_axes({"mlp": "model"}) | replicated()
    kept = tensor & fsdp("data", min_size=0)
    keys = jax.random.split(jax.random.key(0))
    model = Megatron(jax.random.normal(keys[0], (8, 16)), jax.random.normal(keys[1], (16, 8)))

    def gathering(model, x):
        return jnp.mean(mylib.fully_shard(model, Megatron, kept, tensor)(x) ** 2)

    with jax.set_mesh(GRID):
        there, used, x = (
            mylib.filter_shard(tree, placement)
            for tree, placement in ((model, kept), (model, tensor), (X, P("data")))
        )
        gradient = mylib.filter_jit(eqx.filter_grad(gathering))
        grads = gradient(there, x)
        plain = mylib.filter_jit(eqx.filter_grad(lambda m, x: jnp.mean(m(x) ** 2)))(used, x)
        report = mylib.audit(gradient, there, x)
    assert grads.up.sharding.spec == P("data", "model")
    assert grads.down.sharding.spec == P("model", "data")
    for new, right in zip(*map(jax.tree.leaves, (grads, plain)), strict=True):
        np.testing.assert_allclose(new, right, rtol=1e-4, atol=1e-5)
    assert report.count("all-gather", "data") == 4  # each weight, twice


def test_a_check_fails_by_its_words():
    with jax.set_mesh(GRID):
        model, x = mylib.filter_shard((Checked(jnp.asarray(WEIGHT)), X * 1e9), (KEPT, P("data")))

        @mylib.filter_jit
        def call(model, x):
            return mylib.fully_shard(model, Checked, KEPT)(x)

        with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
            call(model, x)


def test_a_fault_in_the_layer_is_that_of_plain_jax():
    class Wrong(Layer):
        def __call__(self, x):
            return jnp.dot(x, self.weight.T, out_sharding=P("nothing"))

    with pytest.raises(ValueError, match="nothing"):
        compare(Wrong, GRID)
