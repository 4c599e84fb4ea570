"""Annotations with names that are not defined, which Python 3.14 accepts unquoted."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from contexts import AUTO
from jax.sharding import PartitionSpec as P

import mylib

QUOTED = """
class Layer(eqx.Module):
    weight: Float[Array, "out in"]
    other: "Missing"


def double(x: "Missing") -> "Missing":
    return 2 * x
"""
SOURCES = [
    QUOTED,
    pytest.param(
        QUOTED.replace('"Missing"', "Missing"),
        marks=pytest.mark.skipif(sys.version_info < (3, 14), reason="needs Python 3.14"),
    ),
]


@pytest.fixture(params=SOURCES, ids=["quoted", "unquoted"])
def defined(request):
    scope = {"eqx": eqx, "Float": jaxtyping.Float, "Array": jax.Array, "__name__": __name__}
    exec(request.param, scope)
    return scope


def test_the_other_fields_keep_their_names(defined):
    layer = defined["Layer"](jnp.ones((8, 8)), 0)
    rule = mylib.rules.by_axes({"out": "model"})
    assert mylib.resolve(layer, rule, mesh=AUTO).weight.spec == P("model")


ALIASES = """
type Unknown = Missing


class Layer(eqx.Module):
    weight: Float[Array, "out in"]
    other: Unknown
    several: list[Unknown]
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax of aliases is new in 3.12")
def test_an_alias_of_an_undefined_name():
    scope = {"eqx": eqx, "Float": jaxtyping.Float, "Array": jax.Array, "__name__": __name__}
    exec(ALIASES, scope)
    x = jnp.ones((8, 8))
    layer = scope["Layer"](x, x, [x])
    placed = mylib.resolve(
        layer, mylib.rules.by_axes({"out": "model"}) | mylib.rules.replicated(), mesh=AUTO
    )
    assert placed.weight.spec == P("model")
    assert placed.other.spec == placed.several[0].spec == P()


@pytest.mark.parametrize(
    "made",
    [
        mylib.filter_jit,
        lambda f: mylib.filter_jit(f, in_shardings={"x": P("data")}, mesh=AUTO),
        lambda f: mylib.filter_shard_map(f, mesh=AUTO, in_specs=P("data"), out_specs=P("data")),
        mylib.filter_checkpoint,
        lambda f: mylib.opaque(f),
    ],
    ids=["jit", "placed", "shard_map", "checkpoint", "opaque"],
)
def test_functions_can_be_transformed(defined, made):
    np.testing.assert_array_equal(made(defined["double"])(jnp.ones(8)), 2 * np.ones(8))


def test_functions_can_be_audited(defined):
    assert mylib.audit(defined["double"], jnp.ones(8)).collectives == ()
