"""`donate=`: what occurs twice, and JAX's warning, which is silenced in one thread only."""

import concurrent.futures
import threading
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from contexts import AUTO as MESH
from jax.sharding import NamedSharding, PartitionSpec as P

import mylib

HERE = NamedSharding(MESH, P("data"))


def both(a, b):
    return a + 1, b + 2


@pytest.fixture(params=["uncommitted", "sharded", "keys", "pinned"])
def x(request):
    x = jnp.arange(8.0)
    match request.param:
        case "sharded":
            return jax.device_put(x, HERE)
        case "keys":
            return jax.random.split(jax.random.key(0), 8)
        case "pinned":
            return jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
    return x


class TestTwice:
    @pytest.mark.parametrize("donate", ["all", "all-except-first"])
    def test_the_same_array(self, x, donate):
        def swap(a, b):
            return b, a

        def numbers(x):
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            return np.asarray(jax.random.key_data(x) if is_key else x)

        before = numbers(x)
        for y in mylib.filter_jit(swap, donate=donate)(x, x):
            np.testing.assert_array_equal(numbers(y), before)
        if donate == "all-except-first":
            assert not x.is_deleted()

    def test_three_times_and_in_the_function_itself(self):
        x = jnp.ones(8)
        f = mylib.filter_jit(jax.tree_util.Partial(lambda x, t: [x, *t], x), donate="all")
        out = f([x, x, x])
        assert all(jnp.all(y == 1) for y in out) and x.is_deleted()

    @pytest.mark.parametrize(
        ("first", "second"),
        [(None, P("data")), (P("data"), None), (P("data"), P("data")), (P(), P("data"))],
    )
    @pytest.mark.parametrize("donate", ["all", "all-except-first"])
    @pytest.mark.parametrize("there", [True, False])
    def test_with_in_shardings(self, first, second, donate, there):
        x = jax.device_put(jnp.ones(8), HERE) if there else jnp.ones(8)
        f = mylib.filter_jit(both, donate=donate, in_shardings=(first, second), mesh=MESH)
        if first is None and not there:
            x = mylib.filter_shard(x, P(), mesh=MESH)
        a, b = f(x, x)
        assert jnp.all(a == 2) and jnp.all(b == 3)
        assert x.is_deleted() == (donate == "all")

    def test_ahead_of_time(self):
        x = jnp.ones(8)
        compiled = mylib.filter_jit(both, donate="all").lower(x, x).compile()
        a, b = compiled(x, x)
        assert jnp.all(a == 2) and jnp.all(b == 3) and x.is_deleted()

    def test_where_one_thing_is_traced(self):
        x = jnp.ones(8)
        f = mylib.filter_jit(lambda a, b: (a * b).sum(), donate="all")
        grads = jax.grad(f, (0, 1))(x, x)
        assert jnp.all(grads[0] == 1) and not x.is_deleted()
        assert jax.jit(lambda x: f(x, x))(x) == 8

    def test_an_optimiser_that_keeps_the_first_parameters(self):
        params = mylib.filter_shard({"w": jnp.ones(8), "b": jnp.zeros(8)}, P("data"), mesh=MESH)
        optim = optax.contrib.prodigy(1.0)
        state = optim.init(params)
        assert any(x is params["w"] for x in jax.tree.leaves(state))

        @mylib.filter_jit(donate="all")
        def step(params, state):
            grads = jax.grad(lambda p: jnp.sum((p["w"] - 3) ** 2) + jnp.sum(p["b"] ** 2))(params)
            updates, state = optim.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", mylib.errors.RecompilationWarning)
            for _ in range(3):
                params, state = step(params, state)
        assert np.isfinite(params["w"]).all()


class TestSilence:
    def test_threads_leave_no_filters_behind(self):
        before = list(warnings.filters)

        def work(n):
            for i in range(4):
                f = mylib.filter_jit(lambda a, i=i: (a.sum(), n, i), donate="all")
                f(jnp.ones((n + 2, i + 1)))

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert list(warnings.filters) == before

    def test_warnings_of_other_threads_are_not_lost(self):
        inside, done = threading.Event(), threading.Event()

        def slow(x):
            inside.set()
            assert done.wait(60)
            return x.sum()

        f = mylib.filter_jit(slow, donate="all")
        with concurrent.futures.ThreadPoolExecutor(1) as pool, pytest.warns(UserWarning) as caught:
            running = pool.submit(f, jnp.ones(7))
            assert inside.wait(60)
            jax.jit(lambda x: x.sum(), donate_argnums=0)(jnp.ones(5))
            done.set()
            running.result()
        (warning,) = caught
        assert "float32[5]" in str(warning.message) and warning.filename.endswith("mlir.py")

    def test_jax_still_warns_inside_and_afterwards(self):
        lossy = jax.jit(lambda x: x.sum(), donate_argnums=0)

        def outer(x):
            with jax.ensure_compile_time_eval():
                lossy(jnp.ones(3))
            return x.sum()

        with pytest.warns(UserWarning, match=r"float32\[3\]") as caught:
            mylib.filter_jit(outer, donate="all")(jnp.ones(4))
        assert len(caught) == 1
        with pytest.warns(UserWarning, match=r"float32\[6\]"):
            lossy(jnp.ones(6))

    def test_also_for_other_placements(self):
        f = mylib.filter_jit(lambda x: x.sum(), donate="all")
        for spec in (P("data"), P(), P("model")):
            f(mylib.filter_shard(jnp.ones(8), spec, mesh=MESH))


