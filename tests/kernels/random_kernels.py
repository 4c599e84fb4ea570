"""Random references, each with a kernel that computes the same, split in the ways that are read
from the reference, on random meshes, under random transformations, against one device, in float64.

python tests/kernels/random_kernels.py --seeds 0-300      many
python tests/kernels/random_kernels.py --seeds 17-18      one
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import ast
import math
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mylib
from mylib._core.jaxprs import all_equations
from mylib._core.kernels import kernel_p, specs_of

MESHES = ((8,), (4, 2), (2, 2, 2))
KINDS = ("auto", "explicit", "mixed")
WAYS = (
    "jit", "eager", "grad", "jvp", "vmap", "vmap some", "scan", "checkpoint", "shard_map",
    "filter_jit", "axes", "grad of grad",
)  # fmt: skip


def einsum(rng):
    sizes = dict(zip("abcde", rng.permutation([8, 16, 4, 2, 8]), strict=True))
    left = "".join(rng.permutation(list("abc")))
    right = "".join(rng.permutation(list("bcd"[rng.integers(2) :])))
    kept = [x for x in set(left + right) if rng.random() < 0.7]
    out = "".join(rng.permutation(sorted(kept)))
    shapes = [[sizes[x] for x in letters] for letters in (left, right)]
    return (lambda x, y: jnp.einsum(f"{left},{right}->{out}", x, y)), shapes


def reduction(rng):
    axis, kind = int(rng.integers(3)), rng.choice(["sum", "max", "mean", "logsumexp", "prod"])
    fun = jax.nn.logsumexp if kind == "logsumexp" else getattr(jnp, kind)
    return (lambda x: fun(x * 0.5, axis=axis)), [[8, 4, 16]]


def softmax(rng):
    axis = int(rng.integers(3))
    return (lambda x: jax.nn.softmax(x, axis=axis)), [[8, 16, 4]]


def norm(rng):
    axes = (1, 2) if rng.random() < 0.5 else (2,)

    def run(x, scale):
        centred = x - jnp.mean(x, axes, keepdims=True)
        return centred * lax.rsqrt(jnp.mean(centred**2, axes, keepdims=True) + 1) * scale

    return run, [[8, 4, 16], [16]]


def attention(rng):
    is_causal, groups = rng.random() < 0.5, int(rng.choice([1, 2]))

    def run(q, k, v):
        q = q.reshape(*q.shape[:2], q.shape[2] // groups, groups, q.shape[3])
        scores = jnp.einsum("bthgd,bshd->bhgts", q, k)
        if is_causal:
            t, s = scores.shape[-2:]
            scores = jnp.where(jnp.arange(t)[:, None] >= jnp.arange(s), scores, -1e9)
        out = jnp.einsum("bhgts,bshd->bthgd", jax.nn.softmax(scores), v)
        return out.reshape(*out.shape[:2], -1, out.shape[-1])

    kv = [4, 8, 8 // groups, 4]
    return run, [[4, 8, 8, 4], kv, kv]


def heads(rng):
    def run(x, w):
        y = (x @ w).reshape(*x.shape[:2], 4, -1)
        return jnp.cumsum(y, axis=1).reshape(x.shape[0], x.shape[1], -1)

    return run, [[8, 4, 8], [8, 16]]


def convolution(rng):
    padding = str(rng.choice(["SAME", "VALID"]))
    adds = padding == "SAME"

    def run(x, w):
        y = lax.conv_general_dilated(x, w, (1,), padding, dimension_numbers=("NWC", "WIO", "NWC"))
        return y + x if adds else y

    return run, [[8, 16, 8], [3, 8, 8]]


def pooled(rng):
    def run(x):
        return lax.reduce_window(x, 0.0, lax.add, (1, 3, 1), (1, 1, 1), "SAME") * x

    return run, [[8, 16, 4]]


def gathered(rng):
    def run(table, x):
        index = (jnp.abs(x) * 7).astype(jnp.int32) % table.shape[0]
        return table[index] * x[..., None]

    return run, [[16, 8], [8, 4]]


def ordered(rng):
    axis, kind = int(rng.integers(2)), rng.choice(["sort", "cumsum", "top", "flip", "roll", "max"])

    def run(x):
        if kind == "top":
            return lax.top_k(x, x.shape[-1])[0] + x
        if kind == "roll":
            return jnp.roll(x, 1, axis) + x
        if kind == "max":
            return lax.cummax(x, axis=axis)
        return getattr(jnp, kind)(x, axis=axis) + x

    return run, [[8, 16]]


def placed(rng):
    def run(x, y):
        return x * jnp.arange(x.shape[1]) + jnp.pad(y, ((0, 0), (1, 0)))[:, :-1]

    return run, [[8, 16], [8, 16]]


def several(rng):
    def run(x, y):
        total = jnp.sum(x * y, axis=1)
        return {"rows": x * total[:, None], "total": total, "other": jnp.tanh(y).T}

    return run, [[8, 16], [8, 16]]


def looped(rng):
    def run(x, h):
        def turn(h, x):
            h = jnp.tanh(h + x)
            return h, h

        return lax.scan(turn, h, x)[1]

    return run, [[4, 8, 16], [8, 16]]


def broadcast(rng):
    return (lambda x, y, z: x * y + jnp.exp(-(z**2))), [[8, 16], [1, 16], [8, 1]]


FAMILIES = (
    einsum, reduction, softmax, norm, attention, heads, convolution, pooled, gathered, ordered,
    placed, several, looped, broadcast,
)  # fmt: skip


def mesh_of(rng, sizes, kind):
    axes = tuple("xyz"[: len(sizes)])
    types = {
        "auto": [AxisType.Auto] * len(sizes),
        "explicit": [AxisType.Explicit] * len(sizes),
        "mixed": [AxisType.Explicit] + [AxisType.Auto] * (len(sizes) - 1),
    }[kind]
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, axes, axis_types=tuple(types))


def split_of(rng, splits, mesh):
    """A random split of some of the letters over the mesh's axes."""
    split, parts = {}, dict(splits.parts)
    for axis in rng.permutation(list(mesh.axis_names)):
        fits = [x for x, n in parts.items() if n % mesh.shape[axis] == 0]
        if fits and rng.random() < 0.85:
            letter = str(rng.choice(fits))
            split[letter] = (*split.get(letter, ()), str(axis))
            parts[letter] //= mesh.shape[axis]
    return split


