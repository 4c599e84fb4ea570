"""Faults that are put into steps, one each: does `verify` find them, and their line?

    python tests/verify/seeded_faults.py 0 200

A step is traced and its program is run again with one equation's result computed as a wrong
compiler would: a sum over devices dropped, doubled or made in the wrong groups, a part that is the
neighbour's, a slice in place of a part, a permutation reversed or with a pair missing, a loop that
runs backwards. Or a step that is written per device has a wrong `in_specs`, or gives a kernel
that needs all rows each device's own, as `opaque` allows.
"""

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    # 8 simulated devices, as in the tests.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import conftest  # noqa: F401

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import mylib
from mylib._core.jaxprs import all_equations, bind_as, interpret, line_of
from mylib.testing import VerifyError, verify

N = 8
KINDS = "dropped doubled misgrouped neighbour slice reversed missing backwards specs opaque".split()


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


def drawn(random, *shapes):
    return [jnp.asarray(random.normal(size=shape) / 3, jnp.float32) for shape in shapes]


def arguments(fun, seed):
    random = np.random.default_rng(seed)
    if fun is mlp:
        *weights, x, y = drawn(random, (16, 32), (32, 8), (32,), (32, 16), (32, 8))
    elif fun is attention:
        *weights, x, y = drawn(random, (16, 16), (16, 16), (16, 8, 16), (16, 8, 16))
    else:
        weights, x, y = drawn(random, (8, 16, 16), (32, 16), (32, 16))
    return weights, x, y


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
    """The step with the fault, and the lines that it may be at; None if it has no such equation."""
    program, shape = jax.make_jaxpr(step, return_shape=True)(*args)
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

    return run, [line_of(chosen)]


AXES = {"a": 2, "b": 2, "c": 2}
ROWS, COLUMNS = P(("a", "b")), P(None, "c")


def shares(weights, x, y):
    hidden = jnp.sin(x @ weights) + 2
    return jnp.mean((hidden / jnp.sum(hidden, 0) - y) ** 2)


def wrong_specs(random):
    """A step per device, one of whose arguments arrives split over other axes."""
    specs = [COLUMNS, ROWS, P(("a", "b"), "c")]
    number = int(random.integers(3))
    orders = [x for x in itertools.permutations(AXES) if x != tuple(AXES)]
    first, second, third = orders[random.integers(len(orders))]
    specs[number] = (P(None, first), P((first, second)), P((first, second), third))[number]

    def on_device(weights, x, y):
        hidden = jnp.sin(x @ weights) + 2
        parts = hidden / lax.psum(jnp.sum(hidden, 0), ("a", "b"))
        return lax.pmean(jnp.mean((parts - y) ** 2), ("a", "b", "c"))

    run = _over(mylib.make_mesh(**AXES), on_device, *specs, out=P())
    return run, shares, drawn(random, (16, 32), (32, 16), (32, 32))


KERNELS = {
    "centred": lambda x: x - jnp.mean(x, 0),
    "summed": lambda x: jnp.cumsum(x, 0),
    "sorted": lambda x: jnp.sort(x, 0),
    "turned": lambda x: x[::-1],
}


def wrong_opaque(random):
    """A step whose kernel sees the rows of one device, and needs all."""
    kernel = KERNELS[[*KERNELS][random.integers(len(KERNELS))]]

    def of(kernel):
        return lambda weights, x, y: jnp.mean((kernel(jnp.tanh(x @ weights)) - y) ** 2)

    per_device = mylib.filter_shard_map(
        mylib.opaque(kernel), mesh=mylib.make_mesh(data=N), in_specs=P("data"), out_specs=P("data")
    )
    return of(per_device), of(kernel), drawn(random, (16, 32), (32, 16), (32, 32))


def written_per_device(kind, random):
    """The step, the lines of its function per device, the right step and the arguments."""
    loss, right, args = (wrong_specs if kind == "specs" else wrong_opaque)(random)
    equations = all_equations(jax.make_jaxpr(loss)(*args))
    (mapped,) = (eqn for eqn in equations if eqn.primitive.name == "shard_map")
    lines = [line_of(eqn) for eqn in all_equations(mapped.params["jaxpr"])]
    return jax.jit(step_of(loss)), lines, step_of(right), args


def _equal(ours, theirs):
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return all(np.max(np.abs(x - y)) <= 1e-5 * np.max(np.abs(y)) for x, y in pairs)


def look(seed, mesh):
    """`found`, `line`, `missed`, or None if the draw has no such equation, or isn't wrong."""
    random = np.random.default_rng(seed)
    fun = (mlp, attention, recurrent)[random.integers(3)]
    fault = Fault(KINDS[random.integers(len(KINDS))], int(random.integers(100)))
    if fault.kind in ("specs", "opaque"):
        run, lines, step, args = written_per_device(fault.kind, random)
    else:
        args, step = arguments(fun, seed), step_of(fun)
        made = faulty(step, args, fault, mesh)
        if made is None:
            return None
        run, lines = made
    if _equal(run(*args), jax.jit(step)(*args)):
        return None  # such as numbers that change places and are only summed
    try:
        verify(run, *args, reference=step)
    except VerifyError as error:
        told = any(line.split(" ")[0] in str(error) for line in lines)
        return "line" if told else "found", fun.__name__, fault, lines, error.report.line
    return "missed", fun.__name__, fault, lines


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
