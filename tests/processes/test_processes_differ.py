"""Processes with different trees, rules or static values: all raise, and say which differs."""

import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreeing import fails
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mylib
from mylib.testing import assert_placed, barrier

pytestmark = pytest.mark.multihost(processes=2, devices_per_process=4)


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def _fails(*args, **kwargs) -> str:
    """The words of an error that is the same in all processes, and is raised at once."""
    start = time.monotonic()
    text = fails(*args, **kwargs)
    assert time.monotonic() - start < 60
    return text


def _place(x, mesh: Mesh, spec: P):
    """Without the comparison that is tested here."""
    return mylib.filter_shard(x, spec, mesh=mesh, check=False)


# --- check_replicas ------------------------------------------------------------------------------

ODD_TREES = [
    pytest.param({"w": ((8, 3), np.float32, P())}, "float32[8, 3]", id="shape"),
    pytest.param({"w": ((8, 2), np.int32, P())}, "int32[8, 2]", id="dtype"),
    pytest.param({"w": ((8, 2), np.float32, P("model"))}, "'model')", id="spec"),
    pytest.param({"v": ((8, 2), np.float32, P())}, "no array of that name", id="name"),
    pytest.param({}, "no array of that name", id="no array"),
]


@pytest.mark.parametrize("odd, told", ODD_TREES)
def test_copies_of_trees_that_differ(mesh, odd, told):
    usual = {"w": ((8, 2), np.float32, P())}
    wanted = odd if jax.process_index() == 1 else usual
    tree = {name: _place(np.ones(s, d), mesh, spec) for name, (s, d, spec) in wanted.items()}
    tree["fine"] = [_place(np.ones(4, np.float32), mesh, P()) for _ in range(3)]
    text = _fails(mylib.errors.ReplicaError, mylib.check_replicas, tree)
    assert "['w'] (8, 2)" in text and told in text and "['fine']" not in text
    assert "not the same array in all processes" in text
    mylib.check_replicas(tree["fine"])


def test_an_array_that_one_process_has_for_itself(mesh):
    own = Mesh(np.array(jax.local_devices()), ("d",))
    where = mesh if jax.process_index() == 0 else own
    tree = {"w": _place(np.ones(4), where, P()), "fine": _place(np.ones(4), mesh, P())}
    text = _fails(mylib.errors.ReplicaError, mylib.check_replicas, tree)
    assert "['w'] (4,)" in text and "['fine']" not in text


def test_copies_of_offloaded_and_large_arrays(mesh):
    there = NamedSharding(mesh, P(), memory_kind="pinned_host")
    me = jax.process_index()
    tree = {
        "count": mylib.filter_device_put(np.float32(me), there, check=False),
        "large": _place(np.full((300, 300), me, np.float32), mesh, P("data")),
        "across": _place(np.full((4, 2), me, np.float32), mesh, P(None, "model")),
    }
    # The rows of "large" are copied within each process only.
    text = _fails(mylib.errors.ReplicaError, mylib.check_replicas, tree)
    assert "['count'] ()" in text and "['across'] (4, 2)" in text and "['large']" not in text
    assert "process 0 on devices 0, 1, 2, 3; process 1 on devices" in text


def test_copies_within_a_process_that_differ(mesh):
    """On the last device of process 1, of one array; and on the first ones of both, of another."""
    devices = list(mesh.devices.flat)
    tree = {}
    for name, odd in {"one": {7}, "both": {0, 4}, "fine": set()}.items():
        mine = [
            jax.device_put(np.full(4, float(i in odd), np.float32), device)
            for i, device in enumerate(devices)
            if device.process_index == jax.process_index()
        ]
        where = NamedSharding(mesh, P())
        tree[name] = jax.make_array_from_single_device_arrays((4,), where, mine)
    text = _fails(mylib.errors.ReplicaError, mylib.check_replicas, tree)
    assert (
        text.startswith("copies differ in 2 leaves; the first: ['both'] (4,): ")
        and "['one']" in text
        and "['fine']" not in text
    )
    last = devices[7].id
    assert f"process 1 on devices 2048, 2049, 2050; process 1 on device {last}" in text
    assert (
        "process 0 on device 0 and process 1 on device 2048; process 0 on devices 1, 2, 3" in text
    )


