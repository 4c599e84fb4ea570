"""Steps of an optimiser, on several devices and on one."""

import jax
import jax.numpy as jnp
import numpy as np

import mylib


def random_like(shapes, seed=0):
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten(
        [jax.random.normal(k, x, jnp.float64) for k, x in zip(keys, leaves, strict=True)]
    )


def gradients(params, step):
    return jax.tree.map(lambda x: jnp.sin((step + 1) * x), params)


def run(transform, params, state, steps, start=0):
    """The last updates, and the last state."""
    update = jax.jit(transform.update)
    updates = None
    for step in range(start, start + steps):
        updates, state = update(gradients(params, step), state, params)
    return updates, state


def difference(a, b):
    """The largest one, in numbers as large as one."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    worst = [np.max(np.abs(np.asarray(x, np.float64) - np.asarray(y)), initial=0) for x, y in pairs]
    assert np.isfinite(worst).all()
    return max(worst)


def compare(transform, params, kept, steps=3, **options):
    """How far updates and states are from those of the transform itself, as large as they are."""
    ours = mylib.by_matrix(transform, kept, **options)
    placed = mylib.filter_shard(params, kept, mesh=options.get("mesh"))
    updates, state = run(ours, placed, jax.jit(ours.init)(placed), steps)
    expected, plain = run(transform, params, transform.init(params), steps)
    return difference(updates, expected), difference(mylib.by_matrix.to_plain(state), plain)
