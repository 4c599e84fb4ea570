"""`fully_shard(send_dtype=...)`: weights are those that a reference by hand rounds, and gradients
go straight through.
"""

from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from close import assert_close
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float
from stacks import through

import mylib
from mylib._training.fsdp.quantised import scales_of
from mylib.rules import by_axes, by_path, fsdp, replicated

AUTO, EXPLICIT = (
    jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, AxisType.Auto))
    for kind in (AxisType.Auto, AxisType.Explicit)
)
TENSOR = by_axes({"mlp": "model"}) | replicated()
KEPT = TENSOR & fsdp("data", min_size=64)
WIDTH, HIDDEN, DEPTH = 16, 32, 3
X = np.random.default_rng(0).normal(size=(8, WIDTH))


class Block(eqx.Module):
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]
    bias: Array
    steps: Array

    def __init__(self, rng):
        self.up = rng.normal(size=(WIDTH, HIDDEN)) / 4
        self.down = rng.normal(size=(HIDDEN, WIDTH)) / 4
        self.up[3] = 0
        self.bias, self.steps = rng.normal(size=WIDTH), np.arange(64).reshape(8, 8)

    def __call__(self, x):
        return x + jax.nn.relu(x @ self.up) @ self.down + self.bias * self.steps[0, 1]


_RNG = np.random.default_rng(1)
LISTED = [Block(_RNG) for _ in range(DEPTH)]
STACKED = jax.tree.map(lambda *xs: np.stack(xs), *LISTED)
DTYPES = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "int8": np.int8}


def by_hand(w: np.ndarray, rows: int, columns: int, dtype: str) -> np.ndarray:
    """A weight whose rows, in parts, have been rounded to 8 bits; `rows` is their dimension."""
    moved = np.moveaxis(w, rows, 0)
    parts = moved.reshape(moved.shape[0], columns, -1)
    most = 127 if dtype == "int8" else 448
    scale = np.maximum(np.abs(parts).max(-1, keepdims=True) / most, np.finfo(w.dtype).tiny)
    sent = parts / scale
    sent = (np.round(sent) if dtype == "int8" else sent).astype(DTYPES[dtype])
    return np.moveaxis((sent.astype(w.dtype) * scale).reshape(moved.shape), 0, rows)


def rounded(block: Block, dtype: str) -> Block:
    # `up` is kept as P("data", "model"), `down` as P("model", "data").
    up, down = by_hand(block.up, 0, 2, dtype), by_hand(block.down, 1, 2, dtype)
    return eqx.tree_at(lambda b: (b.up, b.down), block, (up, down))


def loss_of(layers, x):
    return jnp.mean(jnp.sin(through(layers, x)))


def loss_by_example(layers, x):
    return jnp.mean(jnp.sin(jax.vmap(lambda x: through(layers, x))(x)))


def sharded(layers, mesh=AUTO, send="float8_e4m3fn", **options):
    return mylib.fully_shard(
        layers, Block, KEPT, TENSOR, mesh=mesh, send_dtype=send and jnp.dtype(send), **options
    )


def differentiated(layers, mesh=AUTO, loss=loss_of, x=X, **options):
    """The loss and its gradient, of layers that gather."""

    @mylib.filter_jit(out_shardings=(None, KEPT), mesh=mesh)
    def run(layers, x):
        return eqx.filter_value_and_grad(lambda m: loss(sharded(m, mesh, **options), x))(layers)

    with jax.set_mesh(mesh):
        layers = mylib.filter_shard(layers, KEPT)
        return run(layers, mylib.filter_shard(jnp.asarray(x), P("data")))


def expected(layers, dtype, loss=loss_of):
    blocks = [rounded(block, dtype) for block in LISTED]
    if not isinstance(layers, list):
        blocks = jax.tree.map(lambda *xs: np.stack(xs), *blocks)
    return eqx.filter_value_and_grad(loss)(jax.tree.map(jnp.asarray, blocks), X)


NETS = pytest.mark.parametrize("layers", [LISTED, STACKED], ids=["list", "scan"])


@NETS
@pytest.mark.parametrize("send", DTYPES)
@pytest.mark.everyday("float8_e4m3fn-list", "int8-scan", rest="thorough")
def test_a_reference_by_hand(layers, send):
    with jax.enable_x64(True):
        found = differentiated(layers, send=send)
        assert found[1][0].up.dtype == np.float64 if layers is LISTED else True
        assert_close(found, expected(layers, send), 1e-12)


OPTIONS = {
    "under vmap": {"loss": loss_by_example},
    "all but the weights saved": {"policy": jax.checkpoint_policies.everything_saveable},
    "all saved": {"checkpoint": False},
    "not in turn": {"in_turn": False},
    "gradients in a wider dtype": {"reduce_dtype": np.float64},
    "prefetched": {"prefetch": 1},
    "inputs saved in parts": {"saved": P("data", "model")},
}


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.everyday("prefetched-auto", "under vmap-explicit", rest="thorough")
def test_with_other_options(options, mesh):
    with jax.enable_x64(True):
        found = differentiated(LISTED, mesh, **options)
        assert_close(found, expected(LISTED, "float8_e4m3fn"), 1e-12)


