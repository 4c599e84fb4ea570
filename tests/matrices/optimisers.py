"""Optimisers that need whole matrices: Optax's Muon, small versions of SOAP and Shampoo, and
transforms that hold values.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers


def muon(**options):
    """Muon of trees: `scale_by_muon` alone takes a single array only."""
    numbers = lambda tree: jax.tree.map(lambda x: MuonDimensionNumbers(), tree)  # noqa: E731
    return optax.contrib.scale_by_muon(weight_dimension_numbers=numbers, **options)


class Soap(NamedTuple):
    count: Any
    first: Any
    second: Any
    left: Any
    right: Any
    basis: Any


def soap(every=2):
    """Adam in the eigenbasis of Shampoo's statistics, which a branch renews now and then."""

    def init(params):
        zeros, trees = jnp.zeros_like, jax.tree.map
        rows, columns = (
            trees(lambda x, d=d: jnp.eye(x.shape[d], dtype=x.dtype), params) for d in (0, 1)
        )
        nothing = trees(zeros, params)
        return Soap(jnp.zeros([], jnp.int32), nothing, nothing, rows, columns, (rows, columns))

    def update(grads, state, params=None):
        trees = jax.tree.map
        left = trees(lambda s, g: 0.9 * s + g @ g.T, state.left, grads)
        right = trees(lambda s, g: 0.9 * s + g.T @ g, state.right, grads)

        def renew(basis):
            turn = lambda s, q: jnp.linalg.qr(s @ q)[0]  # noqa: E731
            return trees(turn, left, basis[0]), trees(turn, right, basis[1])

        basis = jax.lax.cond(state.count % every == 0, renew, lambda basis: basis, state.basis)
        first = trees(lambda m, g: 0.9 * m + 0.1 * g, state.first, grads)
        turned = trees(lambda g, a, b: a.T @ g @ b, grads, *basis)
        second = trees(lambda v, g: 0.9 * v + 0.1 * g * g, state.second, turned)

        def step(m, v, a, b):
            return a @ ((a.T @ m @ b) / (jnp.sqrt(v) + 1e-3)) @ b.T

        updates = trees(step, first, second, *basis)
        return updates, Soap(state.count + 1, first, second, left, right, basis)

    return optax.GradientTransformation(init, update)


class Shampoo(NamedTuple):
    count: Any
    statistics: Any
    roots: Any


def shampoo(every=2):
    def init(params):
        sides = tuple(
            jax.tree.map(lambda x, d=d: jnp.eye(x.shape[d], dtype=x.dtype), params) for d in (0, 1)
        )
        return Shampoo(jnp.zeros([], jnp.int32), sides, sides)

    def update(grads, state, params=None):
        left, right = state.statistics
        left = jax.tree.map(lambda s, g: s + g @ g.T, left, grads)
        right = jax.tree.map(lambda s, g: s + g.T @ g, right, grads)

        def root(s):
            values, vectors = jnp.linalg.eigh(s)
            return (vectors * values**-0.25) @ vectors.T

        roots = jax.lax.cond(
            state.count % every == 0,
            lambda: (jax.tree.map(root, left), jax.tree.map(root, right)),
            lambda: state.roots,
        )
        updates = jax.tree.map(lambda g, a, b: a @ g @ b, grads, *roots)
        return updates, Shampoo(state.count + 1, (left, right), roots)

    return optax.GradientTransformation(init, update)


def of_each(change):
    """Updates each matrix by a function, and adds up the gradients."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda g, s, params=None: (jax.tree.map(change, g), jax.tree.map(jnp.add, g, s)),
    )


def _cubed(g):
    return g @ g.T @ g / (1 + jnp.sum(g * g))


def by_array(x):
    """By a captured array."""
    by = jnp.asarray(x)
    return lambda g: by.astype(g.dtype) * _cubed(g)


def by_numpy(x):
    by = np.full(64, x)
    return lambda g: by[: len(g), None].astype(g.dtype) * _cubed(g)


def in_jit(x):
    by = jnp.asarray([x])
    return jax.jit(lambda g: by[0].astype(g.dtype) * _cubed(g))


def in_branch(x):
    by = jnp.asarray(x)
    return lambda g: jax.lax.cond(g[0, 0] > 0, lambda g: by.astype(g.dtype) * _cubed(g), _cubed, g)


def in_scan(x):
    by = jnp.asarray([1.0, x])
    return lambda g: jax.lax.scan(lambda g, y: (_cubed(g) * y.astype(g.dtype), None), g, by)[0]


def in_while(x):
    limit = jnp.asarray(x)

    def change(g):
        step = lambda state: (state[0] + 1, state[1] * 0.5)  # noqa: E731
        return jax.lax.while_loop(lambda state: state[0] < limit, step, (0.0 * limit, _cubed(g)))[1]

    return change


def in_rule(x):
    """In a function with a derivative of its own."""
    by = jnp.asarray(x)
    change = jax.custom_vjp(lambda g: by.astype(g.dtype) * _cubed(g))
    change.defvjp(lambda g: (change(g), None), lambda _, g: (g,))
    return change


def in_checkpoint(x):
    return jax.checkpoint(by_array(x))


def in_vmap(x):
    by = jnp.asarray(x)
    return lambda g: jax.vmap(lambda row: by.astype(g.dtype) * row)(_cubed(g))


def in_callback(x):
    def called(g):
        shape = jax.ShapeDtypeStruct(g.shape, g.dtype)
        return jax.pure_callback(lambda g: x * g, shape, g, vmap_method="sequential")

    return called


def at_start(x):
    """Only the state differs."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(lambda y: jnp.full_like(y, x), params),
        lambda g, s, params=None: (
            jax.tree.map(lambda g, s: s * (g @ g.T @ g), g, s),
            jax.tree.map(lambda g, s: s + g, g, s),
        ),
    )


def by_count(x):
    return lambda count: x / (1 + count)


# Transforms that differ in what they hold alone, by a number.
HOLDING = {
    "array": lambda x: of_each(by_array(x)),
    "numpy": lambda x: of_each(by_numpy(x)),
    "jit": lambda x: of_each(in_jit(x)),
    "branch": lambda x: of_each(in_branch(x)),
    "scan": lambda x: of_each(in_scan(x)),
    "while": lambda x: of_each(in_while(x)),
    "rule": lambda x: of_each(in_rule(x)),
    "checkpoint": lambda x: of_each(in_checkpoint(x)),
    "vmap": lambda x: of_each(in_vmap(x)),
    "callback": lambda x: of_each(in_callback(x)),
    "start": at_start,
    "schedule": lambda x: optax.chain(muon(), optax.scale_by_schedule(by_count(jnp.asarray(x)))),
    "hyperparameter": lambda x: optax.inject_hyperparams(
        lambda lr: optax.chain(muon(), optax.scale(lr))
    )(lr=x),
    "static": lambda x: optax.chain(muon(), optax.scale(x)),
    "weights": lambda x: optax.chain(muon(), optax.add_decayed_weights(jnp.asarray(x))),
}
