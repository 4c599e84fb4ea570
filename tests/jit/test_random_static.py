"""Random calls with static arguments that change in place, take turns, or are equal and yet not
the same: the results are those of the function itself, and it is traced as often as by the peers.

    python tests/jit/test_random_static.py 0 1000       these seeds
"""

import random
import sys
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from changing import Config, Holder
from jax.sharding import PartitionSpec as P

import mylib

MESH = mylib.make_mesh(data=len(jax.devices()))
X = jnp.arange(8.0)
# Older ones run the old program.
PEERS_LOOK_AGAIN = jax.__version_info__ >= (0, 12)


class Model(eqx.Module):
    weight: jax.Array
    inner: object
    config: object = eqx.field(static=True)

    def __call__(self, x):
        return x * self.weight, self.inner, self.config


def double(x):
    return 2 * x


# What peers tell apart as we do. Texts and tuples are made anew by each call.
PLAIN = [lambda: 2, lambda: 3.5, lambda: "ab" * 2, lambda: None, lambda: double, lambda: (4, "b")]
ALIKE = [lambda: 1, lambda: True, lambda: 1.0]  # to Equinox
SIGNS = [lambda: 0.0, lambda: -0.0, lambda: float("nan")]  # to `jax.jit`, too


class Calls:
    """A random sequence of calls, for which each function gets objects of its own."""

    def __init__(self, seed, values, changing):
        rng = random.Random(seed)
        self.values, self.rng = values, rng
        self.steps = []
        for _ in range(rng.randrange(4, 12)):
            self.steps.append(
                (
                    rng.randrange(3) if changing else None,
                    rng.choice([1, 2, 3.5, "c"]),
                    [rng.randrange(3 + len(values)) for _ in range(2)],
                    rng.random() < 0.2,
                )
            )

    def __iter__(self):
        configs = [Config(1), Config(2)]
        configs.append(Holder(configs[1]))
        for which, rate, picked, is_longer in self.steps:
            if which is not None:
                (configs[which] if which < 2 else configs[1]).rate = rate
                pool = [*configs, *(make for make in self.values)]
            else:
                pool = [*self.values, *self.values[:1] * 3]
            chosen = [pool[i] for i in picked]
            chosen = [x() if callable(x) else x for x in chosen]
            yield jnp.concatenate([X, X]) if is_longer else X, chosen


def told(x):
    """What is static, with types, which `==` would not tell apart."""
    return repr(x) if x is not double else "double"


def run(compiled, calls):
    """The results of the calls, and how often the function was traced."""
    traces, results = [], []

    def f(x, a, b):
        traces.append((told(a), told(b)))
        return x * 2 if a is None else x + len(told(a)), jnp.asarray(len(told(b)))

    g = compiled(f)
    for x, (a, b) in calls:
        y, n = g(x, a, b)
        results.append((y.tolist(), int(n)))
    return results, len(traces)


def ours(f):
    return mylib.filter_jit(f)


def placed(f):
    return mylib.filter_jit(f, in_shardings={"x": P("data")}, out_shardings=P(), mesh=MESH)


def jax_jit(f):
    return jax.jit(f, static_argnums=(1, 2))


def check(seed):
    warnings.simplefilter("ignore", mylib.errors.StaticNumberWarning)
    for values, changing in ((PLAIN + ALIKE + SIGNS, False), (PLAIN + ALIKE + SIGNS, True)):
        calls = Calls(seed, values, changing)
        wanted, _ = run(lambda f: f, calls)
        assert run(ours, calls)[0] == run(placed, calls)[0] == wanted
    for changing in (False, True) if PEERS_LOOK_AGAIN else (False,):
        for peer, values in ((eqx.filter_jit, PLAIN), (jax_jit, PLAIN + ALIKE)):
            calls = Calls(seed, values, changing)
            wanted = run(peer, calls)
            assert run(ours, calls) == run(placed, calls) == wanted
    check_models(seed)


def check_models(seed):
    """Static fields and leaves of a Module, as an argument and as the function itself."""
    calls = Calls(seed, PLAIN + ALIKE + SIGNS, True)
    weight = jnp.asarray(2.0)
    for jit in (ours, lambda f: mylib.filter_jit(f, out_shardings=P(), mesh=MESH)):
        call = jit(lambda model, x: (*model(x), len(told(model.config)), len(told(model.inner))))
        for x, (a, b) in calls:
            model = Model(weight, a, b)
            made = call(model, x)
            assert made[0].tolist() == (x * 2).tolist()
            assert [told(y) for y in made[1:]] == list(
                map(told, (a, b, len(told(b)), len(told(a))))
            )
    for jit in (ours, lambda f: mylib.filter_jit(f, out_shardings=P(), mesh=MESH)):
        config = Config(1)
        call = jit(Model(weight, Holder(config), config))
        for i, (x, _) in enumerate(calls):
            config.rate = calls.steps[i][1]
            _, inner, outer = call(x)
            assert told(outer) == told(config) == told(inner.config)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_calls_are_those_of_the_peers(seed):
    check(seed)


if __name__ == "__main__":
    for seed in range(*map(int, sys.argv[1:3])):
        try:
            check(seed)
        except Exception:
            print("seed", seed, flush=True)
            raise
        print(seed, flush=True)
