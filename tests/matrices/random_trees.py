"""Random trees, placements and optimisers for `by_matrix`, each beside the optimiser itself.

python tests/matrices/random_trees.py --seeds 0-300     a line for each that differs
"""

import argparse
import math
import os
import random
import sys

if __name__ == "__main__":
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["NPROC"] = "32"

import jax
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec as P
from optimisers import muon, shampoo, soap
from training import difference, random_like, run

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


def tree_of(draw):
    """Lists, dicts and tuples of matrices of few shapes, stacks of them, and vectors."""
    shapes = [(8 * draw.randint(1, 3), 8 * draw.randint(1, 3)) for _ in range(draw.randint(1, 3))]

    def leaf():
        if draw.random() < 0.2:
            return (8 * draw.randint(1, 2),)
        stacked = (draw.choice([3, 8]),) if draw.random() < 0.25 else ()
        return *stacked, *draw.choice(shapes)

    some = lambda: [leaf() for _ in range(draw.randint(1, 6))]  # noqa: E731
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
    """Different ones by labels, or one with a mask."""
    several = [TRANSFORMS[name]() for name in draw.sample(sorted(TRANSFORMS), 2)]
    if draw.random() < 0.3:
        mask = [len(x) > 1 and draw.random() < 0.7 for x in flat]
        return optax.masked(several[0], tree.unflatten(mask))
    labels = [("ab"[draw.random() < 0.3] if len(x) > 1 else "scale") for x in flat]
    by_label = {"a": several[0], "b": several[1], "scale": optax.scale(0.5)}
    return optax.multi_transform(by_label, tree.unflatten(labels))


def apart(tree):
    """With the matrices of stacks as leaves."""
    return jax.tree.map(lambda x: tuple(x) if x.ndim == 3 else x, tree)


def beside(tree, reference):
    """The largest difference from a tree in which the matrices of stacks are leaves."""
    leaves, structure = jax.tree.flatten(tree)
    members = structure.flatten_up_to(reference)
    return difference(leaves, [np.stack(x) if isinstance(x, tuple) else x for x in members])


def is_shape(x):
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def check(seed):
    draw = random.Random(seed)
    sizes = draw.choice(MESHES)
    types = draw.choice([AxisType.Auto, AxisType.Explicit])
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (types,) * len(sizes))
    shapes = tree_of(draw)
    flat, tree = jax.tree.flatten(shapes, is_leaf=is_shape)
    params = tree.unflatten(random_like(flat, seed))
    kept = placement_of(draw, mesh)
    over = draw.choice([None, tuple(sizes)])
    transform = transform_of(draw, flat, tree)
    with jax.set_mesh(mesh):
        ours = mylib.by_matrix(transform, kept, over, matrices=dims_of)
        placed = mylib.filter_shard(params, kept)
        updates, state = run(ours, placed, jax.jit(ours.init)(placed), 3)
        plain = mylib.by_matrix.to_plain(state)
        again = mylib.by_matrix.from_plain(jax.tree.map(np.asarray, plain), state)
        differs = difference(mylib.by_matrix.to_plain(again), plain)
        updates, plain = jax.tree.map(np.asarray, (updates, plain))
    params = apart(params)
    expected, state = run(transform, params, transform.init(params), 3)
    return max(beside(updates, expected), beside(plain, state), differs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0-300")
    first, last = map(int, parser.parse_args().seeds.split("-"))
    jax.config.update("jax_enable_x64", True)
    wrong = 0
    for seed in range(first, last):
        try:
            differs = check(seed)
        except Exception as error:
            differs = f"{type(error).__name__}: {error}"
        if not isinstance(differs, float) or differs > 1e-11:
            wrong += 1
            print(seed, differs, flush=True)
    print(f"{last - first} seeds, {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