def total(f, way):
    def run(*xs):
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*xs)))

    return run


def transformed(f, way, count):
    """A function of the same arguments that uses `f` in one of the ways."""
    every = tuple(range(count))
    if way == "grad":
        return jax.grad(total(f, way), every)
    if way == "grad of grad":
        inner = jax.grad(total(f, way), every)
        return jax.grad(lambda *xs: sum(jnp.sum(g**2) for g in inner(*xs)), every)
    if way == "checkpoint":
        return jax.grad(total(jax.checkpoint(f), way), every)
    if way == "jvp":
        return lambda *xs: jax.jvp(f, xs, tuple(map(jnp.cos, xs)))
    if way == "vmap":
        return lambda *xs: jax.vmap(f)(*(jnp.stack([x, 2 * x]) for x in xs))
    if way == "vmap some":
        return lambda x, *xs: jax.vmap(f, (0, *[None] * len(xs)))(jnp.stack([x, 2 * x]), *xs)
    if way == "scan":
        return lambda *xs: lax.scan(lambda c, s: (c, f(*(s * x for x in xs))), 0, jnp.ones(2))[1]
    return f


def kernels_in(program):
    return [eqn for eqn in all_equations(program) if eqn.primitive is kernel_p]


def case(seed):
    """One case; what it was, and the largest difference."""
    rng = np.random.default_rng(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    reference, shapes = family(rng)
    xs = [rng.normal(size=shape) for shape in shapes]
    way = WAYS[int(rng.integers(len(WAYS)))]
    kind, sizes = KINDS[int(rng.integers(3))], MESHES[int(rng.integers(3))]
    mesh = mesh_of(rng, sizes, kind)
    kernel = mylib.opaque(lambda *xs: reference(*xs), like=reference)
    program = jax.make_jaxpr(kernel)(*map(jnp.asarray, xs))
    (params,) = [eqn.params for eqn in kernels_in(program)]
    splits = params["splits"]
    split = split_of(rng, splits, mesh)
    specs = specs_of(splits.operands, xs, split)
    if kind == "auto" and way != "shard_map" and rng.random() < 0.3:
        # Also what must be whole.
        specs = [P(*(spec[i] for i in rng.permutation(len(spec)))) for spec in specs]
        specs = [s if fits(s, shape, mesh) else P() for s, shape in zip(specs, shapes, strict=True)]
    about = f"{seed}: {family.__name__} [{splits}], {way}, {kind} {sizes}, {specs}"
    if way == "axes":
        named = {ast.literal_eval(params["kernel"].shown(x, splits)): y for x, y in split.items()}
        kernel = mylib.opaque(lambda *xs: reference(*xs), like=reference, axes=named)
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(xs, specs, strict=True)
    ]
    wanted = jax.jit(transformed(reference, way, len(xs)))(*map(jnp.asarray, xs))
    run = transformed(kernel, way, len(xs))
    with jax.set_mesh(mesh):
        if way == "shard_map":
            results = specs_of(splits.results, params["types"], split)
            tree = jax.tree.structure(jax.eval_shape(reference, *xs))
            out = jax.tree.unflatten(tree, results)
            run = jax.shard_map(run, mesh=mesh, in_specs=tuple(specs), out_specs=out)
        if way == "filter_jit":
            run = mylib.filter_jit(run)
        elif way not in ("eager", "vmap"):
            run = jax.jit(run)
        got = run(*placed)
    return about, difference(got, wanted)


def fits(spec, shape, mesh):
    return all(
        n % math.prod(mesh.shape[axis] for axis in ([x] if isinstance(x, str) else x or [])) == 0
        for x, n in zip(spec, shape, strict=False)
    )


def difference(got, wanted):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    largest = 0.0
    for a, b in pairs:
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, b.shape, a.dtype, b.dtype)
        largest = max(largest, float(np.max(abs(a - b))) / max(1.0, float(np.max(abs(b)))))
    return largest


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0-300")
    first, last = map(int, parser.parse_args().seeds.split("-"))
    jax.config.update("jax_enable_x64", True)
    wrong, counts = 0, Counter()
    for seed in range(first, last):
        try:
            about, off = case(seed)
        except Exception as error:  # noqa: BLE001
            about, off = f"{seed}: {type(error).__name__}: {str(error)[:1500]}", math.inf
        counts[off < 1e-11] += 1
        if off >= 1e-11:
            wrong += 1
            print(f"WRONG {about}: {off}", flush=True)
    print(f"{counts[True]} of {last - first} right")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
