"""Names of other libraries are replaced during a call of ours, for its thread alone. `conftest.py`
compares them after all tests with what they were before.
"""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import changed_names
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.cudnn import fused_attention_stablehlo as attention
from jax.extend.core import Primitive
from jax.interpreters import mlir

import mylib
from mylib._core import compat as _compat
from mylib._core.compat import Replacement, cudnn_as_described, describe_cudnn

BEFORE = changed_names.now()
ONES = np.ones(4, np.float32)
PAGE = Path(__file__).parent.parent / "docs/changes-in-other-libraries.md"
ERROR, WARNINGS, VERSION, CAPABILITY = changed_names.NAMES


def changed():
    return {name for name, x in changed_names.now().items() if x is not BEFORE[name]}


def beside(fun):
    """What a function returns in a thread of its own, before this one goes on."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fun).result()


@pytest.fixture(autouse=True)
def all_as_before(monkeypatch):
    monkeypatch.setattr(_compat, "_cudnn", [])  # of tests that have run before
    assert not changed()
    yield
    assert not changed()


def test_the_page_lists_them():
    text = PAGE.read_text()
    assert all(f"`{name}`" in text for name in changed_names.NAMES) and "`__call__`" in text


def test_checks_of_errors():
    def plain():
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="not by mylib") as error:
            check = jax.jit(lambda x: eqx.error_if(x, x > 0, "not by mylib"))
            jax.block_until_ready(check(ONES))
        assert not isinstance(error.value, eqx.EquinoxRuntimeError)
        return changed()

    def ours(x):
        seen.append(beside(plain))
        return eqx.error_if(x, x > 1, "by mylib")

    seen = []
    with pytest.raises(eqx.EquinoxRuntimeError, match="by mylib"):
        mylib.filter_jit(ours)(2 * ONES)
    assert seen == [{ERROR}]


def test_the_warning_about_donated_buffers():
    def lossy(x):
        return x.sum()

    def plain():
        jax.jit(lossy, donate_argnums=0)(jnp.ones(4 + len(seen), jnp.float32))
        return changed()

    def ours(x):
        seen.append(beside(plain))
        return lossy(x)

    seen = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f = mylib.filter_jit(ours, donate="all")
        for size in (2, 3):  # the second is a new trace of a program that has been called
            f(jnp.ones(size, jnp.float32))
    assert seen == [{ERROR, WARNINGS}] * 2
    texts = [str(x.message) for x in caught if "Some donated buffers" in str(x.message)]
    assert ["float32[4]" in text for text in texts] == [True, False]
    assert ["float32[5]" in text for text in texts] == [False, True]


def test_only_what_donates_silences_the_warning():
    seen = []
    mylib.filter_jit(lambda x: seen.append(changed()) or x)(ONES)
    assert seen == [{ERROR}]


@pytest.mark.parametrize("way", ["lower", "audit", "plan"])
def test_the_checks_of_cudnn(way):
    class Model(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            seen.append((beside(plain), changed(), asked()))
            return x @ self.weight

    def asked():
        try:
            return attention.check_cudnn_version(), attention.check_compute_capability("9.0")
        except RuntimeError as error:
            return str(error)

    def plain():
        return asked(), changed()

    def step(x, model):
        return jax.tree.map(lambda w: w - (x.T @ model(x)), model)

    def call(x, w):
        return Model(w)(x)

    x, w, seen = jax.ShapeDtypeStruct((64, 64), jnp.float32), jnp.ones((64, 64)), []
    describe_cudnn(91000, (9, 0))
    outside = asked()
    assert outside != (91000, True)
    if way == "plan":
        mylib.plan(step, x, Model(w), machine=mylib.machines.gpu("h100"), compile=0)
    else:
        mylib.filter_jit(call).lower(x, w) if way == "lower" else mylib.audit(call, x, w)
    assert seen
    for (theirs, there), here, ours in seen:
        assert theirs == outside and ours == (91000, True)
        assert {VERSION, CAPABILITY} <= there == here


def test_nothing_is_described_without_a_machine():
    with cudnn_as_described():
        assert not changed()


def test_calls_of_models_in_a_plan():
    class Model(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            names.append(threading.current_thread().name)
            return x @ self.weight

    original = vars(Model)["__call__"]

    def plain():
        inside.append(vars(Model)["__call__"] is not original)
        return Model(jnp.eye(64))(jnp.ones((2, 64)))

    def step(x, model, state):
        def loss(model):
            theirs.append(beside(plain))
            return jnp.mean(model(x) ** 2)

        updates, state = optim.update(jax.grad(loss)(model), state, model)
        return eqx.apply_updates(model, updates), state

    optim, inside, theirs, names = optax.sgd(0.1), [], [], []
    model = Model(jnp.ones((64, 64)))
    args = np.ones((16, 64), np.float32), model, optim.init(model)
    plan = mylib.plan(step, *args, compile=0, machine=mylib.machines.gpu("h100"))
    assert vars(Model)["__call__"] is original
    assert inside and all(inside)
    assert all(np.all(np.asarray(x) == 1) for x in theirs)
    assert plan.layers is not None


def test_a_call_that_traces_nothing_replaces_nothing(monkeypatch):
    def entering(change):
        entered.append(change.name)
        enter(change)

    entered, enter = [], Replacement.__enter__
    f = mylib.filter_jit(lambda x: jnp.sin(x), donate="all")
    f(jnp.ones(4))
    monkeypatch.setattr(Replacement, "__enter__", entering)
    f(jnp.ones(4))
    assert entered == []
    f(jnp.ones(5))
    assert {"_error", "warnings"} <= set(entered)
    entered.clear()
    f(jnp.ones(5)), f(jnp.ones(4))
    assert entered == []


def test_a_primitive_of_others_may_check_each_time_that_it_is_lowered():
    checked_p = Primitive("check_of_others")
    checked_p.def_abstract_eval(lambda x: x)
    rule = mlir.lower_fun(
        lambda x: eqx.error_if(x, jnp.sum(x) > 10, "too large"), multiple_results=False
    )
    mlir.register_lowering(checked_p, rule)
    # Not in the first program.
    f = mylib.filter_jit(lambda x: (checked_p.bind(x) if x.size == 8 else x) * 2)
    for size in (4, 8, 4):
        np.testing.assert_allclose(f(jnp.ones(size)), 2)
    mesh = mylib.make_mesh(data=8)
    several = mylib.filter_shard(jnp.full(8, 2.0), jax.P("data"), mesh=mesh)
    # The trace is there, and lowered again: Equinox's own check would stop seven devices.
    with pytest.raises(ValueError, match="error_if is called in a call that mylib can't analyse"):
        f(several)


class Owner:
    @staticmethod
    def name():
        return "theirs"


def test_until_the_last_thread_has_left():
    """Whichever comes first leaves first."""
    change = Replacement(Owner, "name", lambda original: staticmethod(lambda: "ours"))
    theirs, entered, leave = vars(Owner)["name"], threading.Event(), threading.Event()

    def other():
        with change:
            entered.set()
            leave.wait(10)

    with ThreadPoolExecutor(1) as pool:
        with change:
            done = pool.submit(other)
            assert entered.wait(10)
        assert Owner.name() == "ours" and change.original is theirs
        leave.set()
        done.result()
    assert vars(Owner)["name"] is theirs is change.original


def test_after_an_error():
    change = Replacement(Owner, "name", lambda original: staticmethod(lambda: "ours"))
    with pytest.raises(KeyboardInterrupt), change:
        raise KeyboardInterrupt
    assert Owner.name() == "theirs"
