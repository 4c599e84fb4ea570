"""Which dimensions of a program must be split alike."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mylib._core.dims import Dims, pairs_of_reshape, program_of

KEY = jax.random.key(0)


class TestDims:
    @pytest.mark.parametrize(
        ("before", "after", "joined"),
        [
            ((8, 6), (8, 2, 3), [(0, 0), (1, 1)]),
            ((8, 2, 3), (8, 6), [(0, 0), (1, 1)]),
            ((6, 4), (24,), [(0, 0)]),
            ((1, 8), (8,), [(1, 0)]),
            ((4, 6), (6, 4), [(0, 0)]),
            ((16, 0, 4), (16, 0), []),
        ],
    )
    def test_reshapes(self, before, after, joined):
        assert list(pairs_of_reshape(before, after)) == joined

    def test_parts_are_what_both_can_be_divided_into(self):
        dims = Dims()
        (a, b, c) = dims.new((12, 8, 1))
        dims.join(a, b)
        dims.join(a, c)
        assert dims.parts(b) == 4 and dims.group(c) != dims.group(a)

    def test_ones_are_joined_with_ones(self):
        dims = Dims()
        (a, b, c) = dims.new((1, 1, 8))
        dims.join_all((a, a), (b, c))
        assert dims.group(a) == dims.group(b) != dims.group(c)


class TestLayers:
    """Equinox's: all is known, and the batch stays apart from the weights."""

    CASES = {
        "linear": (lambda: eqx.nn.Linear(8, 16, key=KEY), (8,)),
        "conv": (lambda: eqx.nn.Conv2d(8, 16, 3, groups=4, key=KEY), (8, 16, 16)),
        "transposed": (lambda: eqx.nn.ConvTranspose2d(8, 16, 3, key=KEY), (8, 16, 16)),
        "norm": (lambda: eqx.nn.RMSNorm(8), (8,)),
        "groups": (lambda: eqx.nn.GroupNorm(2, 8), (8, 16)),
        "max": (lambda: eqx.nn.MaxPool2d(2, 2), (8, 16, 16)),
        "average": (lambda: eqx.nn.AvgPool2d(2, 2), (8, 16, 16)),
        "adaptive": (lambda: eqx.nn.AdaptiveAvgPool2d(4), (8, 16, 16)),
        "weights": (lambda: eqx.nn.WeightNorm(eqx.nn.Linear(8, 16, key=KEY)), (8,)),
        "prelu": (lambda: eqx.nn.PReLU(), (8,)),
    }

    REST = [name for name in CASES if name != "conv"]

    @pytest.mark.parametrize(
        "name", ["conv", *(pytest.param(x, marks=pytest.mark.slow) for x in REST)]
    )
    def test_is_known(self, name):
        make, shape = self.CASES[name]
        self._check(make(), lambda layer, x: layer(x), shape)

    def test_attention(self):
        layer = eqx.nn.MultiheadAttention(4, 16, key=KEY)
        program = self._check(layer, lambda layer, x: layer(x, x, x), (10, 16))
        assert program.dims.parts(program.inputs[0][0]) == 4

    def test_recurrent(self):
        def run(cell, xs):
            return jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(16), xs)[0]

        program = self._check(eqx.nn.GRUCell(8, 16, key=KEY), run, (10, 8))
        group = program.dims.group
        cut = {group(node) for event in program.whole for node in event.over}
        assert group(program.inputs[0][0]) in cut  # the gates

    def test_embedding(self):
        layer = eqx.nn.Embedding(32, 8, key=KEY)
        self._check(layer, jax.vmap, (10,), np.int32, called=lambda layer, x: jax.vmap(layer)(x))

    def _check(self, layer, run, shape, dtype=np.float32, called=None):
        run = called or run
        arrays, rest = eqx.partition(layer, eqx.is_inexact_array)

        def loss(arrays, x):
            return jnp.mean(jax.vmap(lambda x: run(eqx.combine(arrays, rest), x))(x))

        x = jax.ShapeDtypeStruct((4, *shape), dtype)
        program = program_of(jax.make_jaxpr(jax.value_and_grad(loss))(arrays, x))
        assert not program.unknown
        *weights, rows = program.inputs
        group = program.dims.group
        assert all(group(node) != group(rows[0]) for nodes in weights for node in nodes)
        return program


