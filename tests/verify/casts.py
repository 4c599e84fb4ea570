"""Random steps with casts to narrow types, right ones and wrong ones: no alarm, and none hidden?

    python tests/verify/casts.py 0 200

Each seed draws a model, an optimiser, and the dtypes of casts: of the batch, the weights, what is
between them, a metric. The step is right, or has one of `WRONG`. Add models to `MODELS`, and
faults to `WRONG`: each takes the gradients of one device, and returns those of the step.
"""

import sys
import traceback
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    # 8 simulated devices, as in the tests.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import conftest  # noqa: F401

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import mylib
from mylib.testing import VerifyError, verify

MESH = mylib.make_mesh(data=8)
ROWS, WIDTH = 16, 8
DTYPES = (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)


def through(dtype, x):
    return x if dtype is None else x.astype(dtype).astype(x.dtype)


def mlp(cast, weights, x):
    hidden = jnp.tanh(cast("inside", x @ weights[0]))
    return hidden @ weights[1] + jnp.mean(weights[2], 0)


def attention(cast, weights, x):
    """Of each row's own tokens, with a mask whose fills are the least number."""
    tokens = jnp.tanh(x[:, None, :] * weights[2][:4])
    scores = jnp.einsum("btf,fg,bsg->bts", tokens, weights[0], tokens)
    mask = jnp.tril(jnp.ones((4, 4), bool))
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return jnp.mean(jax.nn.softmax(cast("inside", scores)) @ tokens, 1) @ weights[1]


def recurrent(cast, weights, x):
    def turn(carry, w):
        return jnp.tanh(cast("inside", carry @ w)), None

    return lax.scan(turn, x, jnp.stack(weights))[0]


def in_low_precision(cast, weights, x):
    """Products of bfloat16 numbers, and their gradients."""
    narrow = [w.astype(jnp.bfloat16) for w in weights]
    hidden = jax.nn.gelu(x.astype(jnp.bfloat16) @ narrow[0])
    return (cast("inside", hidden) @ narrow[1]).astype(x.dtype) + weights[2][0]


MODELS = (mlp, attention, recurrent, in_low_precision)
OPTIMISERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
}

PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
WRONG = {
    "not summed": lambda g: g,
    "summed in place of averaged": lambda g: lax.psum(g, "data"),
    "zero": lambda g: 0 * g,
    "negated": lambda g: -lax.pmean(g, "data"),
    "doubled": lambda g: 2 * lax.pmean(g, "data"),
    "without a device": lambda g: lax.pmean(g * (lax.axis_index("data") != 3), "data"),
    "in pairs": lambda g: lax.psum(g, "data", axis_index_groups=PAIRS) / 2,
}
SMALL = ("without a device", "in pairs")


def right(g):
    return lax.pmean(g, "data")


@dataclass(frozen=True)
class Case:
    model: object
    optimiser: str
    casts: dict
    auto: bool
    wrong: str
    weight: int

    def loss(self, weights, x, y):
        cast = self.cast
        weights = [cast("weights", w) for w in weights]
        out = self.model(cast, weights, cast("batch", x))
        return jnp.mean((cast("results", out) - y) ** 2)

    def cast(self, what, x):
        return through(self.casts.get(what), x)

    def step(self, summed, weights, state, x, y):
        value, grads = jax.value_and_grad(self.loss)(weights, x, y)
        grads = [summed(i, g) for i, g in enumerate(grads)]
        updates, state = OPTIMISERS[self.optimiser]().update(grads, state, weights)
        new = optax.apply_updates(weights, updates)
        metric = self.cast("metric", summed(-1, value))
        return new, state, value if summed is _as_it_is else lax.pmean(value, "data"), metric

    def per_device(self):
        def summed(i, g):
            return (WRONG[self.wrong] if self.wrong and i == self.weight else right)(g)

        return mylib.filter_shard_map(
            partial(self.step, summed),
            mesh=MESH,
            in_specs=(P(), P(), P("data"), P("data")),
            out_specs=P(),
            check_vma=False,
        )


def _as_it_is(i, g):
    return g


def drawn(seed, wrong):
    random = np.random.default_rng(seed)
    where = ("batch", "weights", "inside", "results", "metric")
    casts = {
        what: DTYPES[random.integers(len(DTYPES))]
        for what in where
        if random.integers(2) or what == where[seed % len(where)]
    }
    # A part of a gradient may be less than what eight bits round off.
    if wrong and any(jnp.finfo(dtype).bits == 8 for dtype in casts.values()):
        kinds = [kind for kind in WRONG if kind not in SMALL]
    else:
        kinds = [*WRONG]
    model = MODELS[random.integers(len(MODELS))]
    # It has no infinity: of the fills of a mask it makes NaN, and so of all results.
    if model is attention and casts.get("inside") == jnp.float8_e4m3fn:
        casts["inside"] = jnp.float8_e5m2
    optimiser = [*OPTIMISERS][random.integers(len(OPTIMISERS))]
    fault = kinds[random.integers(len(kinds))] if wrong else ""
    case = Case(model, optimiser, casts, bool(random.integers(2)), fault, int(random.integers(2)))
    shapes = ((WIDTH, WIDTH),) * 3 + ((ROWS, WIDTH),) * 2
    *weights, x, y = (
        jnp.asarray(random.normal(size=s) / (2 if s[0] == WIDTH else 1), jnp.float32)
        for s in shapes
    )
    return case, (weights, OPTIMISERS[optimiser]().init(weights), x, y)


def look(seed, wrong):
    """Whether `verify` is right, and what it says."""
    case, args = drawn(seed, wrong)
    reference = partial(case.step, _as_it_is)
    try:
        if case.auto and not wrong:
            placed = (None, None, P("data"), P("data"))
            report = verify(mylib.filter_jit(reference, in_shardings=placed, mesh=MESH), *args)
        else:
            report = verify(case.per_device(), *args, reference=reference)
    except VerifyError as error:
        return wrong, f"{case}: {error}"
    return not wrong and report.wide is not None, f"{case}: {report}"


def main(first, last):
    counts = Counter()
    for seed in range(first, last):
        for wrong in (False, True):
            name = "wrong" if wrong else "right"
            try:
                good, text = look(seed, wrong)
            except Exception:
                good, text = False, traceback.format_exc()
            counts[name, good] += 1
            found = "as it should be" if good else f"BAD\n{text}"
            print(f"seed {seed}, a {name} step: {found}", flush=True)
        jax.clear_caches()
    print(dict(counts))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