def test_many_arrays_that_all_differ(mesh):
    mine = np.full(4, jax.process_index(), np.float32)
    where = NamedSharding(mesh, P())
    tree = [jax.make_array_from_process_local_data(where, mine, (4,)) for _ in range(2000)]
    text = _fails(mylib.errors.ReplicaError, mylib.check_replicas, tree)
    assert text.startswith("copies differ in 2000 leaves")


# --- from one process's devices to another's -----------------------------------------------------


@pytest.mark.parametrize("check", [None, False])
@pytest.mark.parametrize("verb", [mylib.filter_shard, mylib.filter_device_put])
def test_from_devices_of_one_process_to_those_of_another(verb, check):
    zero, one = (
        Mesh(np.array([d for d in jax.devices() if d.process_index == i]), ("d",)) for i in (0, 1)
    )
    x = mylib.filter_shard({"w": np.ones(8, np.float32)}, P("d"), mesh=zero)
    y = verb(x, P("d"), mesh=one, check=check)["w"]
    assert y.sharding == NamedSharding(one, P("d"))
    np.testing.assert_array_equal(mylib.mpmd.fetch(y), np.ones(8))
    # Values of each process's own go there as before.
    y = verb({"w": np.ones(8, np.float32)}, P("d"), mesh=one)["w"]
    assert len(y.addressable_shards) == 4 * jax.process_index()


# --- rules, and who found what -------------------------------------------------------------------


@pytest.mark.parametrize("verb", [mylib.filter_shard, mylib.filter_device_put])
def test_a_rule_that_raises_in_one_process(mesh, verb):
    def rule(leaf):
        if jax.process_index() == 1 and leaf.name == "['b']":
            raise KeyError("no plan for b")
        return P()

    tree, start = {"a": np.ones(4), "b": np.ones(4)}, time.monotonic()
    if jax.process_index() == 1:
        with pytest.raises(KeyError, match="no plan for b") as caught:
            verb(tree, rule, mesh=mesh)
        assert "['b']" in caught.value.__notes__[0]
    else:
        with pytest.raises(mylib.PlacementError) as told:
            verb(tree, rule, mesh=mesh)
        text = str(told.value)
        assert "(in process 1)" in text and "KeyError: 'no plan for b'" in text
        assert "for the leaf ['b']" in text
    assert time.monotonic() - start < 60
    assert_placed(verb(tree, P(), mesh=mesh), P(), mesh=mesh)


def test_a_rule_that_raises_in_one_process_for_an_argument(mesh):
    def rule(leaf):
        if jax.process_index() == 0:
            raise ZeroDivisionError
        return P()

    f = mylib.filter_jit(lambda x: x + 1, in_shardings={"x": rule}, mesh=mesh)
    if jax.process_index() == 0:
        with pytest.raises(ZeroDivisionError):
            f(np.ones(4))
    else:
        with pytest.raises(mylib.PlacementError, match="ZeroDivisionError") as told:
            f(np.ones(4))
        assert "(in process 0)" in str(told.value)


def test_a_fault_of_an_argument_in_one_process(mesh):
    f = mylib.filter_jit(lambda x: x + 1, in_shardings={"x": P("data")}, mesh=mesh)
    text = _fails(mylib.PlacementError, f, np.ones(8 - jax.process_index(), np.float32))
    assert "x (7,)" in text and "(in process 1)" in text


def test_who_found_a_fault(mesh):
    spec = P("dta" if jax.process_index() == 1 else "data")
    text = _fails(mylib.PlacementError, mylib.filter_shard, {"w": np.ones(8)}, spec, mesh=mesh)
    assert "asked for: P('dta') over mesh ('data': 4, 'model': 2) (in process 1)" in text
    # What all have found is nobody's.
    text = _fails(mylib.PlacementError, mylib.filter_shard, {"w": np.ones(8)}, P("dta"), mesh=mesh)
    assert "(in process" not in text


# --- static values -------------------------------------------------------------------------------


class Field(eqx.Module):
    w: Any
    k: Any = eqx.field(static=True)


class Leaf(eqx.Module):
    w: Any
    k: Any


