"""Faults that are put into steps, one each: does `verify` find them, and their line?

    python tests/verify/seeded_faults.py 0 200

A step is traced and its program is run again with one equation's result computed as a wrong
compiler would: a sum over devices dropped, doubled or made in the wrong groups, a part that is the
neighbour's, a slice in place of a part, a permutation reversed or with a pair missing, a loop that
runs backwards.
"""

import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import mylib
from mylib._programs import bind_as, interpret, line_of
from mylib.testing import VerifyError, verify

N = 8
KINDS = "dropped doubled misgrouped neighbour slice reversed missing backwards".split()


def mlp(weights, x, y):
    hidden = jnp.tanh(x @ weights[0])
    scaled = hidden * weights[2]
    out = scaled @ weights[1]
    return jnp.mean((out - y) ** 2)


def attention(weights, x, y):
    q = jnp.einsum("bte,ef->btf", x, weights[0])
    k = jnp.einsum("bte,ef->btf", x, weights[1])
    scores = jnp.einsum("btf,bsf->bts", q, k)
    probs = jax.nn.softmax(scores / 4)
    out = jnp.einsum("bts,bsf->btf", probs, x)
    return jnp.mean((out - y) ** 2)


def recurrent(weights, x, y):
    def turn(carry, w):
        new = jnp.sin(carry @ w)
        return new + 0.1 * carry, jnp.sum(new)

    out, sums = lax.scan(turn, x, weights)
    return jnp.mean((out - y) ** 2) + jnp.mean(sums * jnp.arange(sums.size))


def arguments(fun, seed):
    random = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape) / 3, jnp.float32)

    if fun is mlp:
        return (draw(16, 32), draw(32, 8), draw(32)), draw(32, 16), draw(32, 8)
    if fun is attention:
        return (draw(16, 16), draw(16, 16)), draw(16, 8, 16), draw(16, 8, 16)
    return draw(8, 16, 16), draw(32, 16), draw(32, 16)


def step_of(fun):
    def step(weights, x, y):
        loss, gradients = jax.value_and_grad(fun)(weights, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

    return step


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and at which of the equations where it can."""

    kind: str
    number: int


def _over(mesh, fun, *specs, out):
    return jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)


def _wrong_sum(kind, mesh, eqn, args):
    """A product whose contracted dimension is split."""
    ((left, right), _) = eqn.params["dimension_numbers"]
    specs = [
        P(*("data" if d == dims[0] else None for d in range(x.ndim)))
        for x, dims in zip(args, (left, right), strict=True)
    ]

    def product(a, b):
        (part,) = bind_as(eqn, [a, b], out_sharding=None)
        if kind == "dropped":
            return part
        if kind == "misgrouped":
            pairs = [[i, i + 1] for i in range(0, N, 2)]
            return lax.psum(part, "data", axis_index_groups=pairs)
        return 2 * lax.psum(part, "data")

    return [_over(mesh, product, *specs, out=P())(*args)]


def _wrong_part(kind, mesh, x):
    dim = next(d for d, n in enumerate(x.shape) if n and n % N == 0)
    spec = P(*("data" if d == dim else None for d in range(x.ndim)))
    steps = {
        "neighbour": [(i, (i + 1) % N) for i in range(N)],
        "reversed": [(i, (i - 1) % N) for i in range(N)],
        "missing": [(i, i) for i in range(N - 1)],
    }

    def moved(part):
        if kind == "slice":
            whole = lax.all_gather(part, "data", axis=dim, tiled=True)
            return lax.slice_in_dim(whole, 0, part.shape[dim], axis=dim)
        return lax.ppermute(part, "data", steps[kind])

    return _over(mesh, moved, spec, out=spec)(x)


def _can(kind, eqn):
    if kind == "backwards":
        return eqn.primitive.name == "scan"
    (aval, *more) = [x.aval for x in eqn.outvars]
    if more or not jnp.issubdtype(aval.dtype, jnp.floating):
        return False
    if kind in ("dropped", "doubled", "misgrouped"):
        if eqn.primitive.name != "dot_general":
            return False
        ((left, _), _) = eqn.params["dimension_numbers"]
        return len(left) == 1 and eqn.invars[0].aval.shape[left[0]] % N == 0
    return any(n and n % N == 0 for n in aval.shape)


def faulty(step, args, fault, mesh):
    """The step with the fault, and the line that it is at; None if it has no such equation."""
    program = jax.make_jaxpr(step, return_shape=True)(*args)
    program, shape = program
    able = [eqn for eqn in program.jaxpr.eqns if _can(fault.kind, eqn)]
    if not able:
        return None
    chosen = able[fault.number % len(able)]

    def rule(eqn, args):
        if eqn is not chosen:
            return bind_as(eqn, args)
        if fault.kind == "backwards":
            return bind_as(eqn, args, reverse=not eqn.params["reverse"])
        if fault.kind in ("dropped", "doubled", "misgrouped"):
            return _wrong_sum(fault.kind, mesh, eqn, args)
        (x,) = bind_as(eqn, args)
        return [_wrong_part(fault.kind, mesh, x)]

    @mylib.filter_jit(in_shardings=(None, P("data"), P("data")), mesh=mesh)
    def run(weights, x, y):
        again = jax.make_jaxpr(step)(weights, x, y)  # with these dtypes
        nonlocal chosen
        chosen = [eqn for eqn in again.jaxpr.eqns if _can(fault.kind, eqn)][
            fault.number % len(able)
        ]
        values = interpret(again, jax.tree.leaves((weights, x, y)), rule)
        return jax.tree.unflatten(jax.tree.structure(shape), values)

    return run, line_of(chosen)


def _equal(ours, theirs):
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return all(np.max(np.abs(x - y)) <= 1e-5 * np.max(np.abs(y)) for x, y in pairs)


def look(seed, mesh):
    """`found`, `line`, `missed`, or None if the draw has no such equation."""
    random = np.random.default_rng(seed)
    fun = (mlp, attention, recurrent)[random.integers(3)]
    fault = Fault(KINDS[random.integers(len(KINDS))], int(random.integers(100)))
    args, step = arguments(fun, seed), step_of(fun)
    drawn = faulty(step, args, fault, mesh)
    if drawn is None:
        return None
    run, line = drawn
    if _equal(run(*args), jax.jit(step)(*args)):
        return None  # such as numbers that change places and are only summed
    try:
        verify(run, *args, reference=step)
    except VerifyError as error:
        how = "line" if line.split(" ")[0] in str(error) else "found"
        return how, fun.__name__, fault, line, error.report.line
    return "missed", fun.__name__, fault, line


def main(first, last):
    mesh = mylib.make_mesh(data=N)
    counts = {}
    for seed in range(first, last):
        result = look(seed, mesh)
        if result is not None:
            counts[result[0]] = counts.get(result[0], 0) + 1
            if result[0] != "line":
                print(seed, *result, flush=True)
        jax.clear_caches()
        if seed % 10 == 9:
            print(seed + 1, counts, flush=True)
    print(counts)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
