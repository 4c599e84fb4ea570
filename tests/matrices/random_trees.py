"""Random trees, dtypes and optimisers for `by_matrix`, each beside the optimiser itself.

python tests/matrices/random_trees.py --seeds 0-300     a line for each that differs
"""

import argparse
import math
import os
import random
import sys
import time
import warnings

if __name__ == "__main__":
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    os.environ.setdefault("XLA_FLAGS", flags)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["NPROC"] = "32"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec as P
from optimisers import HOLDING, muon, shampoo, soap
from training import random_like

import mylib
from mylib.rules import fsdp

MESHES = (
    {"data": 8},
    {"copies": 2, "data": 4},
    {"data": 4, "model": 2},
    {"copies": 2, "data": 2, "model": 2},
)
TRANSFORMS = {
    "muon": muon,
    "muon, adaptive": lambda: muon(adaptive=True),
    "soap": soap,
    "shampoo": shampoo,
    "adam": optax.scale_by_adam,
    "momentum": lambda: optax.trace(0.9, nesterov=True),
    "decay": lambda: optax.chain(muon(), optax.add_decayed_weights(0.1)),
    "factored": lambda: optax.scale_by_factored_rms(min_dim_size_to_factor=4),
}


# Of what, if not of the seed, a number may be far from what it should be, over the largest one.
ROUNDING = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 0.1}


def tree_of(draw):
    """Lists, dicts and tuples of matrices of few shapes, stacks of them, and vectors. Some have no
    elements.
    """
    shapes = [(8 * draw.randint(1, 3), 8 * draw.randint(1, 3)) for _ in range(draw.randint(1, 3))]
    empty = draw.choice([0, 0, 0.2])

    def leaf():
        if draw.random() < empty:
            return draw.choice([(0,), (0, 8), (8, 0), (0, 8, 8), (3, 0, 8)])
        if draw.random() < 0.2:
            return (8 * draw.randint(1, 2),)
        stacked = (draw.choice([3, 8]),) if draw.random() < 0.25 else ()
        return *stacked, *draw.choice(shapes)

    some = lambda: [leaf() for _ in range(draw.randint(1, 4))]  # noqa: E731
    return {"a": some(), "b": tuple(some()), "c": {"d": leaf(), "e": some()}}


def dims_of(leaf):
    return (0, 1, 2) if leaf.ndim == 3 else mylib.rules.PASS


def placement_of(draw, mesh):
    axes, pattern = list(mesh.axis_names), draw.random()

    def spec(leaf):
        if leaf.ndim < 2:
            return P()
        made = random.Random(f"{leaf.shape}{pattern}")
        # Each axis is given to a dimension that it divides, or to none.
        entries = [[] for _ in leaf.shape]
        for axis in axes:
            dim = made.choice([None, *range(leaf.ndim)])
            parts = 1 if dim is None else math.prod(mesh.shape[a] for a in (*entries[dim], axis))
            if dim is not None and leaf.shape[dim] % parts == 0:
                entries[dim].append(axis)
        return P(*(tuple(x) or None for x in entries))

    return draw.choice([fsdp("data", min_size=1), fsdp(tuple(axes), min_size=1), spec, spec])


def transform_of(draw, flat, tree):
    """Different ones by labels, or one with a mask. Some differ only in a value that they hold."""
    of_vectors = optax.scale(0.5)
    if draw.random() < 0.4:
        make = HOLDING[draw.choice(sorted(HOLDING))]
        several = [make(1.0), make(draw.choice([1.0, 3.0])), make(3.0)]
    else:
        several = [TRANSFORMS[name]() for name in draw.sample(sorted(TRANSFORMS), 3)]
    if draw.random() < 0.2:
        mask = [len(x) > 1 and draw.random() < 0.7 for x in flat]
        return optax.masked(several[0], tree.unflatten(mask))
    labels = [draw.choice("aabc") if len(x) > 1 else "vectors" for x in flat]
    by_label = {**dict(zip("abc", several, strict=True)), "vectors": of_vectors}
    return optax.partition(by_label, tree.unflatten(labels))


def dtypes_of(draw, flat):
    """Those of the weights, and of their gradients."""
    if draw.random() < 0.5:
        return ["float64"] * len(flat), ["float64"] * len(flat)
    weights = draw.choice([["float32"], ["bfloat16"], ["float64"], ["float32", "bfloat16"]])
    grads = draw.choice([["bfloat16"], ["float32"], ["float64"]])
    return [draw.choice(weights) for _ in flat], [draw.choice(grads) for _ in flat]


def apart(tree):
    """With the matrices of stacks as leaves."""
    return jax.tree.map(lambda x: tuple(x) if x.ndim == 3 else x, tree)


def joined(tree, like):
    """The reverse, for a tree such as `like`, whose stacks are leaves."""
    leaves, structure = jax.tree.flatten(like)
    members = structure.flatten_up_to(tree)
    pairs = zip(members, leaves, strict=True)
    return [_stack(x, y) if isinstance(x, tuple) else x for x, y in pairs]