@pytest.mark.parametrize("spec", [P(), P("data")], ids=str)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_donated_array_again_over_several_devices(spec, ahead):
    """On old versions of JAX it would end the process."""
    tree = {"x": jnp.ones(8), "key": jax.random.split(jax.random.key(0), 8)}
    tree, count = mylib.filter_shard((tree, jnp.ones(8)), spec, mesh=MESH)
    f = mylib.filter_jit(lambda tree, count: (tree, count + 1), donate="all")
    if ahead:
        f = f.lower(tree, count).compile()
    again, count = f(tree, count)
    for wrong in (tree, {**again, "x": tree["x"]}, {**again, "key": tree["key"]}):
        with pytest.raises(RuntimeError, match="deleted") as caught:
            f(wrong, count)
        assert "was given deleted arrays: tree['" in str(caught.value)
    again, _ = f(again, count)
    np.testing.assert_array_equal(again["x"], np.ones(8))


class TestNames:
    """`donate=("model", "state")`."""

    @pytest.mark.parametrize("ahead", [False, True])
    @pytest.mark.parametrize("by_keyword", [False, True])
    def test_only_these_are_donated(self, ahead, by_keyword):
        @mylib.filter_jit(donate=("model", "state"))
        def step(model, batch, state, *, scale):
            return model + batch * scale, state + 1

        model, batch, state, scale = (jnp.full(8, float(i)) for i in range(4))
        args, kwargs = (model, batch, state), {"scale": scale}
        if by_keyword:
            args, kwargs = (model,), {"scale": scale, "state": state, "batch": batch}
        call = step.lower(*args, **kwargs).compile() if ahead else step
        new, count = call(*args, **kwargs)
        assert jnp.all(new == 3) and jnp.all(count == 3)
        assert [x.is_deleted() for x in (model, batch, state, scale)] == [True, False, True, False]

    def test_with_static_leaves_and_in_shardings(self):
        @mylib.filter_jit(donate=("state",), in_shardings={"state": P("data")}, mesh=MESH)
        def step(kept, state, more):
            return kept[1], {"x": state["x"] + 1, "name": state["name"]}, more

        kept, state = (jnp.ones(8), jnp.ones(8)), {"x": jnp.zeros(8), "name": "s"}
        kept = mylib.filter_shard(kept, P(), mesh=MESH)
        *_, new, _ = step(kept, state, 3)
        assert state["x"].is_deleted() and jnp.all(new["x"] == 1) and new["x"].sharding == HERE
        assert not any(x.is_deleted() for x in kept)

    def test_star_arguments_and_methods(self):
        @mylib.filter_jit(donate=("rest", "more"))
        def f(x, *rest, **more):
            return x, rest, more

        x, y, z, w = (jnp.ones(8) * i for i in range(4))
        f(x, y, z, w=w)
        assert [a.is_deleted() for a in (x, y, z, w)] == [False, True, True, True]

        class Model(eqx.Module):
            x: jax.Array

            @mylib.filter_jit(donate=("self",))
            def step(self, y):
                return Model(self.x + y)

        model, y = Model(jnp.ones(8)), jnp.ones(8)
        assert jnp.all(model.step(y).x == 2) and model.x.is_deleted() and not y.is_deleted()

    def test_a_module_that_is_the_function_is_kept(self):
        linear, x = eqx.nn.Linear(8, 8, key=jax.random.key(0)), jnp.ones(8)
        mylib.filter_jit(linear, donate=("x",))(x)
        assert x.is_deleted() and not linear.weight.is_deleted()

    def test_an_array_that_is_also_kept(self):
        x = jnp.ones(8)
        a, b = mylib.filter_jit(both, donate=("a",))(x, x)
        assert not x.is_deleted() and jnp.all(a == 2) and jnp.all(b == 3)

    def test_errors_name_the_arguments(self):
        f = mylib.filter_jit(lambda a, b, c: (a, b + c), donate=("b",))
        a, b = jnp.ones(8), jnp.ones(8)
        f(a, b, a)
        with pytest.raises((RuntimeError, ValueError), match="deleted") as caught:
            f(a, b, a)
        said = str(caught.value).split("\n")[0]
        assert "<lambda> was given deleted arrays: b. A call that donates" in said
        one, other = (jax.device_put(a, device) for device in jax.devices()[1:3])
        with pytest.raises(ValueError, match="devices") as caught:
            f(one, other, one)
        notes = str(caught.value)
        assert "arrays[0] is a" in notes and "arrays[1] is b" in notes

    @pytest.mark.parametrize(
        ("donate", "told"),
        [
            (("modle",), r"donate=\('modle',\) .* of f, such as \('model', 'state'\)"),
            ("model", "donate='model' is none of .* no tuple of parameters"),
            (1, "donate=1 is none of 'all', "),
        ],
    )
    def test_what_is_no_name(self, donate, told):
        def f(model, state):
            return model

        with pytest.raises(ValueError, match=told):
            mylib.filter_jit(f, donate=donate)