@pytest.mark.parametrize(
    ("fun", "kept", "cut"),
    [
        (lambda x: jnp.stack([x, x], axis=1), {0: 0, 1: 2}, set()),
        (lambda x: jnp.unstack(x, axis=1)[0], {0: 0}, {1}),
        (lambda x: jnp.flip(x, 0), {1: 1}, {0}),
        (lambda x: jnp.sort(x, 1), {0: 0}, {1}),
        (lambda x: jax.lax.cumsum(x, 0), {1: 1}, {0}),
        (lambda x: jax.lax.top_k(x, 2)[1], {0: 0}, {1}),
        (lambda x: x[:, None].squeeze(1), {0: 0, 1: 1}, set()),
        (lambda x: jnp.tile(x, (1, 2)), {0: 0}, {1}),
    ],
)
def test_operations_along_some_dimensions(fun, kept, cut):
    """Those of the argument that are the result's, too, and those that are needed whole."""
    program = program_of(jax.make_jaxpr(fun)(np.zeros((4, 6))))
    x, out = (program.dims.groups(x) for x in (program.inputs[0], program.results[0]))
    assert {(i, j) for i, a in enumerate(x) for j, b in enumerate(out) if a == b} == {*kept.items()}
    whole = {program.dims.group(node) for event in program.whole for node in event.over}
    assert {i for i, a in enumerate(x) if a in whole} == cut


def test_loops_that_depend_on_data_are_told():
    def loop(x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 3, lambda x: x + 1, x)

    (line,) = program_of(jax.make_jaxpr(loop)(jnp.ones(8))).counted_once
    assert "test_dims.py" in line


def test_scans_and_conditions():
    def f(x, y):
        z, ys = jax.lax.scan(lambda c, y: (c + y, c * 2), x, y)
        return jax.lax.cond(z[0] > 0, jnp.sin, jnp.cos, z), ys

    program = program_of(jax.make_jaxpr(f)(jnp.ones(8), jnp.ones((3, 8))))
    group = program.dims.group
    (x,), (time, y) = program.inputs
    (out,), (_, ys) = program.results
    assert group(x) == group(y) == group(out) == group(ys) != group(time)
    assert program.loops == {time}


def test_diagonals():
    """JAX writes them with a condition on the platform. A contrastive loss has one."""
    f = lambda x, y: jnp.diag(jax.nn.log_softmax(x @ y.T)).sum()  # noqa: E731
    program = program_of(jax.make_jaxpr(jax.grad(f))(jnp.ones((8, 4)), jnp.ones((8, 4))))
    assert not program.unknown
    group = program.dims.group
    assert [group(x) for x in program.results[0]] == [group(x) for x in program.inputs[0]]


def test_what_each_turn_only_adds_to_is_summed_after_the_loop():
    def loss(w, b, xs):
        def turn(h, x):
            # What is carried is read, too, so its sum can't wait.
            h = h + jnp.tanh(h) @ w + b
            return h, None

        return jnp.sum(jax.lax.scan(turn, xs[0], xs)[0])

    shapes = jnp.ones((4, 4)), jnp.ones(4), jnp.ones((3, 8, 4))
    program = program_of(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*shapes))
    group, (*_, (_, rows, _)) = program.dims.group, program.inputs
    summed = {
        (len(one.dims), one.place.times, one.after.times)
        for one in program.sums
        if one.place.times == 3 and one.root is one
    }
    # The gradients of w and b; the products with w.
    assert summed == {(2, 3, 1), (1, 3, 1), (2, 3, 3)}
    assert all(
        group(rows) in map(group, one.over) for one in program.sums if one.after is not one.place
    )
