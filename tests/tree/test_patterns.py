"""Patterns of `by_path`: every kind of key, and what is suggested where nothing matches."""

import enum

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec as P

import mylib
from mylib.rules import by_path

MESH = AbstractMesh((4, 2), ("data", "model"))


class Color(enum.Enum):
    RED = 1


class Node:
    """A node that JAX is told no keys of."""

    def __init__(self, *children):
        self.children = children


jtu.register_pytree_node(Node, lambda node: (node.children, None), lambda _, xs: Node(*xs))


class Own:
    """A node with keys that are of no class of JAX's."""

    def __init__(self, *children):
        self.children = children


jtu.register_pytree_with_keys(
    Own,
    lambda own: ([(f"<{i}>", x) for i, x in enumerate(own.children)], None),
    lambda _, xs: Own(*xs),
)


@jtu.register_pytree_with_keys_class
class Variable:
    """As flax's: what a path leads to is the `.value` of it."""

    def __init__(self, value):
        self.value = value

    def tree_flatten_with_keys(self):
        return [(jtu.GetAttrKey("value"), self.value)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ODD_KEYS = [
    ("x", 1),
    b"k",
    frozenset({"a"}),
    (("a", 2), ("b", "]")),
    ("it's", 'a "word"'),
    2.5,
    -1,
    None,
    True,
    np.str_("name"),
    Color.RED,
    "a.b",
    "[0]",
    "it's",
    'a "word"',
    '"',
    "both ' and \"",
    "a\nb",
    "a\\b",
    "",
    "*",
]


TREES = [
    *([{key: array(8)}, {"w": array(8)}] for key in ODD_KEYS),
    *([{key: {"w": array(8)}}, {"w": array(8)}] for key in ODD_KEYS),
    *([{"a": {key: array(8)}}, {"a": {"w": array(8)}}] for key in ODD_KEYS),
    Node(array(8), [array(8), Node(None, None, array(8))]),
    Own(array(8), [array(8), Own(None, None, array(8))]),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(jtu.tree_structure(tree))[:60])
def test_a_path_matches_as_it_stands(tree):
    names = [jtu.keystr(path) for path, _ in jtu.tree_leaves_with_path(tree)]
    for chosen in names:
        rule = by_path({chosen: P("data"), "**": P()}, ordered=True)
        found = mylib.resolve(tree, rule, mesh=MESH)
        specs = {jtu.keystr(path): t.spec for path, t in jtu.tree_leaves_with_path(found)}
        assert specs == {name: P("data") if name == chosen else P() for name in names}


def test_odd_keys_stand_beside_stars():
    tree = {"layers": [{("x", 1): array(8), ("x", 2): array(8)} for _ in range(2)]}
    rule = by_path({"layers.*[('x', 1)]": P("data"), "[('x', *)]": P()}, ordered=True)
    found = mylib.resolve(tree, rule, mesh=MESH)["layers"]
    assert [t.spec for layer in found for t in layer.values()] == [P("data"), P()] * 2


def suggestions(tree, patterns):
    with pytest.raises(mylib.PlacementError) as caught:
        mylib.resolve(tree, by_path({**patterns, "**": P()}, ordered=True), mesh=MESH)
    return {
        fault.request.removeprefix("by_path: "): fault.fix
        for fault in caught.value.faults
        if "matches none" in fault.reason
    }


FLAT = {
    f"h.{i}.attn.{name}.weight": array(8, 8) for i in range(12) for name in ("c_attn", "c_proj")
}
VARIABLES = {
    "blocks": {i: {"kernel": Variable(array(8)), "bias": Variable(array(8))} for i in range(2)},
    "linear": {"kernel": Variable(array(8)), "bias": Variable(array(8))},
}


@pytest.mark.parametrize(
    ("tree", "written", "suggested"),
    [
        ({"a.b": {"w": array(8)}}, "a.b.w", "['a.b'].w"),
        (FLAT, "h.0.attn.c_attn.weight", "['h.*.attn.c_attn.weight']"),
        (FLAT, "attn.c_proj.weight", "['h.*.attn.c_proj.weight']"),
        (VARIABLES, "kernel", "kernel.value"),
        (VARIABLES, "bias", "bias.value"),
        (VARIABLES, "linear.kernel", "linear.kernel.value"),
        (VARIABLES, "blocks.*.bais", "blocks.*.bias.value"),
        ({("x", 1): array(8)}, "[('x', 2)]", "[\"('x', 1)\"]"),
        ([{"w": array(8)}, {"b": array(8)}], "0.wt", "*.w"),
    ],
)
def test_what_is_suggested_matches(tree, written, suggested):
    fix = suggestions(tree, {written: P()})[repr(written)]
    assert fix == f"did you mean {suggested!r}?"
    mylib.resolve(tree, by_path({suggested: P("data"), "**": P()}, ordered=True), mesh=MESH)


def test_two_patterns_are_not_sent_to_the_same_place():
    found = suggestions(VARIABLES, {"kernel": P("data"), "bias": P()})
    assert found == {
        "'kernel'": "did you mean 'kernel.value'?",
        "'bias'": "did you mean 'bias.value'?",
    }


def test_ends_are_long_enough_to_be_told_apart():
    fix = suggestions(VARIABLES, {"xyz": P()})["'xyz'"]
    assert fix == "paths end like these: 'bias.value', 'kernel.value'"
