"""Static arguments that change in place, that can't be compared, and what is let go of them."""

import functools
import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from changing import Config, Holder
from contexts import AUTO as MESH
from jax.sharding import PartitionSpec as P

import mylib
from mylib._training.jit import dispatcher

ONE = jnp.ones(())
JITS = {
    "plain": mylib.filter_jit,
    "placed": functools.partial(mylib.filter_jit, out_shardings=P(), mesh=MESH),
}


class Scale(eqx.Module):
    config: object = eqx.field(static=True)
    by: object = None

    def __call__(self, x):
        return x * rate_in(self.config)


def rate_in(x):
    while not isinstance(x, Config):
        x = x.config if isinstance(x, Holder) else next(iter(x))
    return x.rate


def argument(jit, config):
    f = jit(lambda x, config: x * rate_in(config))
    return lambda: f(ONE, config)


def keyword(jit, config):
    f = jit(lambda x, *, config: x * rate_in(config))
    return lambda: f(ONE, config=config)


def field(jit, config):
    f = jit(lambda x, scale: scale(x))
    return lambda: f(ONE, Scale(config))


def module(jit, config):
    f = jit(Scale(config))
    return lambda: f(ONE)


def partial(jit, config):
    f = jit(eqx.Partial(lambda config, x: x * rate_in(config), config))
    return lambda: f(ONE)


CALLS = [argument, keyword, field, module, partial]
WITHIN = {
    "itself": lambda config: config,
    "frozen": Holder,
    "in a set": lambda config: Holder(frozenset({Holder(config)})),
}


@pytest.mark.parametrize("jit", JITS.values(), ids=JITS)
@pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
@pytest.mark.parametrize("made", CALLS)
def test_what_changes_in_place_is_compiled_anew(made, within, jit):
    config = Config(1.0)
    call = made(jit, within(config))
    for rate in (1.0, 2.0, 1.0, 3.0):
        config.rate = rate
        assert call() == rate


@pytest.mark.parametrize("made", CALLS)
def test_what_has_changed_back_is_not(made, monkeypatch):
    traces = []
    monkeypatch.setattr("test_static_arguments.rate_in", lambda x: traces.append(1) or x.rate)
    config = Config(1.0)
    call = made(mylib.filter_jit, config)
    for rate in (1.0, 2.0) * 3:
        config.rate = rate
        assert call() == rate
    assert len(traces) == 2


def test_what_takes_turns_with_other_values():
    config = Config(1.0)
    f = mylib.filter_jit(lambda x, config, name: x * config.rate)
    for rate, name in ((1.0, "a"), (1.0, "b"), (1.0, "a"), (2.0, "a"), (2.0, "b"), (1.0, "b")):
        config.rate = rate
        assert f(ONE, config, name) == rate


def test_what_was_compiled_ahead_of_time_refuses_other_values():
    config = Config(1.0)
    compiled = mylib.filter_jit(lambda x, config: x * config.rate).lower(ONE, config).compile()
    assert compiled(ONE, config) == 1
    config.rate = 2.0
    with pytest.raises(TypeError, match="other static arguments"):
        compiled(ONE, config)


class ByElement:
    def __eq__(self, other):
        return jnp.ones(2) == 1

    def __hash__(self):
        return 1


class Raises:
    def __eq__(self, other):
        raise OSError

    def __hash__(self):
        return 1


@pytest.mark.parametrize("kind", [ByElement, Raises])
@pytest.mark.parametrize("is_field", [False, True], ids=["leaf", "field"])
def test_what_cannot_be_compared_is_named(kind, is_field):
    f = mylib.filter_jit(lambda x, options: x)
    make, name = (lambda: Scale(kind()), r"\.config") if is_field else (kind, "")
    f(ONE, {"a": make()})
    with pytest.raises((ValueError, OSError)) as caught:
        f(ONE, {"a": make()})
    note = "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert f"was given options['a']{name.replace(chr(92), '')}, a {kind.__name__}" in note
    assert "must be comparable" in note


class Trainer:
    def step(self, x):
        return x + 1


def closure():
    return lambda x: x + 1


def apply(f, x):
    return f(x)


MADE = {
    "closures": (closure, lambda f: f),
    "gradients of closures": (closure, lambda f: eqx.filter_grad(f)),
    "wrapped": (closure, lambda f: eqx.filter_grad(mylib.filter_jit(f))),
    "arguments": (closure, lambda f: eqx.Partial(apply, f)),
    "methods": (Trainer, lambda trainer: trainer.step),
}


@pytest.mark.parametrize(("make", "wrap"), MADE.values(), ids=MADE)
def test_dead_functions_go(make, wrap):
    gone = []
    for _ in range(3):
        part = make()
        gone.append(weakref.ref(part))
        mylib.filter_jit(wrap(part))(ONE)
        del part
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


@pytest.mark.parametrize(
    "make",
    [
        lambda f: f,
        eqx.filter_grad,
        lambda f: eqx.Partial(apply, f),
        lambda f: eqx.filter_grad(eqx.Partial(apply, f)),
    ],
)
@pytest.mark.parametrize("part", [closure(), Trainer().step, jnp.sin, mylib.filter_jit(closure())])
def test_equal_functions_share_their_traces(make, part):
    traces = []

    def count(event, *args, **kwargs):
        traces.append(event)

    for i in range(3):
        if i == 1:
            gc.collect()
            jax.monitoring.register_event_duration_secs_listener(count)
        mylib.filter_jit(make(part))(ONE)
    jax.monitoring.unregister_event_duration_listener(count)
    assert traces == []


def test_a_wrapper_does_not_stay_with_what_it_wraps():
    f = closure()
    mylib.filter_jit(f)(ONE)
    wrapper = functools.wraps(f)(lambda x: f(x))
    gone = weakref.ref(wrapper)
    mylib.filter_jit(wrapper)(ONE)
    del wrapper
    gc.collect()
    assert gone() is None


def test_the_oldest_variant_goes(monkeypatch):
    monkeypatch.setattr(dispatcher, "_MOST", 4)
    traces = []
    f = mylib.filter_jit(lambda x, name: (traces.append(name), x)[1])
    for name in "abcdaebfa":
        f(ONE, name)
    # "b" was the oldest when "e" came, and came back.
    assert "".join(traces) == "abcdebf" and len(f.dispatcher.variants) == 4


@pytest.mark.slow
def test_as_many_programs_are_kept_as_by_the_peers():
    counts = []
    for jit in (mylib.filter_jit, eqx.filter_jit, lambda f: jax.jit(f, static_argnums=1)):
        traces = []
        f = jit(lambda x, name, traces=traces: (traces.append(name), x)[1])
        for _ in range(3):
            for i in range(260):
                f(ONE, f"{i}")
        counts.append(len(traces))
    assert counts == [260] * 3
