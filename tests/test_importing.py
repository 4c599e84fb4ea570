"""Importing mylib changes nothing in JAX and Equinox, and loads what most programs use."""

import threading

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scripts import printed_by

import mylib

X = jnp.ones(3)
# What JAX raises for a failed callback: one at the call, the other later.
FAILED = (ValueError, jax.errors.JaxRuntimeError)

STATE = """
import atexit, logging
import equinox as eqx, jax, jax.monitoring
import equinox._errors, jax._src.interpreters.mlir, jax._src.monitoring
registered = []
atexit.register = lambda f, *args, **kwargs: registered.append(f)

def state():
    names = list(logging.root.manager.loggerDict)
    loggers = {name: list(logging.getLogger(name).filters) for name in names}
    return {
        "Equinox's check": equinox._errors._error,
        "JAX's warnings": jax._src.interpreters.mlir.warnings,
        "listeners": list(jax._src.monitoring.get_event_duration_listeners()),
        "filters": {name: filters for name, filters in loggers.items() if filters},
        "handlers": list(registered),
    }

before = state()
import mylib
after = state()
print({name: after[name] for name in after if after[name] != before[name]})
"""


def test_it_changes_nothing(checkout_env):
    assert printed_by("-c", STATE, env=checkout_env).strip() == "{}"


@pytest.mark.slow
def test_rooms_that_most_programs_don_t_use_are_not_loaded(checkout_env):
    script = (
        "import sys, jax, jax.numpy as jnp, mylib\n"
        "lazy = {'_programs', '_planning', '_testing', '_training.fsdp', '_training.matrices'}\n"
        "lazy |= {'_training.per_device', '_core.show', '_core.rules', '_moving.watch'}\n"
        "lazy |= {'_moving.processes', '_moving.links'}\n"
        "lazy |= {'contracts', 'data', 'loops', 'machines', 'mpmd', 'rules', 'testing'}\n"
        "print(sorted(name for name in lazy if f'mylib.{name}' in sys.modules))\n"
        "mesh = mylib.make_mesh(data=-1)\n"
        "f = mylib.filter_jit(lambda x: x + 1, in_shardings=jax.P(), mesh=mesh)\n"
        "f(mylib.filter_shard(jnp.ones(8), jax.P('data'), mesh))\n"
        "print(sorted(name for name in lazy if f'mylib.{name}' in sys.modules))\n"
        "print(mylib.audit.__name__, mylib.data.prefetch.__name__)\n"
        "print(mylib.results.Report.__module__)\n"
        "from mylib import contracts, show\n"
        "print(set(mylib.__all__) <= set(dir(mylib)))\n"
    )
    told = printed_by("-c", script, env=checkout_env).splitlines()
    assert told == ["[]", "[]", "audit prefetch", "mylib.results", "True"]


_TIMES = """
import gc, time
gc.disable()
start = time.process_time()
import jax, equinox
there = time.process_time()
import mylib
print(there - start, time.process_time() - there)
"""


@pytest.mark.slow
def test_how_long_it_takes(checkout_env, tmp_path):
    """At most 15 % of what JAX and Equinox take, with warm bytecode. Time of this process, and the
    best of ten: other processes don't count. Without garbage collection, which falls into either
    part by chance.
    """
    env = {**checkout_env, "PYTHONPYCACHEPREFIX": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    _, *runs = [printed_by("-c", _TIMES, env=env).split() for _ in range(11)]
    theirs, ours = (min(map(float, times)) for times in zip(*runs, strict=True))
    assert ours <= 0.15 * theirs


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'mylib' has no attribute 'filter_pjit'"):
        mylib.filter_pjit  # noqa: B018


def checked(x):
    return eqx.error_if(x * 2, jnp.any(x < 0), "negative")


def has_callback(lowered):
    return "callback" in lowered.as_text()


class TestFunctionsOfBoth:
    """A function of the user's that is called in a program of ours, and in one of JAX's."""

    def test_ours_first(self):
        inner = jax.jit(lambda x: checked(x))
        ours, plain = mylib.filter_jit(lambda x: inner(x) + 1), jax.jit(lambda x: inner(x) + 1)
        assert not has_callback(ours.lower(X))
        assert has_callback(plain.lower(X))
        np.testing.assert_array_equal(ours(X), plain(X))
        with pytest.raises(eqx.EquinoxRuntimeError, match="negative"):
            ours(-X)
        with pytest.raises(FAILED, match="negative"):
            jax.block_until_ready(plain(-X))

    def test_the_other_first(self):
        inner = jax.jit(lambda x: checked(x))
        plain, ours = jax.jit(lambda x: inner(x) + 1), mylib.filter_jit(lambda x: inner(x) + 1)
        assert has_callback(plain.lower(X))
        assert not has_callback(ours.lower(X))
        np.testing.assert_array_equal(ours(X), plain(X))
        with pytest.raises(eqx.EquinoxRuntimeError, match="negative"):
            ours(-X)

    def test_equinox_is_as_it_was(self):
        ours, theirs = mylib.filter_jit(checked), eqx.filter_jit(checked)
        np.testing.assert_array_equal(ours(X), theirs(X))
        assert not has_callback(ours.lower(X)) and has_callback(theirs.lower(X).lowered)
        with pytest.raises(eqx.EquinoxRuntimeError, match="negative"):
            theirs(-X)
        with pytest.raises(eqx.EquinoxRuntimeError, match="negative"):
            eqx.error_if(X, jnp.any(X > 0), "negative")

    def test_in_threads(self):
        """Ten of them at once: each gets its own check."""
        inner = jax.jit(lambda x, n: checked(x + n))
        found = [None] * 10
        start = threading.Barrier(10)

        def run(i):
            x = jnp.full(3 + i // 2, 1.0)
            start.wait(60)
            jit = mylib.filter_jit if i % 2 else jax.jit
            lowered = jit(lambda x: inner(x, jnp.float32(i)) + 1).lower(x)
            found[i] = has_callback(lowered)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert found == [True, False] * 5


def test_equinox_s_errors_in_others_programs_are_logged_as_before(caplog):
    """After a call of ours, too. JAX logs what a callback raises."""
    mylib.filter_jit(checked)(X)
    with pytest.raises(FAILED):
        jax.block_until_ready(jax.jit(checked)(-X))
    assert any(record.exc_info for record in caplog.records)


# Equinox imports `jax.extend`, after which JAX 0.12 traces anew, with or without us.
LATER = """
import equinox, jax.extend, mylib
traced = []
f = jax.jit(lambda x: (traced.append(x), x)[1])
f(1.0)
mylib.filter_jit, mylib.errors.PlanError, mylib.plan, mylib.testing.verify
f(1.0)
print(len(traced))
"""


def test_what_is_compiled_is_not_compiled_again_at_the_first_use(checkout_env):
    assert printed_by("-c", LATER, env=checkout_env) == "1\n"
