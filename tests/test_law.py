"""The law of placement, on random trees, meshes and placements."""

import _generate as generate
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import mylib
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding


def examples(percent):
    return settings(max_examples=max(1, settings().max_examples * percent // 100))


def bits(x):
    """The values of an array as JAX will hold it, bit by bit."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).astype(jax.dtypes.canonicalize_dtype(x.dtype)).tobytes()


def memory(x):
    """The memory that an array is in, part by part."""
    if not isinstance(x, jax.Array):
        return [x]
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return [np.asarray(shard.data) for shard in x.addressable_shards]


def assert_same_value(y, x):
    assert isinstance(y, jax.Array)
    assert y.shape == x.shape
    assert y.dtype == jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    assert y.weak_type == getattr(x, "weak_type", False)
    assert bits(y) == bits(x)


def assert_is_at(y, target):
    assert y.sharding.is_equivalent_to(target, y.ndim)
    assert isinstance(y.sharding, NamedSharding) == isinstance(target, NamedSharding)
    if isinstance(target, NamedSharding):
        assert y.sharding.mesh == target.mesh


def by_leaf(case, out):
    assert jtu.tree_structure(out) == jtu.tree_structure(case.tree)
    return zip(jtu.tree_leaves(case.tree), jtu.tree_leaves(out), case.targets, strict=True)


@pytest.mark.parametrize("verb", [mylib.filter_shard, mylib.filter_device_put])
@examples(200)
@given(case=generate.cases())
def test_same_tree_where_it_was_asked_to_be(verb, case):
    out = verb(case.tree, case.placement, mesh=case.mesh)
    for x, y, target in by_leaf(case, out):
        if target is None:
            assert y is x
        else:
            assert_same_value(y, x)
            assert y.committed
            assert_is_at(y, target)


@examples(100)
@given(generate.cases())
def test_what_is_there_stays(case):
    out = mylib.filter_shard(case.tree, case.placement, mesh=case.mesh)
    again = mylib.filter_shard(out, case.placement, mesh=case.mesh)
    for x, y, _ in by_leaf(case, again):
        pass
    for x, y in zip(jtu.tree_leaves(out), jtu.tree_leaves(again), strict=True):
        assert y is x


@examples(100)
@given(generate.cases())
def test_nothing_shares_memory(case):
    out = mylib.filter_shard(case.tree, case.placement, mesh=case.mesh)
    given = [x for x in jtu.tree_leaves(case.tree) if generate.is_placed(x)]
    moved = [y for x, y, _ in by_leaf(case, out) if y is not x]
    # The same array, placed twice, is two arrays: each may be donated.
    others = [part for x in given for part in memory(x)]
    for y in moved:
        parts = memory(y)
        assert not any(np.shares_memory(a, b) for a in parts for b in others)
        others += parts


