"""Wrong uses whose errors say what to write instead."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mylib
from mylib import contracts, testing

MESH = mylib.make_mesh(data=8)
KEPT = mylib.rules.fsdp("data")
MODEL = eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0))
X = np.ones((16, 16), np.float32)
PART = mylib.make_mesh(data=4, devices=jax.devices()[:4])
ROWS = X.tolist()
SWAPPED = "swap them: the tree comes first, and the placement second"


def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


WRONG = {
    "to_global": (lambda: mylib.data.to_global(P("data"), X, mesh=MESH), SWAPPED),
    "prefetch": (lambda: next(iter(mylib.data.prefetch(P("data"), [X], mesh=MESH))), SWAPPED),
    "assert_placed": (lambda: testing.assert_placed(KEPT, MODEL, mesh=MESH), SWAPPED),
    "expect": (
        lambda: mylib.audit(mylib.filter_jit(loss), MODEL, X).expect(contracts.fsdp),
        r"call the contract: contracts.fsdp\(...\), not contracts.fsdp",
    ),
    "audit": (lambda: mylib.audit(loss(MODEL, X)), "Give the function and its arguments"),
    "verify": (
        lambda: testing.verify(MODEL, loss, X),
        r"verify takes the function first: verify\(step, model, batch\)",
    ),
    "verify a map": (
        lambda: testing.verify(
            mylib.filter_jit(
                mylib.filter_shard_map(
                    lambda x: 2 * x, mesh=MESH, in_specs=P("data"), out_specs=P("data")
                )
            ),
            X,
        ),
        r"verify: give the function for one device, verify\(step, ..., reference=\)",
    ),
    "accumulate": (
        lambda: mylib.accumulate(MODEL, loss, X, KEPT, pieces=2, mesh=MESH),
        r"accumulate takes the loss first: accumulate\(loss, model, batch, kept\)",
    ),
    "another mesh": (
        lambda: under_another_mesh(mylib.filter_jit(loss)),
        r"^model.layers\[0\].weight, .*: on mesh \('data': 4\), and loss is called under "
        r"jax.set_mesh of mesh \('data': 8\): call it outside of jax.set_mesh, or place all",
    ),
    "another mesh, one operation": (
        lambda: under_another_mesh(mylib.filter_jit(lambda model, x: model.layers[0].weight @ x)),
        r"^model.layers\[0\].weight, .*: on mesh .* call it outside of jax.set_mesh",
    ),
    "lists": (
        lambda: mylib.filter_jit(loss)(MODEL, ROWS),
        r"^x: a list of lists of numbers, which are static; pass an array, np.asarray\(x\)",
    ),
    "lists in a batch": (
        lambda: mylib.filter_jit(lambda batch: loss(MODEL, batch["x"]))({"x": [ROWS, ROWS]}),
        r"^batch\['x'\]: a list of lists .* np.asarray\(batch\['x'\]\)",
    ),
}


def under_another_mesh(f):
    model = mylib.filter_shard(MODEL, KEPT, mesh=PART)
    with jax.set_mesh(MESH):
        return f(model, X)


@pytest.mark.parametrize("use", WRONG)
def test_says_what_to_write(use):
    wrong, words = WRONG[use]
    with pytest.raises((TypeError, ValueError), match=words):
        wrong()


def test_a_mesh_of_more_devices_is_set_aside():
    x = mylib.filter_shard(jnp.ones((8, 8)), P("data"), mesh=PART)
    with jax.set_mesh(MESH):
        made = mylib.mpmd.jit(lambda x: 2 * x, mesh=PART, out_shardings=P("data"))(x)
    assert made.sharding.mesh == PART and made.sum() == 128
