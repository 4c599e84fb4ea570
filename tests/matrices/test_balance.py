"""`explain` says how evenly matrices are given out."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
from optimisers import muon

import mylib


def llama(width, hidden, keys, layers):
    """The matrices of the layers, each kind of them stacked."""
    shapes = {name: (width, width) for name in ("query", "output")}
    shapes |= {name: (keys, width) for name in ("key", "value")}
    shapes |= {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}
    return {k: jax.ShapeDtypeStruct((layers, *x), jnp.float32) for k, x in shapes.items()}


def said_of(params, sizes, kept, **options):
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))
    optim = optax.chain(
        mylib.by_matrix(muon(), kept, mesh=mesh, matrices=lambda leaf: (0, 1, 2), **options),
        optax.scale(-1.0),
    )
    (note,) = mylib.explain(eqx.filter_eval_shape(optim.init, params)).notes
    return note


@pytest.mark.parametrize(
    ("shape", "devices", "balance"),
    [
        pytest.param((4096, 11008, 4096, 32), 64, "1.20", id="7B-64"),
        pytest.param((4096, 11008, 4096, 32), 256, "1.64", id="7B-256"),
        pytest.param((8192, 28672, 1024, 80), 64, "1.09", id="70B-64"),
        pytest.param((8192, 28672, 1024, 80), 256, "1.17", id="70B-256"),
    ],
)
def test_llama_2(shape, devices, balance):
    """Each shape goes on where the last one has ended."""
    text = said_of(llama(*shape), {"data": devices}, P(None, "data"))
    assert f"computes {balance} times the mean" in text
    assert ("32 of them own no matrix" in text) == (balance == "1.64")


def test_devices_without_a_matrix():
    stack = {"w": jax.ShapeDtypeStruct((8, 64, 64), jnp.float32)}
    text = said_of(stack, {"copies": 8, "data": 8}, P(None, "data"), over=("copies", "data"))
    assert text.endswith("computes 8.00 times the mean, and 56 of them own no matrix")


def test_it_is_a_line_below_the_table():
    params = llama(64, 128, 64, 2)
    mesh = mylib.make_mesh(data=8)
    kept = P(None, "data")
    optim = mylib.by_matrix(muon(), kept, mesh=mesh, matrices=lambda leaf: (0, 1, 2))
    explanation = mylib.explain(eqx.filter_eval_shape(optim.init, params))
    (note,) = explanation.notes
    assert note in str(explanation) and note in explanation._repr_html_()
    assert note.startswith("by_matrix: 14 matrices on 8 devices; ")
    assert mylib.explain(params, kept, mesh).notes == ()


def test_work_that_is_unknown():
    def update(updates, state, params=None):
        shape = jax.ShapeDtypeStruct
        call = lambda x: jax.pure_callback(lambda x: x, shape(x.shape, x.dtype), x)  # noqa: E731
        return jax.tree.map(call, updates), state

    optim = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    mesh = mylib.make_mesh(data=8)
    made = mylib.by_matrix(optim, P("data"), mesh=mesh)
    state = eqx.filter_eval_shape(made.init, [jax.ShapeDtypeStruct((64, 64), jnp.float32)])
    (note,) = mylib.explain(state).notes
    assert note.endswith("what an update computes is unknown, so its balance is, too")
