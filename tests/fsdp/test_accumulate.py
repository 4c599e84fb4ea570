"""`accumulate`: the gradient of the whole batch, with one gather and one sum of each weight."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P
from jaxtyping import Array, Float
from stacks import through

import mylib
from mylib.rules import by_axes, fsdp, replicated

GRID = mylib.make_mesh(replica=2, data=2, model=2)
TENSOR = by_axes({"mlp": "model"}) | replicated()
KEPT = TENSOR & fsdp("data", min_size=64)
AXES = ("replica", "data")
WIDTH, HIDDEN, DEPTH = 16, 32, 3


class Block(eqx.Module):
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]
    steps: Array

    def __init__(self, rng):
        self.up = np.float32(rng.normal(size=(WIDTH, HIDDEN)) / 4)
        self.down = np.float32(rng.normal(size=(HIDDEN, WIDTH)) / 4)
        self.steps = np.arange(3)

    def __call__(self, x):
        y = jax.nn.relu(x @ self.up)
        # Where the axis is Explicit, JAX asks where the sum over it goes.
        at = P() if "model" in jax.typeof(y).sharding.spec else None
        return x + jnp.matmul(y, self.down, out_sharding=at) * self.steps[1]


_RNG = np.random.default_rng(1)
LAYERS = [Block(_RNG) for _ in range(DEPTH)]
STACKED = jax.tree.map(lambda *xs: np.stack(xs), *LAYERS)
BATCH = np.float32(_RNG.normal(size=(32, WIDTH))), np.arange(32)


def loss(layers, batch):
    x, weights = batch
    return jnp.mean(jnp.sum(jnp.sin(through(layers, x)), -1) * weights)


def accumulated(layers, pieces=4, **options):
    @mylib.filter_jit(
        in_shardings={"batch": P(AXES)}, out_shardings=(None, KEPT), mesh=options["mesh"]
    )
    def run(layers, batch):
        return mylib.accumulate(loss, layers, batch, KEPT, TENSOR, pieces=pieces, **options)

    return run, mylib.filter_shard(layers, KEPT, mesh=options["mesh"])


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


@pytest.mark.parametrize(
    "types", [(AUTO,) * 3, (EXPLICIT,) * 3, (EXPLICIT, EXPLICIT, AUTO), (AUTO, AUTO, EXPLICIT)]
)
@pytest.mark.parametrize("layers", [LAYERS, STACKED], ids=["list", "scan"])
def test_is_the_gradient_of_the_batch(layers, types):
    mesh = jax.make_mesh((2, 2, 2), GRID.axis_names, axis_types=types)
    with jax.set_mesh(mesh):
        _is_the_gradient_of_the_batch(layers, mesh)


def _is_the_gradient_of_the_batch(layers, mesh):
    run, placed = accumulated(layers, mesh=mesh, axes=AXES)
    mylib.testing.verify(run, placed, BATCH)
    report = mylib.audit(run, placed, BATCH)
    sums = [c for c in report.collectives if c.phase == "backward" and "data" in c.axes]
    assert all(c.loops == () for c in sums)
    # In each of the pieces only what tensor parallelism sums.
    looped = {axis for c in report.collectives if c.loops for axis in c.axes}
    assert looped <= {"model"}
    assert report.count("all-gather") == 2 * (DEPTH if isinstance(layers, list) else 1)
    # It isn't FSDP: gathered weights stay.
    faults = mylib.contracts.fsdp("data", argument="layers", activations="1 MiB")(report)
    assert any("gathered" in fault for fault in faults)


def test_dtypes():
    """Gradients are added in the dtype of the weights, or another one."""
    expected = eqx.filter_grad(loss)(LAYERS, BATCH)[0].up
    for options, rtol in [({"dtype": "bfloat16"}, 0.1), ({"reduce_dtype": "bfloat16"}, 0.02)]:
        run, placed = accumulated(LAYERS, mesh=GRID, axes=AXES, **options)
        found = run(placed, BATCH)[1][0].up
        assert found.dtype == np.float32
        assert 1e-4 < np.abs(found - expected).max() / np.abs(expected).max() < rtol


@pytest.mark.parametrize("options", [{}, {"prefetch": 1}, {"send_dtype": jnp.int8}], ids=str)
@pytest.mark.parametrize("types", [AUTO, EXPLICIT], ids=lambda t: t.name)
def test_a_loss_with_fully_shard_gathers_only_once(types, options):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(types,))
    kept = fsdp("data", min_size=64)

    def sharded(layers, batch):
        return loss(mylib.fully_shard(layers, Block, kept, **options), batch)

    def run(layers, batch):
        return mylib.accumulate(sharded, layers, batch, kept, pieces=2)

    with jax.set_mesh(mesh):
        run = mylib.filter_jit(run, in_shardings=(kept, P("data")), out_shardings=(None, kept))
        layers = mylib.filter_shard(LAYERS, kept)
        found = run(layers, BATCH)
        report = mylib.audit(run, layers, BATCH)
    assert report.count("all-gather") == 2 * DEPTH
    assert not [c for c in report.collectives if c.loops]
    expected = eqx.filter_value_and_grad(loss)(LAYERS, BATCH)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_what_is_refused():
    for options, reason in [
        ({"mesh": GRID, "axes": AXES, "pieces": 3}, r"(?s)can't be divided into 12.*\[0\]"),
        ({"mesh": GRID, "axes": "rows"}, "the mesh has no axis 'rows'"),
    ]:
        with pytest.raises(mylib.PlacementError, match=reason):
            mylib.accumulate(loss, LAYERS, BATCH, fsdp("data"), **{"pieces": 4, **options})
    with pytest.raises(TypeError, match="^accumulate: .* is not a floating dtype"):
        mylib.accumulate(loss, LAYERS, BATCH, KEPT, pieces=4, mesh=GRID, dtype=jnp.int32)
