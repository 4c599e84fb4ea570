"""Gradients that devices combine otherwise than by a sum of each once. Contracts say what is sent,
and pass most of them; `verify` finds each.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from handwritten import SHAPES, exchanged, own_part, psum, scattered, sent, updated
from jax import lax
from jax.sharding import PartitionSpec as P

import mylib
from mylib.testing import VerifyError, verify

DEVICES = 8
MESH = mylib.make_mesh(data=DEVICES)
_HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]


def _all(g, **options):
    return lax.all_gather(g, "data", **options)


def _ring(g, turns):
    return lax.fori_loop(0, turns, lambda _, total: sent(total) + g, g)


def _unknown_one(g):
    """That of a device whose number depends on data."""
    number = (jnp.sum(g) > 0).astype(int)
    return lax.dynamic_index_in_dim(_all(g), number, 0, False)


@jax.custom_vjp
def _losing(w):
    return _all(w, tiled=True)


def _lost(_, g):
    return (scattered(g.at[: len(g) // 2].set(0)),)


_losing.defvjp(lambda w: (_losing(w), None), _lost)


def _first(g):
    return jnp.where(lax.axis_index("data") == 0, g, 0)


SUMS = {
    "nothing": lambda g: g,
    "pmax": lambda g: lax.pmax(g, "data"),
    "gather and index": lambda g: _all(g)[0],
    "gather and index the last": lambda g: _all(g)[-1],
    "gather and max": lambda g: _all(g).max(0),
    "gather and sum of half": lambda g: _all(g)[:4].sum(0),
    "gather and the first rows": lambda g: _all(g, tiled=True)[: len(g)],
    "sum of the first": lambda g: psum(_first(g)),
    "sum of half, masked": lambda g: psum(g * (lax.axis_index("data") < 4)),
    "sum of half, selected": lambda g: psum(jnp.where(lax.axis_index("data") < 4, g, 0)),
    "sum of weighted ones": lambda g: psum(g * (jnp.arange(8.0) / 28)[lax.axis_index("data")]),
    "half of the devices": lambda g: lax.psum(g, "data", axis_index_groups=_HALVES),
    "short ring": lambda g: _ring(g, 3),
    "ring without a sum": lambda g: lax.fori_loop(0, DEVICES - 1, lambda _, x: sent(x), g),
    "own and sum": lambda g: g + psum(g),
    "summed twice": lambda g: psum(psum(g)),
    "sum of what is clipped of an unknown one": lambda g: psum(
        jnp.clip(_unknown_one(g), -1e-3, 1e-3)
    ),
    "gathered in reversed order": lambda g: _all(
        scattered(g), axis_index_groups=[[*reversed(range(DEVICES))]], tiled=True
    ),
}
SCATTERS = {
    "own part": own_part,
    "pmax and slice": lambda g: own_part(lax.pmax(g, "data")),
    "exchange and index": lambda g: exchanged(g)[0],
    "exchange and max": lambda g: exchanged(g).max(0),
    "gather and index": lambda g: own_part(_all(g)[0]),
    "sum of the first": lambda g: scattered(_first(g)),
    "the neighbour's part": lambda g: sent(scattered(g)),
}


def _loss(model, x):
    """A device's part of the mean."""
    return jnp.sum((jnp.tanh(x @ model["up"]) @ model["down"]) ** 2) / 64


def one_device(model, x):
    return updated(model, jax.grad(_loss)(model, x))


def look(step, spec):
    random = np.random.default_rng(0)
    model = {k: random.normal(size=SHAPES[k]).astype("float32") / 4 for k in ("up", "down")}
    x = random.normal(size=(64, 16)).astype("float32")
    mapped = jax.shard_map(
        step, mesh=MESH, in_specs=(spec, P("data")), out_specs=spec, check_vma=False
    )
    return verify(jax.jit(mapped), model, x, reference=one_device)


def replicated(way):
    def step(model, x):
        gradients = jax.grad(_loss)(model, x)
        return updated(model, {"up": psum(gradients["up"]), "down": way(gradients["down"])})

    return look(step, P())


def sharded(way, gathered=lambda w: _all(w, tiled=True)):
    def step(model, x):
        whole = {"up": model["up"], "down": _all(model["down"], tiled=True)}

        def loss(up):
            return _loss({**whole, "up": gathered(up)}, x)

        g = jax.grad(lambda down: _loss({"up": gathered(model["up"]), "down": down}, x))
        return updated(model, {"up": jax.grad(loss)(model["up"]), "down": way(g(whole["down"]))})

    return look(step, P("data"))


def wrong(error, *names):
    report = error.value.report
    return {x.name for x in report.wide if x.differs} == {f"['{name}']" for name in names}


def test_right_ones():
    assert not replicated(psum).differs
    assert not sharded(scattered).differs


@pytest.mark.parametrize("way", SUMS)
@pytest.mark.everyday("nothing", "sum of half, masked", "own and sum")
def test_sums(way):
    with pytest.raises(VerifyError) as error:
        replicated(SUMS[way])
    assert wrong(error, "down")


@pytest.mark.parametrize("way", SCATTERS)
@pytest.mark.everyday("own part", "exchange and max")
def test_scatters(way):
    with pytest.raises(VerifyError) as error:
        sharded(SCATTERS[way])
    assert wrong(error, "down")


def test_a_gradient_rule_that_loses_rows():
    with pytest.raises(VerifyError) as error:
        sharded(scattered, _losing)
    assert wrong(error, "up")
