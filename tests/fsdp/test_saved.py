"""`saved=` of `fully_shard`: the numbers of one device, what is saved, and what is refused."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from close import assert_close
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float
from stacks import through

import mylib
from mylib.rules import by_axes, fsdp, replicated

DEPTH, ROWS, TIME, WIDTH, HIDDEN, HEADS = 3, 8, 16, 16, 32, 4
AUTO, EXPLICIT = (
    jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    for kind in (AxisType.Auto, AxisType.Explicit)
)
TENSOR = by_axes({"heads": "model", "mlp": "model"}) | replicated()
KEPT = TENSOR & fsdp("data", min_size=64)


class Block(eqx.Module):
    """Of one sequence, or several."""

    query: Float[Array, "embed heads"]
    key: Float[Array, "embed heads"]
    value: Float[Array, "embed heads"]
    out: Float[Array, "heads embed"]
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]

    def __init__(self, rng):
        shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, HIDDEN), (HIDDEN, WIDTH)]
        weights = [jnp.asarray(rng.normal(size=s) / 8, jnp.float32) for s in shapes]
        self.query, self.key, self.value, self.out, self.up, self.down = weights

    def __call__(self, x):
        q, k, v = (
            (x @ w).reshape(*x.shape[:-1], HEADS, -1) for w in (self.query, self.key, self.value)
        )
        weights = jax.nn.softmax(jnp.einsum("...thd,...shd->...hts", q, k))
        x = x + jnp.einsum("...hts,...shd->...thd", weights, v).reshape(x.shape) @ self.out
        return x + jax.nn.relu(x @ self.up) @ self.down


# NumPy's numbers: JAX would compile programs for its own whenever this file is collected.
_RNG = np.random.default_rng(1)
LISTED = [Block(_RNG) for _ in range(DEPTH)]
STACKED = jax.tree.map(lambda *xs: jnp.asarray(np.stack(xs)), *LISTED)
NETS = pytest.mark.parametrize("layers", [LISTED, STACKED], ids=["list", "scan"])
X = np.random.default_rng(0).normal(size=(ROWS, TIME, WIDTH)).astype(np.float32)


def loss_of(layers, x):
    return jnp.mean(jnp.sin(through(layers, x)))


def loss_by_example(layers, x):
    return jnp.mean(jnp.sin(jax.vmap(lambda x: through(layers, x), spmd_axis_name="data")(x)))


EXAMPLE, BATCH = P("model"), P("data", "model")  # of an input as the layer sees it
WAYS = pytest.mark.parametrize(
    "loss, saved",
    [
        pytest.param(loss_of, BATCH, id="batch"),
        pytest.param(loss_by_example, EXAMPLE, id="vmap"),
    ],
)


def step(loss, saved, mesh=AUTO, layers=Block, kept=KEPT, used=TENSOR, **options):
    """A value, and the gradients of weights and input."""

    @mylib.filter_jit(out_shardings=(None, (kept, P("data"))), mesh=mesh)
    def run(model, x):
        def sharded(pair):
            model, x = pair
            options.setdefault("mesh", mesh)
            model = mylib.fully_shard(model, layers, kept, used, saved=saved, **options)
            return loss(model, x)

        return eqx.filter_value_and_grad(sharded)((model, x))

    return run


def placed(model, x=X, mesh=AUTO, kept=KEPT):
    return mylib.filter_shard((model, x), (kept, P("data")), mesh=mesh)


def assert_numbers_of_one_device(run, loss, model, mesh=AUTO, kept=KEPT):
    """In float64, where the order of sums hardly matters."""
    with jax.enable_x64(True):
        model, x = jax.tree.map(lambda a: np.asarray(a, np.float64), (model, X))
        with jax.set_mesh(mesh):
            found = run(*placed(model, x, mesh, kept))
        one = eqx.filter_jit(eqx.filter_value_and_grad(lambda pair: loss(*pair)))
        assert_close(found, one((model, x)), rtol=1e-12)
    return found


@WAYS
@NETS
@pytest.mark.everyday("list-vmap", "scan-vmap")
def test_numbers_are_those_of_one_device(layers, loss, saved):
    # On one device `spmd_axis_name` has no axis.
    _, (grads, _) = assert_numbers_of_one_device(step(loss, saved), loss_of, layers)
    mylib.testing.assert_placed(grads, KEPT, mesh=AUTO)


def test_numbers_without_spmd_axis_name():
    def loss(layers, x):
        return jnp.mean(jnp.sin(jax.vmap(lambda x: through(layers, x))(x)))

    assert_numbers_of_one_device(step(loss, EXAMPLE), loss, STACKED)


OPTIONS = {
    "policy": {"policy": jax.checkpoint_policies.everything_saveable},
    "prefetch": {"prefetch": 1},
    "not in turn": {"in_turn": False},
    "gradients in a wider dtype": {"reduce_dtype": np.float64},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.everyday("prefetch")
def test_options_change_no_number(option):
    assert_numbers_of_one_device(step(loss_of, BATCH, **OPTIONS[option]), loss_of, LISTED)


def saved_shapes(loss, saved, layers, **options):
    """The local shapes of float arrays that the forward pass returns for the backward pass."""

    def sharded(model, x):
        options.setdefault("mesh", AUTO)
        model = mylib.fully_shard(model, Block, KEPT, TENSOR, saved=saved, **options)
        return loss(model, x)

    with jax.set_mesh(AUTO):
        forward = jax.jit(lambda *args: jax.vjp(sharded, *args)).lower(*placed(layers)).compile()
    avals = jax.tree.leaves(forward.out_info)
    places = jax.tree.leaves(forward.output_shardings)
    found = [place.shard_shape(x.shape) for x, place in zip(avals, places, strict=True)]
    return [shape for shape in found if shape[-1:] == (WIDTH,) and shape[-2] in (TIME, TIME // 2)]


@WAYS
@NETS
@pytest.mark.everyday("list-vmap", "scan-vmap")
def test_a_device_saves_its_part_of_the_inputs(layers, loss, saved):
    front = (DEPTH,) if layers is STACKED else ()
    part, whole = (front + (ROWS // 4, time, WIDTH) for time in (TIME // 2, TIME))
    split = saved_shapes(loss, saved, layers)
    assert part in split and whole not in split
    assert whole in saved_shapes(loss, None, layers)


@dataclasses.dataclass
class Pair:
    """What a layer may also take and return."""

    x: jax.Array
    scale: jax.Array


jax.tree_util.register_dataclass(Pair, ["x", "scale"], [])


class OfPairs(Block):
    def __call__(self, pair, mask, *, shift):
        x = super().__call__(pair.x) * mask + shift
        return Pair(x * pair.scale, pair.scale), jnp.sum(x)


def loss_of_pairs(layers, x):
    pair, total = Pair(x, jnp.asarray(0.5, x.dtype)), 0.0
    for layer in layers:
        pair, sum_ = layer(pair, jnp.ones(x.shape) / 2, shift=x / 4)
        total = total + sum_
    return jnp.mean(jnp.sin(pair.x)) + total / x.size


@pytest.mark.slow
def test_a_prefix_for_an_input_of_several_arrays():
    layers = [OfPairs(np.random.default_rng(i)) for i in range(2)]
    run = step(loss_of_pairs, Pair(BATCH, None), layers=OfPairs)
    assert_numbers_of_one_device(run, loss_of_pairs, layers)


class Scale(eqx.Module):
    """A layer whose types are the same with and without split weights."""

    weight: Float[Array, " mlp"]

    def __call__(self, x):
        return jnp.sin(x * self.weight)


@pytest.mark.parametrize("spec", [P("data"), BATCH], ids=["whole", "split"])
@pytest.mark.parametrize("stacked", [False, True], ids=["list", "scan"])
@pytest.mark.everyday("list-split", "scan-whole", rest="thorough")
def test_explicit_axes(stacked, spec):
    """Results have the type of the input, as the carry of a scan must."""
    scales = [Scale(jnp.linspace(0.5, i + 1, WIDTH)) for i in range(DEPTH)]
    scales = jax.tree.map(lambda *xs: jnp.stack(xs), *scales) if stacked else scales
    tensor = by_axes({"mlp": "model"})

    def loss(layers, x):
        if not jax.sharding.get_abstract_mesh().empty:
            x = jax.sharding.reshard(x, spec)
        before = jax.typeof(x).sharding
        x = through(layers, x)
        assert jax.typeof(x).sharding == before
        return jnp.mean(x**2)

    run = step(loss, BATCH, EXPLICIT, Scale, tensor, tensor)
    assert_numbers_of_one_device(run, loss, scales, EXPLICIT, tensor)


@pytest.mark.parametrize(
    "saved, reason, instead",
    [
        (P("data", "modle"), "has no axis 'modle'", "did you mean 'model'?"),
        (P("data"), "by which `used` splits weights: 'model'", "name one of them"),
        (
            P("data", None, None, "model"),
            "the spec has 4 entries, for an array of rank 3",
            "at most 3",
        ),
        ((BATCH, BATCH), "a tuple of 2", "one placement"),
        (P("data", "model", "data"), "'data' is used 2 times", "once"),
        (jax.devices()[0], "it splits nothing", "PartitionSpec"),
        (lambda leaf: mylib.rules.PASS, "PASS", "None to leave the leaf alone"),
        (
            NamedSharding(AUTO, BATCH, memory_kind="pinned_host"),
            "can't compute in pinned_host memory",
            "offload",
        ),
    ],
)
def test_what_cannot_be_saved_is_refused(saved, reason, instead):
    run = step(loss_of, saved)
    with pytest.raises(mylib.PlacementError) as caught:
        run(*placed(LISTED))
    assert reason in str(caught.value) and instead in str(caught.value)
    assert "Block" in str(caught.value)


def test_a_length_that_the_axes_do_not_divide_is_refused():
    with pytest.raises(mylib.PlacementError, match=r"the input of Block \(8, 15, 16\)"):
        step(loss_of, BATCH)(*placed(LISTED, X[:, :15]))


@pytest.mark.parametrize("used", [None, replicated()], ids=["None", "replicated"])
def test_without_tensor_parallelism_it_is_refused(used):
    with pytest.raises(mylib.PlacementError, match="`used` splits weights: none"):
        step(loss_of, BATCH, used=used)(*placed(LISTED))


def test_a_layer_called_by_keywords_is_refused():
    def loss(layers, x):
        return jnp.mean(layers[0](x=x))

    with pytest.raises(mylib.PlacementError, match="without positional arguments"):
        step(loss, BATCH)(*placed(LISTED))


def test_nothing_to_save_without_a_checkpoint():
    with pytest.raises(TypeError, match="checkpoint=False can't be combined with saved="):
        mylib.fully_shard(LISTED, Block, KEPT, TENSOR, mesh=AUTO, saved=BATCH, checkpoint=False)