def test_an_ensemble():
    """Each member has its own scales."""
    with jax.enable_x64(True):
        run = eqx.filter_jit(lambda m, x: jax.vmap(lambda m: sharded(m)(x))(m))
        found = run(STACKED, X)
        for y, block in zip(found, LISTED, strict=True):
            assert_close(y, rounded(block, "float8_e4m3fn")(X), 1e-12)


@pytest.mark.thorough
def test_derivatives_of_all_orders_go_straight_through():
    """The second derivative is that at the rounded weights, too; tangents are not rounded."""
    with jax.enable_x64(True):
        arrays, rest = eqx.partition(LISTED, eqx.is_inexact_array)
        tangents = jax.tree.map(lambda x: np.sin(1 + np.arange(x.size)).reshape(x.shape), arrays)

        def forward(layers, shard):
            def loss(arrays):
                return jnp.sum(jnp.sin(through(shard(eqx.combine(arrays, rest)), X)) ** 3)

            arrays = eqx.filter(layers, eqx.is_inexact_array)
            value = jax.jvp(loss, (arrays,), (tangents,))
            return value, jax.jvp(jax.grad(loss), (arrays,), (tangents,))

        found = jax.jit(lambda: forward(LISTED, sharded))()
        blocks = [rounded(block, "float8_e4m3fn") for block in LISTED]
        assert_close(found, forward(blocks, lambda x: x), 1e-11)


def gathers(**options):
    def run(layers, x):
        return eqx.filter_grad(lambda m: loss_of(sharded(m, **options), x))(layers)

    layers = mylib.filter_shard(LISTED, KEPT, mesh=AUTO)
    x = mylib.filter_shard(X.astype(np.float32), P("data"), mesh=AUTO)
    return mylib.audit(mylib.filter_jit(run, out_shardings=KEPT, mesh=AUTO), layers, x)


def passes(report, dtype):
    """How often weights are gathered in each pass."""
    sent = [c for c in report.among("all-gather") if c.dtype == dtype]
    return Counter(c.phase for c in sent for _ in range(c.times))


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
def test_gathered_weights_are_not_saved(policy):
    report, without = (gathers(policy=policy, send=dtype) for dtype in ("int8", None))
    scales, weights = passes(report, "f32"), passes(report, "s8")
    assert weights == scales == passes(without, "f32") and weights["recomputed"] > 0
    report.expect(mylib.contracts.two_d("data", "model", argument="layers"))


def test_tensor_parallelism_sends_nothing_more():
    without, report = gathers(send=None), gathers(send="int8")
    assert report.bytes(axes="model") == without.bytes(axes="model")
    moved = Counter(name for c in report.among("all-gather") for name in c.arrays)
    assert moved == {
        f"layers[{i}].{name}": times
        for i in range(DEPTH)
        for name, times in {"up": 4, "down": 4, "steps": 2}.items()
    }


def test_what_is_left_out():
    kept, whole = NamedSharding(AUTO, P("data")), NamedSharding(AUTO, P())
    by_model = NamedSharding(AUTO, P("model"))
    for shape, dtype, used in [
        ((8,), jnp.float32, whole),
        ((8, 8), jnp.int32, whole),
        ((8, 4), jnp.float32, whole),  # its scales would need as much
        ((8, 16), jnp.float32, kept),
        ((8, 16), jnp.float32, None),
    ]:
        assert scales_of(jax.ShapeDtypeStruct(shape, dtype), kept, used) is None
    weight = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    assert scales_of(weight, by_model, by_model) is None
    assert scales_of(weight, kept, whole) is not None


@pytest.mark.parametrize("send", DTYPES)
def test_verify(send):
    """It is the step but for the rounding, which float64 leaves out."""

    def step(layers, x):
        return eqx.filter_value_and_grad(lambda m: loss_of(sharded(m, send=send), x))(layers)

    arrays, x = eqx.filter_eval_shape(lambda: (LISTED[:1], X.astype(np.float32)))
    mylib.testing.verify(mylib.filter_jit(step, mesh=AUTO), arrays, x, high=8)


def test_leaves_in_no_layer_are_sent_as_they_are():
    model = {"table": np.float32(X), "block": LISTED[0]}
    kept = by_path({"table": P("data")}) | KEPT
    found = jax.jit(
        lambda m: mylib.fully_shard(m, Block, kept, TENSOR, mesh=AUTO, send_dtype=jnp.int8)["table"]
    )(model)
    np.testing.assert_array_equal(found, model["table"])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int16, jnp.uint8])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(TypeError, match="float8_e4m3fn or jnp.int8"):
        mylib.fully_shard(LISTED, Block, KEPT, mesh=AUTO, send_dtype=dtype)