def _stack(members, like):
    if not members:
        return np.zeros(like.shape, like.dtype)
    # What no matrix has a part in is there once.
    return members[0] if members[0].shape == like.shape else np.stack(members)


def differs(tree, expected, rounding):
    """How far two lists of arrays are from each other, over the rounding; infinite for dtypes."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(tree), expected, strict=True):
        if x.dtype != y.dtype or x.shape != y.shape:
            raise AssertionError(f"{x.dtype}{x.shape} instead of {y.dtype}{y.shape}")
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.array_equal(np.isfinite(x), np.isfinite(y))
        x, y = np.nan_to_num(x), np.nan_to_num(y)
        size = max(1.0, np.max(np.abs(y), initial=0))
        worst = max(worst, np.max(np.abs(x - y), initial=0) / size / rounding)
    return worst


def is_shape(x):
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def gradients(weights, dtypes, step):
    leaves, tree = jax.tree.flatten(weights)
    pairs = zip(leaves, dtypes, strict=True)
    return tree.unflatten([jnp.sin((step + 1) * x.astype(float)).astype(d) for x, d in pairs])


def trained(update, weights, state, dtypes, steps=2):
    """The last updates, and the last state."""
    updates = None
    for step in range(steps):
        updates, state = update(gradients(weights, dtypes, step), state, weights)
    return updates, state


def alone(transform, weights, dtypes):
    """The optimiser itself, with the matrices of stacks as leaves."""

    @jax.jit
    def update(grads, state, weights):
        return transform.update(apart(grads), state, apart(weights))

    return trained(update, weights, transform.init(apart(weights)), dtypes)


def check(seed):
    draw = random.Random(seed)
    sizes = draw.choice(MESHES)
    types = draw.choice([AxisType.Auto, AxisType.Explicit])
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (types,) * len(sizes))
    shapes = tree_of(draw)
    flat, tree = jax.tree.flatten(shapes, is_leaf=is_shape)
    of_weights, of_grads = dtypes_of(draw, flat)
    weights = [x.astype(d) for x, d in zip(random_like(flat, seed), of_weights, strict=True)]
    weights = tree.unflatten(weights)
    kept = placement_of(draw, mesh)
    over = draw.choice([None, tuple(sizes)])
    transform = transform_of(draw, flat, tree)
    beside = draw.random() < 0.3
    if beside:
        # Beside AdamW in one state, which rules place.
        labels = [draw.choice("mma") if len(x) > 1 else "a" for x in flat]
        inside, labels = transform, tree.unflatten(labels)
        around = lambda t: optax.partition({"m": t, "a": optax.adamw(0.1)}, labels)  # noqa: E731
        transform = around(inside)
    try:
        expected, state = alone(transform, weights, of_grads)
    except Exception as error:
        # What the optimiser itself refuses is no concern of by_matrix.
        return f"not tried: {type(error).__name__}"
    with jax.set_mesh(mesh):
        by_matrix = lambda t: mylib.by_matrix(t, kept, over, matrices=dims_of)  # noqa: E731
        ours = around(by_matrix(inside)) if beside else by_matrix(transform)
        placed = mylib.filter_shard(weights, kept)
        init = mylib.filter_jit(ours.init, out_shardings=kept)
        places = (kept, kept) if beside or draw.random() < 0.5 else None
        update = mylib.filter_jit(ours.update, out_shardings=places)
        first = init(placed)
        updates, last = trained(update, placed, first, of_grads)
        if places:
            pairs = zip(jax.tree.leaves(first), jax.tree.leaves(last), strict=True)
            moved = [
                x.sharding for x, y in pairs if not x.sharding.is_equivalent_to(y.sharding, x.ndim)
            ]
            assert not moved, f"moved from {moved}"
        plain = mylib.by_matrix.to_plain(last)
        again = mylib.by_matrix.from_plain(jax.tree.map(np.asarray, plain), last)
        again = jax.tree.map(np.asarray, mylib.by_matrix.to_plain(again))
        updates, plain = jax.tree.map(np.asarray, (updates, plain))
    rounding = max(ROUNDING[x] for x in (*of_weights, *of_grads))
    return max(
        differs(updates, joined(expected, updates), rounding),
        differs(plain, joined(state, plain), rounding),
        differs(again, jax.tree.leaves(plain), rounding),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0-300")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    options = parser.parse_args()
    first, last = map(int, options.seeds.split("-"))
    jax.config.update("jax_enable_x64", True)
    warnings.simplefilter("error", mylib.errors.MylibWarning)
    right, wrong, untried, start = 0, 0, 0, time.monotonic()
    for seed in range(first, last):
        if time.monotonic() - start > options.seconds:
            break
        try:
            found = check(seed)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        if isinstance(found, float) and found <= 1:
            right += 1
        elif isinstance(found, str) and found.startswith("not tried"):
            untried += 1
        else:
            wrong += 1
            print(seed, found, flush=True)
        jax.clear_caches()
    print(f"{right} seeds are right, {wrong} wrong, {untried} not tried")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
