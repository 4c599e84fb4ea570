"""What JAX and XLA don't return as constrained comes back where `out_shardings` says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mylib


def test_a_dimension_over_axes_of_both_types():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
    spec = P(("data", "model"))
    with jax.set_mesh(mesh):
        step = mylib.filter_jit(lambda x: {"sum": x + 1, "text": "t"}, out_shardings=spec)
        x = mylib.filter_shard(jnp.arange(16.0).reshape(8, 2), spec)
        made = step(step(x)["sum"])
    assert made["sum"].sharding.spec[0] == ("data", "model") and made["text"] == "t"
    np.testing.assert_array_equal(made["sum"], x + 2)


@pytest.mark.parametrize(
    ("types", "spec"),
    [
        ("EEA", P(("b", "c"), "a")),
        ("EAE", P(("a", "b"), "c")),
        ("AEE", P(("c", "a"), "b")),
        ("EAE", P(("a", "c", "b"))),
    ],
)
def test_beside_a_dimension_over_explicit_axes(types, spec):
    kinds = {"E": AxisType.Explicit, "A": AxisType.Auto}
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=tuple(kinds[x] for x in types))
    step = mylib.filter_jit(lambda x: x + 1, out_shardings=spec, mesh=mesh)
    x = np.arange(64.0).reshape(8, 8)
    made = step(x)
    assert made.sharding == NamedSharding(mesh, spec)
    np.testing.assert_array_equal(made, x + 1)
    value, slope = jax.jvp(step, (jnp.asarray(x),), (jnp.ones((8, 8)),))
    np.testing.assert_array_equal(value, x + 1)
    np.testing.assert_array_equal(slope, np.ones((8, 8)))
