"""Optimisers that need whole matrices: Optax's Muon, and small versions of SOAP and Shampoo."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
