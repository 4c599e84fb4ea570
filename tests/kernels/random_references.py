"""Random references of kernels: what is read from them to be split computes of parts what it
computes of the whole, in float64. Each is written by sizes of its arguments, as references are.

python tests/kernels/random_references.py --seeds 0-300      many
python tests/kernels/random_references.py --seeds 17-18      one
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mylib._core.kernels import difference_of_parts
from mylib._core.kernels.reading import splits_like

SHAPES = ((8, 8), (8, 4), (4, 8), (6, 6), (4, 6))


def index_of(y, size):
    return (jnp.abs(y) * 100).astype(jnp.int32) % size


# --- operations: each takes two arrays of one shape and an axis, and returns an array of that ---


def added(x, y, axis):
    return x + 2 * y


def swapped(x, y, axis):
    return x.T


def multiplied(x, y, axis):
    return x @ y


def multiplied_back(x, y, axis):
    return x @ y.T @ x


def covariance(x, y, axis):
    return (x @ x.T) @ y if axis else y @ (x.T @ x)


def normalised(x, y, axis):
    return x / (1 + jnp.mean(y**2, axis, keepdims=True))


def softmax(x, y, axis):
    return jax.nn.softmax(x, axis) * y


def along(kind):
    def run(x, y, axis):
        if kind == "top":
            return jnp.moveaxis(lax.top_k(jnp.moveaxis(x, axis, 1), x.shape[axis])[0], 1, axis)
        if kind == "argsort":
            return jnp.take_along_axis(y, jnp.argsort(x, axis), axis)
        if kind == "argmax":
            return jnp.where(jnp.argmax(x, axis, keepdims=True) == 1, x, y)
        if kind == "roll":
            return jnp.roll(x, 1, axis)
        return getattr(jnp, kind)(x, axis=axis)

    run.__name__ = kind
    return run


def until(kind):
    def going_on(carry):
        x = carry[1]
        of = {
            "largest": lambda: jnp.max(x) > 0.1,
            "rows": lambda: jnp.max(jnp.sum(x, 0)) > 0.1,
            "first": lambda: x[0, 0] > 0.01,
            "counter": lambda: carry[0] < 3,
        }
        return (carry[0] < 6) & of[kind]()

    def run(x, y, axis):
        return lax.while_loop(going_on, lambda c: (c[0] + 1, c[1] / 2 + y / 100), (0, x))[1]

    run.__name__ = f"until_{kind}"
    return run


def until_each(x, y, axis):
    def one(x):
        return lax.while_loop(lambda x: jnp.max(x) > 0.1, lambda x: x / 2, x)

    return jax.vmap(one, axis, axis)(x)


def until_constant(x, y, axis):
    """The condition alone reads an operand."""
    return lax.while_loop(
        lambda c: c[0] < 1 + jnp.argmax(y) % 3, lambda c: (c[0] + 1, c[1] * 2), (0, x)
    )[1]


def updated(count):
    def run(x, y, axis):
        few = lax.slice_in_dim(y, 0, count, axis=axis)
        return lax.dynamic_update_slice_in_dim(x, few, jnp.argmax(y) % x.shape[axis], axis)

    run.__name__ = f"updated_{count}"
    return run


def updated_in_turn(x, y, axis):
    def turn(i, x):
        row = lax.dynamic_index_in_dim(x, i, axis, keepdims=False)
        return lax.dynamic_update_index_in_dim(x, row * 2 + i, i, axis)

    return lax.fori_loop(0, 3, turn, x)


def carried(x, y, axis):
    xs = jnp.moveaxis(x, axis, 0)
    ys = lax.scan(lambda h, x: ((h + x) / 2, h * x), xs[0], xs)[1]
    return jnp.moveaxis(ys, 0, axis)


def added_in_turn(x, y, axis):
    return lax.scan(lambda c, row: (c + row, None), x, y if axis else y[:2])[0]


def mapped(x, y, axis):
    """Each row attends to all of another array, or of its own."""
    rows = x if axis else y
    return lax.map(lambda row: jax.nn.softmax(rows @ row) @ rows, x)


def mapped_alone(x, y, axis):
    return lax.map(lambda pair: pair[0] * jnp.sum(pair[1]), (x, y))


def with_features(x, y, axis):
    groups = 2 if axis else 1
    w = jnp.tile(y[:1], (x.shape[1] // groups, 1))
    return convolved(x[None], w[None], feature_group_count=groups)[0]


def with_rows(x, y, axis):
    w = jnp.broadcast_to(y[0, 0], (3, 1, 1))
    return convolved(x[..., None], w)[..., 0]


def by_batches(x, y, axis):
    w = jnp.tile(y[:1], (x.shape[1], 1))
    out = convolved(x[:, None], w[None], batch_group_count=2)[:, 0]
    return jnp.concatenate([out, out]) if axis else jnp.repeat(out, 2, 0)


def depthwise(x, y, axis):
    w = jnp.broadcast_to(y[:1], (3, 1, x.shape[1]))
    return convolved(x[None], w, feature_group_count=x.shape[1])[0]


def convolved(x, w, **groups):
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers, **groups)


def looked_up(x, y, axis):
    return jnp.take(x, index_of(y[0] if axis else y[:, 0], x.shape[axis]), axis)


def looked_up_each(x, y, axis):
    return jnp.take_along_axis(x, index_of(y, x.shape[axis]), axis)


def written(kind):
    def run(x, y, axis):
        x, y = (jnp.moveaxis(z, axis, 0) for z in (x, y))
        return jnp.moveaxis(getattr(x.at[index_of(y[:, 0], x.shape[0])], kind)(y), 0, axis)

    run.__name__ = f"written_{kind}"
    return run


def written_each(x, y, axis):
    return jax.vmap(lambda x, y: x.at[index_of(y[:2], x.shape[0])].add(y[:2]), axis, axis)(x, y)


def in_pairs(x, y, axis):
    x = jnp.moveaxis(x, axis, 0)
    pairs = x.reshape(x.shape[0] // 2, 2, x.shape[1])
    out = pairs * jnp.sum(pairs, 1, keepdims=True)
    return jnp.moveaxis(out.reshape(x.shape), 0, axis)


def flattened(x, y, axis):
    return (x.reshape(-1) * jnp.sin(y.reshape(-1))).reshape(x.shape)


def in_twos(x, y, axis):
    twos = (x * y).reshape(-1, 2)
    return (twos * jnp.sum(twos, 1, keepdims=True)).reshape(-1, x.shape[1])


def joined(x, y, axis):
    half = x.shape[axis] // 2
    parts = lax.slice_in_dim(x, 0, half, axis=axis), lax.slice_in_dim(y, half, None, axis=axis)
    return jnp.concatenate(parts, axis)


def stacked(x, y, axis):
    return jnp.max(
        jnp.stack([x, y], axis) * jnp.arange(1.0, 3.0).reshape(-1, *[1] * (2 - axis)), axis
    )


def few_rows(x, y, axis):
    """Two rows of size 1 become one dimension of size 2."""
    few = jnp.concatenate([x[:1], y[:1]]) * y[:2]
    return x + jnp.sum(few, 0)


def shifted(x, y, axis):
    pads = [(1, -1) if i == axis else (0, 0) for i in range(2)]
    return lax.pad(x, 0.5, [(*pad, 0) for pad in pads])


def pooled(x, y, axis):
    window = [3 if i == axis else 1 for i in range(2)]
    return lax.reduce_window(x, 0.0, lax.add, window, (1, 1), "SAME")


def numbered(x, y, axis):
    return x * lax.broadcasted_iota(x.dtype, x.shape, axis)


def chosen(x, y, axis):
    of = jnp.sum(x) if axis else x[0, 0]
    return lax.cond(of > 0, lambda x, y: x + y, lambda x, y: jnp.cumsum(x, 1) - y, x, y)


def outer(x, y, axis):
    return jnp.max(x[:, None, :] * y[None, :, :], axis)


def outer_of_itself(x, y, axis):
    return jnp.sum(x[:, None, :] * x[None, :, :], 1) + y


def checkpointed(x, y, axis):
    return jax.checkpoint(jax.jit(lambda x, y: jax.nn.silu(x) * jax.nn.relu(y)))(x, y)


def differentiated(x, y, axis):
    return jax.grad(lambda x: jnp.sum(jax.nn.logsumexp(x * y, axis)))(x)


def random_numbers(x, y, axis):
    return x + jax.random.normal(jax.random.key(axis), x.shape, x.dtype)


OPERATIONS = (
    added, multiplied_back, covariance, normalised, softmax, until_each,
    until_constant, updated_in_turn, carried, added_in_turn, mapped, mapped_alone,
    with_features, with_rows, by_batches, depthwise, looked_up, looked_up_each, written_each,
    in_pairs, flattened, in_twos,
    joined, stacked, few_rows, shifted, pooled, numbered, chosen, outer, outer_of_itself,
    checkpointed, differentiated, random_numbers,
    *map(along, ("cumsum", "sort", "flip", "top", "argsort", "argmax", "roll")),
    *map(until, ("largest", "rows", "first", "counter")),
    *map(updated, (1, 2)), *map(written, ("add", "set", "max")),
)  # fmt: skip
# What is written for square arrays isn't written for their parts, if it asks whether they are.
OF_SQUARES = (*OPERATIONS, swapped, multiplied)


def reference_of(seed):
    """A program of some operations, one of which follows from the seed; and its arguments."""
    rng = np.random.default_rng(seed)
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    operations = OF_SQUARES if shape[0] == shape[1] else OPERATIONS
    lines = []
    at = int(rng.integers(3))
    for i in range(at + 1):
        drawn = seed % len(operations) if i == at else int(rng.integers(len(operations)))
        lines.append(
            (operations[drawn], *map(int, rng.integers(i + 2, size=2)), int(rng.integers(2)))
        )

    def run(x, y):
        values = [x, y]
        for operation, i, j, axis in lines:
            values.append(jnp.tanh(operation(values[i], values[j], axis)))
        return values[2:]

    shown = ", ".join(f"{op.__name__}({i}, {j}, {axis})" for op, i, j, axis in lines)
    return run, [rng.normal(size=shape) for _ in range(2)], f"{seed}: {shape} {shown}"


def ways(splits):
    """Each letter into the fewest and the most parts, and all letters at once."""
    fewest = {x: next(k for k in range(2, n + 1) if n % k == 0) for x, n in splits.parts.items()}
    each = [{x: n} for parts in (fewest, splits.parts) for x, n in parts.items()]
    return [x for i, x in enumerate([*each, fewest]) if x and x not in each[:i]]


def case(seed):
    """One case: what it was, what was split, and how parts differ, or None."""
    reference, arrays, about = reference_of(seed)
    splits = splits_like(jax.make_jaxpr(reference)(*arrays))
    run = jax.jit(reference)
    whole = run(*arrays)
    told = (difference_of_parts(run, arrays, whole, splits, parts) for parts in ways(splits))
    return about, splits, next((x for x in told if x), None)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0-300")
    first, last = map(int, parser.parse_args().seeds.split("-"))
    jax.config.update("jax_enable_x64", True)
    counts = Counter()
    for seed in range(first, last):
        try:
            about, splits, told = case(seed)
        except Exception as error:
            raise RuntimeError(f"in {reference_of(seed)[2]}") from error
        counts["wrong"] += told is not None
        counts["split"] += bool(splits.parts)
        if told is not None:
            print(f"WRONG {about} [{splits}]: {told}", flush=True)
    print(f"{last - first - counts['wrong']} of {last - first} right, {counts['split']} split")
    sys.exit(bool(counts["wrong"]))


if __name__ == "__main__":
    main()