STATICS = [
    pytest.param((2, 3), "process 0: 2; process 1: 3", id="int"),
    pytest.param((2, 2.0), "process 0: 2; process 1: 2.0", id="int and float"),
    pytest.param((1, True), "process 0: 1; process 1: True", id="int and bool"),
    pytest.param(("a", "b"), "process 0: 'a'; process 1: 'b'", id="str"),
    pytest.param(("a" * 300 + "b", "a" * 300 + "c"), "… (checksum ", id="long str"),
    pytest.param((np.sin, 2), "process 0: a numpy.ufunc; process 1: 2", id="types"),
]


@pytest.mark.parametrize("values, told", STATICS)
@pytest.mark.parametrize("kind", [Field, Leaf])
def test_static_values_that_differ(mesh, kind, values, told):
    model = kind(np.ones(4, np.float32), values[jax.process_index()])
    tree = {"models": [model]}
    text = _fails(mylib.PlacementError, mylib.filter_shard, tree, P(), mesh=mesh)
    assert "['models'][0].k" in text and told in text and ".w" not in text
    assert "check=False" in text
    placed = mylib.filter_shard(tree, P(), mesh=mesh, check=False)["models"][0]
    assert placed.k is values[jax.process_index()]
    f = mylib.filter_jit(lambda m, x: x, in_shardings={"x": P()}, mesh=mesh)
    text = _fails(mylib.PlacementError, f, placed, np.ones(3, np.float32))
    assert "m.k" in text and told in text
    # Nothing is to be moved, and so nothing is compared but on request.
    mylib.filter_shard(placed, P(), mesh=mesh)
    text = _fails(mylib.PlacementError, mylib.filter_shard, placed, P(), mesh=mesh, check=True)
    assert ".k" in text and told in text


@pytest.mark.parametrize("kind", [Field, Leaf])
def test_what_can_only_be_compared_by_type(mesh, kind):
    """Functions, and objects whose text holds an address."""
    model = kind(np.ones(4, np.float32), (object(), lambda x: x + jax.process_index()))
    model = eqx.tree_at(lambda m: m.w, model, np.zeros(4, np.float32))
    mylib.filter_shard(model, P(), mesh=mesh)


def test_structures_that_differ(mesh):
    w = np.ones(4, np.float32)
    first = jax.process_index() == 0
    text = _fails(mylib.PlacementError, mylib.filter_shard, [w] if first else (w,), P(), mesh=mesh)
    assert "process 0: list" in text and "process 1: tuple" in text
    tree = {"w": w, "more": {} if first else {"a": {}}}
    text = _fails(mylib.PlacementError, mylib.filter_shard, tree, P(), mesh=mesh)
    assert "['more']" in text and "['w']" not in text
    tree = {"w": w, "x": w if first else 3}
    text = _fails(mylib.PlacementError, mylib.filter_shard, tree, P(), mesh=mesh)
    assert "['x']" in text and "process 1: 3" in text and "['w']" not in text


@jax.tree_util.register_pytree_node_class
class Keeper:
    """Keeps a number where only its own `tree_unflatten` finds it."""

    def __init__(self, w, number):
        self.w, self.number = w, number

    def tree_flatten(self):
        return (self.w,), (self.number,)

    @classmethod
    def tree_unflatten(cls, held, children):
        return cls(*children, *held)


def test_what_nodes_of_other_kinds_hold(mesh):
    tree = {"x": Keeper(np.ones(4, np.float32), jax.process_index())}
    text = _fails(mylib.PlacementError, mylib.filter_shard, tree, P(), mesh=mesh)
    assert "['x']" in text and "process 0: Keeper (0)" in text and "process 1: Keeper (1)" in text


# --- processes that come late --------------------------------------------------------------------


def test_who_comes_late_does_not_wait_again(mesh, monkeypatch):
    monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", "1")
    w = jnp.ones(8)
    if jax.process_index() == 0:
        with pytest.raises(TimeoutError, match="process 1 did not come within 1 s"):
            mylib.filter_shard(w, P(), mesh=mesh)
    barrier()
    monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", "300")
    if jax.process_index() == 1:
        start = time.monotonic()
        with pytest.raises(TimeoutError, match="process 0 had waited for it, and given up"):
            mylib.filter_shard(w, P(), mesh=mesh)
        assert time.monotonic() - start < 30
    # And then they go on together. Process 0 may have tried again before: the call that has failed
    # there fails in the other one, too, however late.
    for _ in range(2):
        assert_placed(mylib.filter_shard(w, P(), mesh=mesh), P(), mesh=mesh)
