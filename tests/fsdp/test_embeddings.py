"""`fully_shard` and tables whose rows are looked up: the gradient of a table is not sent whole."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import Array

import mylib
from mylib.rules import batch, by_path, fsdp

ROWS, WIDTH = 64, 16
KEYS = jax.random.split(jax.random.key(0), 3)
TOKENS = np.random.default_rng(0).integers(0, ROWS, (16, 8)).astype(np.int32)
KEPT = fsdp("data", min_size=64)


class Model(eqx.Module):
    table: Array
    layer: eqx.nn.Linear
    head: Array

    def __init__(self):
        self.table = jax.random.normal(KEYS[0], (ROWS, WIDTH))
        self.layer = eqx.nn.Linear(WIDTH, WIDTH, key=KEYS[1])
        self.head = jax.random.normal(KEYS[2], (WIDTH, ROWS))

    def __call__(self, tokens):
        return jax.nn.log_softmax(self.layer(self.table[tokens]) @ self.head)


class Tied(Model):
    def __call__(self, tokens):
        return jax.nn.log_softmax(self.layer(self.table[tokens]) @ self.table.T)


def loss_of(model, tokens):
    found = jax.vmap(jax.vmap(model))(tokens)
    return -jnp.mean(jnp.take_along_axis(found, tokens[..., None], -1))


def step(mesh, kept, **options):
    @mylib.filter_jit(out_shardings=(None, kept), mesh=mesh)
    @eqx.filter_value_and_grad
    def run(model, tokens):
        return loss_of(mylib.fully_shard(model, eqx.nn.Linear, kept, mesh=mesh, **options), tokens)

    return run


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


BY_COLUMNS = by_path({"table": P(None, "data")}) | KEPT
IN_HOST_MEMORY = NamedSharding(mesh_of(data=8), P("data"), memory_kind="pinned_host")
CASES = {
    "by rows": (mesh_of(data=8), KEPT, "data"),
    "by columns": (mesh_of(data=8), BY_COLUMNS, "data"),
    "two axes": (mesh_of(a=4, b=2), fsdp(("a", "b"), min_size=64), ("a", "b")),
    "a batch over one of two axes": (mesh_of(a=4, b=2), fsdp(("a", "b"), min_size=64), "b"),
    "copied over an axis": (mesh_of(data=4, b=2), KEPT, "data"),
    "in host memory": (mesh_of(data=8), by_path({"table": IN_HOST_MEMORY}) | KEPT, "data"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cls", [Model, Tied])
@pytest.mark.everyday(
    "Model-by rows", "Tied-by columns", "Tied-copied over an axis", "Tied-in host memory"
)
def test_numbers_are_those_of_one_device(cls, case):
    mesh, kept, axis = CASES[case]
    model = mylib.filter_device_put(cls(), kept, mesh=mesh)
    tokens = mylib.filter_shard(TOKENS, batch(axis), mesh=mesh)
    with jax.set_mesh(mesh):
        mylib.testing.verify(step(mesh, kept), model, tokens)
        mylib.testing.assert_placed(step(mesh, kept)(model, tokens)[1], kept, mesh=mesh)


@pytest.mark.parametrize("kept", [KEPT, BY_COLUMNS], ids=["by rows", "by columns"])
def test_the_contract_holds(kept):
    mesh = mesh_of(data=8)
    model = mylib.filter_shard(Model(), kept, mesh=mesh)
    tokens = mylib.filter_shard(TOKENS, batch("data"), mesh=mesh)
    report = mylib.audit(step(mesh, kept), model, tokens)
    report.expect(mylib.contracts.fsdp("data"))


def test_the_contract_does_not_hold_if_activations_are_exchanged():
    mesh = mesh_of(data=8)

    class Exchanging(Model):
        def __call__(self, tokens):
            x = mylib.filter_shard(self.table[tokens], P(None, None, "data"), mesh=mesh)
            return jax.nn.log_softmax(jax.vmap(jax.vmap(self.layer))(x) @ self.head)

    def loss(model, tokens):
        model = mylib.fully_shard(model, eqx.nn.Linear, KEPT, mesh=mesh)
        return jnp.mean(model(tokens) ** 2)

    model = mylib.filter_shard(Exchanging(), KEPT, mesh=mesh)
    tokens = mylib.filter_shard(np.tile(TOKENS, (64, 1)), batch("data"), mesh=mesh)
    gradient = mylib.filter_jit(eqx.filter_grad(loss), out_shardings=KEPT, mesh=mesh)
    told = "gather: moved by all-to-all over data .*, and no activation expected"
    with pytest.raises(AssertionError, match=told):
        mylib.audit(gradient, model, tokens).expect(mylib.contracts.fsdp("data"))


def test_a_kernel_is_no_table():
    """Its gradient is summed where it is kept. By columns, it would be exchanged once more."""
    mesh = mesh_of(data=8)
    model = {
        "into": eqx.nn.Conv2d(8, 16, 2, key=KEYS[0]),
        "layer": eqx.nn.Linear(4, 4, key=KEYS[1]),
    }
    model = mylib.filter_shard(model, KEPT, mesh=mesh)
    images = mylib.filter_shard(np.ones((16, 8, 5, 5), np.float32), batch("data"), mesh=mesh)

    def loss(model, images):
        model = mylib.fully_shard(model, eqx.nn.Linear, KEPT, mesh=mesh)
        found = jax.vmap(model["into"])(images)
        return jnp.mean(jax.vmap(model["layer"])(found[:, 0, 0]) ** 2)

    gradient = mylib.filter_jit(eqx.filter_grad(loss), out_shardings=KEPT, mesh=mesh)
    assert mylib.audit(gradient, model, images).count("all-to-all") == 0


LARGE, WIDE, EXAMPLES = 16384, 1024, 512


@pytest.mark.compilers
@pytest.mark.compiles_for("h100 x 16", "v5e 4x4", "v5p 4x4x4")
@pytest.mark.everyday("h100 x 16", "v5e 4x4", rest="thorough")
def test_programs(machine):
    """For the gradient of the table, each device sends its examples' rows, and its own part."""
    mesh = machine.mesh(data=-1)
    count = mesh.size
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in [(LARGE, WIDE), (WIDE, WIDE)]]
    layer = eqx.nn.Linear(1, 1, use_bias=False, key=KEYS[0])
    layer = eqx.tree_at(lambda layer: layer.weight, layer, arrays[1])
    model = {"table": arrays[0], "layer": layer}
    model = mylib.filter_shard(model, fsdp("data"), mesh=mesh)
    tokens = jax.ShapeDtypeStruct((count * EXAMPLES,), jnp.int32)
    tokens = mylib.filter_shard(tokens, batch("data"), mesh=mesh)

    def loss(model, tokens):
        model = mylib.fully_shard(model, eqx.nn.Linear, fsdp("data"), mesh=mesh)
        return jnp.mean(jax.vmap(model["layer"])(model["table"][tokens]).astype(jnp.float32) ** 2)

    kept = jax.tree.map(lambda x: x.sharding, model)
    gradient = jax.jit(jax.grad(loss), out_shardings=kept).lower(model, tokens).compile()
    report = mylib.audit(gradient, mesh=mesh)
    whole = 2 * LARGE * WIDE
    of_examples = 2 * EXAMPLES * WIDE + 4 * count * EXAMPLES
    of_the_layer = 5 * 2 * WIDE**2
    assert report.wire_bytes() < whole + of_examples + whole / count + of_the_layer
