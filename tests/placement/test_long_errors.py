"""Errors about many leaves: short enough to be read, and with all faults in `.faults`."""

import pickle

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import mylib
from mylib.rules import by_path
from mylib.testing import assert_placed

MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def caught(tree, placement, mesh=MESH):
    with pytest.raises(mylib.PlacementError) as error:
        mylib.filter_shard(tree, placement, mesh=mesh)
    assert len(str(error.value).splitlines()) <= 41
    return error.value


def layer():
    return {"weight": np.zeros((4, 8)), "bias": np.zeros(5)}


def test_few_leaves_are_all_named():
    error = caught([np.zeros(7) for _ in range(30)], P("data"))
    assert all(f"  [{i}] (7,)\n" in f"{error}\n" for i in range(30))


def test_layers_of_a_model_become_one():
    error = caught({"layers": [layer() for _ in range(300)]}, P("dta"))
    assert len(error.faults) == 600
    assert {fault.path for fault in error.faults} == {
        f"['layers'][{i}]['{name}']" for i in range(300) for name in ("bias", "weight")
    }
    assert str(error).splitlines() == [
        "can't place 600 leaves: mesh ('data': 8) has no axis 'dta'",
        "    asked for: P('dta') over mesh ('data': 8)",
        "    instead: did you mean 'data'?",
        "  ['layers'][0..299]['bias'] (5,)",
        "  ['layers'][0..299]['weight'] (4, 8)",
        "all of them are in `.faults`",
    ]
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_several_indices_and_gaps():
    tree = [[np.zeros(7) for _ in range(10)] for _ in range(6)]
    assert "\n  [0..5][0..9] (7,)\n" in str(caught(tree, P("data")))
    tree[2][3] = np.zeros(8)
    assert "\n  [*][*] (7,), 59 leaves\n" in str(caught(tree, P("data")))
    tree = {"a": [np.zeros(7)], "b": [[np.zeros(7)] * 3, [np.zeros(7) for _ in range(50)]]}
    text = str(caught(tree, P("data")))
    assert "\n  ['a'][0] (7,)\n" in text and "\n  ['b'][*][*] (7,), 53 leaves\n" in text


def test_names_without_indices():
    error = caught({f"layer_{i}": np.zeros(7) for i in range(300)}, P("data"))
    lines = str(error).splitlines()
    assert lines[0].startswith("can't place 300 leaves: dimension 0 of size 7 does not divide")
    assert lines[3:5] == ["  ['layer_0'] (7,)", "  ['layer_1'] (7,)"]
    (more,) = [line for line in lines if line.startswith("  and ")]
    assert len([line for line in lines if "layer_" in line]) + int(more.split()[1]) == 300
    assert lines[-1] == "all of them are in `.faults`"


def test_each_with_its_own_fault():
    error = caught([np.zeros(8 * i + 1) for i in range(300)], P("data"))
    lines = str(error).splitlines()
    assert lines[:3] == [
        "can't place 300 leaves; the first: [0] (1,): dimension 0 of size 1 does not divide into "
        "the 8 parts of 'data'",
        "  [0] (1,)",
        lines[2],
    ]
    assert lines[-2:] == ["and 293 more faults, of 293 leaves", "all of them are in `.faults`"]
    assert len(error.faults) == 300


def test_faults_of_no_leaf():
    error = caught(np.zeros(8), by_path({f"layer_{i}": P() for i in range(100)} | {"**": P()}))
    assert str(error).startswith("can't place the tree:\n")
    assert "and 93 more faults\n" in str(error)
    assert len(error.faults) == 100


def test_a_fault_of_the_tree_is_none_of_the_leaf_above_it():
    tree = {"a": np.zeros(7), "b": np.zeros(6)}
    text = str(caught(tree, by_path({"nothing": P()}) | (lambda leaf: P("data"))))
    at = text.splitlines().index("  the whole tree")
    assert "nothing" in "".join(text.splitlines()[at + 1 : at + 4])


def test_explain_is_no_longer():
    explanation = mylib.explain([np.zeros(8 * i + 1) for i in range(99)], P("data"), MESH)
    assert len(explanation.faults) == 99
    assert "and 92 more faults, of 92 leaves" in str(explanation)


def test_assert_placed():
    tree = mylib.filter_shard([np.zeros(8) for _ in range(300)], P(), mesh=MESH)
    first = "300 leaves not where expected; the first: [0] (8,) is at: "
    with pytest.raises(AssertionError) as error:
        assert_placed(tree, P("data"), mesh=MESH)
    assert str(error.value).startswith(first)
    assert str(error.value).splitlines()[1] == "  [0..299] (8,)"
    assert len(str(error.value).splitlines()) == 5
