"""`opaque`, `vary`, and the holes in JAX's types that `filter_shard_map` closes."""

import os
import textwrap
from contextlib import nullcontext
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contexts import AUTO, MESHES
from jax import lax
from jax.experimental import io_callback, pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, PartitionSpec as P
from scripts import run_python

import mylib

X = np.arange(1.0, 33.0, dtype=np.float32).reshape(8, 4) / 32


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def copy_kernel(x):
    def kernel(source, target):
        target[...] = source[...]

    # `interpret=True` loses the types in a loop of its own; the simulated TPU keeps them.
    return pl.pallas_call(kernel, out_shape=like(x), interpret=pltpu.InterpretParams())(x)


@mylib.opaque(fwd=lambda x: (copy(x), None), bwd=lambda _, g: (copy_kernel(g),))
def copy(x):
    return copy_kernel(x)


def on_host(f, *args):
    return jax.pure_callback(f, jax.ShapeDtypeStruct(args[0].shape, args[0].dtype), *args)


def times_forward(x, w):
    return times(x, w), (x, w)


def times_backward(kept, g):
    x, w = kept
    return on_host(np.multiply, g, w * jnp.ones_like(g)), jnp.sum(on_host(np.multiply, g, x))


@mylib.opaque(fwd=times_forward, bwd=times_backward)
def times(x, w):
    return on_host(lambda x, w: x * w, x, w)


def collectives(text):
    return mylib.audit(text, mesh=AUTO).collectives


def gradient_text(f, *args):
    loss = jax.jit(jax.grad(lambda *args: jnp.sum(f(*args) ** 2), range(len(args))))
    return loss(*args), loss.lower(*args).compile().as_text()


class TestOpaque:
    def test_the_public_case(self):
        """A kernel that copies, split over "data" alone, on a mesh that has "model", too: its
        gradient has nothing to communicate.
        """
        specs = dict(mesh=AUTO, in_specs=P("data", None), out_specs=P("data", None))
        before = mylib.filter_shard_map(copy, check_vma=False, **specs)
        (gradient,), text = gradient_text(before, jnp.asarray(X))
        np.testing.assert_allclose(gradient, 2 * X)
        (only,) = collectives(text)
        assert (only.kind, only.axes) == ("all-reduce", ("model",))

        after = mylib.filter_shard_map(copy, **specs)
        (gradient,), text = gradient_text(after, jnp.asarray(X))
        np.testing.assert_allclose(gradient, 2 * X)
        assert not collectives(text)

    def test_what_jax_makes_of_it(self):
        """Should one of these pass some day, the page that tells of it is to be changed."""

        def mapped(f):
            return jax.jit(jax.shard_map(f, mesh=AUTO, in_specs=P("data"), out_specs=P("data")))

        def kernel(source, target):
            target[...] = source[...]

        def call(x, out_shape, interpret):
            return pl.pallas_call(kernel, out_shape=out_shape, interpret=interpret)(x)

        plain = jax.ShapeDtypeStruct((2, 4), jnp.float32)
        with pytest.raises(ValueError, match="manual_axis_type"):
            mapped(lambda x: call(x, plain, pltpu.InterpretParams()))(X)
        with pytest.raises(TypeError, match="carry"):
            mapped(lambda x: call(x, like(x), True)).lower(X)

        @jax.custom_vjp
        def f(x):
            return on_host(np.sin, x)

        f.defvjp(lambda x: (f(x), x), lambda x, g: (on_host(np.cos, x) * g,))
        with pytest.raises(ValueError, match="Custom VJP bwd rule|custom_vjp"):
            jax.jit(jax.grad(lambda x: mapped(f)(x).sum()))(X)

    @MESHES
    def test_only_the_weight_is_reduced(self, mesh):
        with jax.set_mesh(mesh):
            f = mylib.filter_shard_map(
                times, in_specs=(P("data", None), P()), out_specs=P("data", None)
            )
            x = mylib.filter_shard(X, P("data"))
            (dx, dw), text = gradient_text(f, x, mylib.filter_shard(jnp.asarray(2.0), P()))
        np.testing.assert_allclose(dx, 2 * (2 * X) * 2, rtol=1e-5)
        np.testing.assert_allclose(dw, np.sum(2 * (2 * X) * X), rtol=1e-5)
        (only,) = collectives(text)
        assert (only.kind, only.axes, only.bytes) == ("all-reduce", ("data",), 4)

    @pytest.mark.parametrize("checked", [True, False])
    def test_values_and_gradients(self, checked):
        specs = dict(mesh=AUTO, out_specs=P("data", "model"), check_vma=checked)
        f = mylib.filter_shard_map(times, in_specs=(P("data", "model"), P()), **specs)
        (dx, dw), _ = gradient_text(f, jnp.asarray(X), jnp.asarray(3.0))
        np.testing.assert_allclose(f(X, 3.0 * jnp.ones(())), 3 * X, rtol=1e-6)
        np.testing.assert_allclose(dx, 18 * X, rtol=1e-5)
        np.testing.assert_allclose(dw, 6 * np.sum(X * X), rtol=1e-5)

    def test_outside_of_shard_map_it_is_the_function(self):
        f = mylib.opaque(lambda x: on_host(np.sin, x) if x[0] >= 0 else -x)
        compiled = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, *_, **__: compiled.append(event)
        )
        for _ in range(3):
            np.testing.assert_allclose(f(jnp.ones(3)), np.sin(np.ones(3)), rtol=1e-6)
            if not _:
                compiled.clear()
        assert not [event for event in compiled if "backend_compile" in event]

    def test_outside_of_shard_map(self):
        assert float(times(jnp.ones((2, 2)), jnp.asarray(3.0)).sum()) == 12
        assert float(jax.grad(lambda w: times(jnp.ones((2, 2)), w).sum())(3.0)) == 4

    def test_an_ffi_call(self):
        """LAPACK's Cholesky decomposition, which JAX ships for CPUs."""

        @mylib.opaque
        def cholesky(x):
            shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((), jnp.int32))
            call = jax.ffi.ffi_call(
                "lapack_spotrf_ffi",
                shapes,
                input_layouts=[(1, 0)],
                output_layouts=[(1, 0), ()],
            )
            return jnp.tril(call(x, uplo=np.uint8(ord("L")))[0])

        jax.jit(jnp.linalg.cholesky).lower(jnp.eye(2))  # registers it
        x = np.stack([np.eye(3) * i + np.ones((3, 3)) for i in range(1, 5)]).astype(np.float32)
        f = mylib.filter_shard_map(
            lambda x: cholesky(x[0])[None], mesh=AUTO, in_specs=P("data"), out_specs=P("data")
        )
        np.testing.assert_allclose(f(x), np.linalg.cholesky(x), rtol=1e-5)

    def test_trees_with_anything_in_them(self):
        linear = eqx.nn.Linear(4, 4, key=jax.random.key(0))

        def host(model, x, scale):
            y = jax.pure_callback(
                lambda w, x: np.asarray(x) @ np.asarray(w).T,
                jax.ShapeDtypeStruct(x.shape, x.dtype),
                model.weight,
                x,
            )
            return {"y": y * scale, "name": "static", "bias": None}

        def forward(model, x, scale):
            return host(model, x, scale), (model, x, scale)

        def backward(kept, g):
            model, x, scale = kept
            gx = g["y"] @ model.weight * scale
            weight = (g["y"] * scale).T @ x
            gm = eqx.tree_at(lambda m: m.weight, eqx.filter(model, eqx.is_array), weight)
            return gm, gx, None

        f = mylib.opaque(host, fwd=forward, bwd=backward)

        @mylib.filter_shard_map(
            mesh=AUTO,
            in_specs=(P(), P("data"), None),
            out_specs={"y": P("data"), "name": None, "bias": None},
        )
        def mapped(model, x, scale):
            return f(model, x, scale=scale)

        out = mapped(linear, X, 2.0)
        np.testing.assert_allclose(out["y"], 2 * X @ linear.weight.T, rtol=1e-5)
        assert out["name"] == "static"
        grads = eqx.filter_grad(lambda m: jnp.sum(mapped(m, jnp.asarray(X), 2.0)["y"]))(linear)
        expected = jax.grad(lambda w: jnp.sum(2 * X @ w.T))(linear.weight)
        np.testing.assert_allclose(grads.weight, expected, rtol=1e-5)

    def test_what_is_found_elsewhere_is_refused(self):
        """Of arguments it is known how they vary; else the result would be taken for the same."""
        total = callback_sum(jax.pure_callback)

        def closes_over(x):
            return mylib.opaque(lambda w: total(x * w))(2.0 * jnp.ones(()))

        def asks_where_it_is(x):
            index = jnp.ones(3) * jnp.float32(2)
            return mylib.opaque(lambda w: total(w * lax.axis_index("data")))(index)

        for f in (closes_over, asks_where_it_is):
            mapped = mylib.filter_shard_map(f, mesh=AUTO, in_specs=P("data"), out_specs=P())
            with pytest.raises(ValueError, match="a captured value or axis_index.*\n.*pass it"):
                mapped(X)

    def test_functions_that_hold_arrays(self):
        class Total(eqx.Module):
            w: jax.Array

            def __call__(self, x):
                return callback_sum(jax.pure_callback)(self.w * x)

        def f(w, x):
            in_module = mylib.opaque(Total(w))(jnp.ones(()))
            return (in_module + mylib.opaque(eqx.Partial(Total(x[0, 0]), x))())[None]

        mapped = mylib.filter_shard_map(
            f, mesh=AUTO, in_specs=(P("data"), P("data")), out_specs=P("data")
        )
        parts = X.reshape(4, 2, 4)
        expected = X[:, 0].reshape(4, 2).sum(1) + parts[:, 0, 0] * parts.sum((1, 2))
        np.testing.assert_allclose(mapped(X[:, 0], X), expected, rtol=1e-5)
        with pytest.raises(TypeError, match="holds arrays, and bwd"):
            mylib.opaque(Total(jnp.ones(())), fwd=times_forward, bwd=times_backward)

    def test_faults(self):
        with pytest.raises(TypeError, match="give both"):
            mylib.opaque(times, fwd=times_forward)

        def by_name(x, *, y):
            return x

        f = mylib.opaque(by_name, fwd=lambda x: (x, None), bwd=lambda _, g: (g,))
        with pytest.raises(TypeError, match="by_name has a derivative.*only: y"):
            f(1.0, y=2.0)
        f = mylib.opaque(lambda x, y: x, fwd=lambda x, y: (x, None), bwd=lambda _, g: g)
        with pytest.raises(TypeError, match="a cotangent for each of the 2 arguments"):
            jax.grad(f)(1.0 * jnp.ones(()), 2.0)
        f = mylib.opaque(lambda x: x["a"], fwd=lambda x: (x["a"], None), bwd=lambda _, g: (g,))
        with pytest.raises(TypeError, match="bwd returned no cotangent of argument 0"):
            jax.grad(f)({"a": 1.0})
        f = mylib.opaque(lambda x: (x, x), fwd=lambda x: ([x, x], None), bwd=lambda _, g: (g[0],))
        for transform in (lambda g: g, jax.jit):
            with pytest.raises(TypeError, match="fwd must return the function's result"):
                transform(jax.grad(lambda x: f(x)[0]))(1.0)
        f = mylib.opaque(lambda x: x, fwd=lambda x: x, bwd=lambda _, g: (g,))
        with pytest.raises(TypeError, match="fwd must return a pair"):
            jax.grad(f)(1.0)


class TestVary:
    def test_trees(self):
        def f(x):
            tree = {"x": x, "y": jnp.ones(3), "name": "static", "f": jnp.sin}
            out = mylib.vary(tree, ("data", "model"))
            assert out["name"] == "static" and out["f"] is jnp.sin
            found.append([jax.typeof(out[k]).manual_axis_type.varying for k in "xy"])
            return out["y"][None, None]

        for check, axes in ((True, {"data", "model"}), (False, set())):
            found = []
            mapped = mylib.filter_shard_map(
                f, mesh=AUTO, in_specs=P("data"), out_specs=P("data", "model"), check_vma=check
            )
            assert mapped(X).shape == (4, 2, 3) and found == [[axes, axes]]

    def test_axes_that_are_not_there(self):
        with pytest.raises(
            ValueError, match="vary: 'data' is not among .* there are none: call it in"
        ):
            mylib.vary(X, "data")
        f = mylib.filter_shard_map(
            lambda x: mylib.vary(x, ("data", "dta")), mesh=AUTO, in_specs=P(), out_specs=P()
        )
        with pytest.raises(ValueError, match=r"'dta' is not among .*there are \('data', 'model'\)"):
            f(X)

    # The mean gradient of 4 devices, or what else comes of it, as multiples of the mean.
    FORMS = {
        "grad(local loss), then pmean, as with pmap": (4, 1),
        "grad(local loss), then psum": (16, 4),
        "grad(local loss)": (4, None),
        "grad(pmean of the loss)": (1, None),
        "grad(pmean of the loss), then pmean": (1, 1),
        "vary, grad(local loss), then pmean": (1, 1),
        "grad of the mapped function": (1, 1),
    }

    @pytest.mark.parametrize("checked", [True, False])
    @pytest.mark.parametrize("form", FORMS)
    def test_forms_of_gradients(self, form, checked):
        """The table of docs/from-pmap.md. None: each device has its own."""

        def local(w, x):
            return jnp.mean((w * x) ** 2)

        def mean(w, x):
            return lax.pmean(local(w, x), "data")

        def inside(w, x):
            w = mylib.vary(w, "data") if form.startswith("vary") else w
            g = jax.grad(mean if "pmean of" in form else local)(w, x)
            if form.endswith("then psum"):
                return lax.psum(g, "data")
            return lax.pmean(g, "data") if "then pmean" in form else g

        mesh = jax.make_mesh(
            (4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,)
        )
        wanted = self.FORMS[form][not checked]
        specs = dict(mesh=mesh, in_specs=(P(), P("data")), check_vma=checked)
        w, x = jnp.asarray(3.0), jnp.asarray(X[:, 0])
        true = jax.grad(local)(w, x)
        if form == "grad of the mapped function":
            g = jax.grad(mylib.filter_shard_map(mean, out_specs=P(), **specs))(w, x)
        elif wanted is None:
            each = mylib.filter_shard_map(
                lambda w, x: inside(w, x)[None], out_specs=P("data"), **specs
            )(w, x)
            own = [jax.grad(local)(w, part) for part in x.reshape(4, 2)]
            return np.testing.assert_allclose(each, own, rtol=1e-5)
        else:
            twice = wanted > 1 and checked and "then" in form
            warned = pytest.warns(mylib.errors.SummedTwiceWarning) if twice else nullcontext()
            with warned:
                g = mylib.filter_shard_map(inside, out_specs=P(), **specs)(w, x)
        np.testing.assert_allclose(g, wanted * true, rtol=1e-5)


def callback_sum(call):
    return lambda x: call(lambda v: np.float32(v.sum()), jax.ShapeDtypeStruct((), jnp.float32), x)


def count_to_index(x):
    i = lax.axis_index("data")
    return lax.while_loop(lambda n: n <= i, lambda n: n + 1, 0)


def branch_on_index(x):
    return lax.cond(lax.axis_index("data") > 1, lambda: 1.0, lambda: 2.0)


def reduce_in_a_loop(x):
    def turn(state):
        n, own, total = state
        return n + 1, own * 2, total + lax.psum(own, "data")

    i = lax.axis_index("data")
    return lax.while_loop(lambda s: s[0] <= i, turn, (0, x[0], jnp.zeros(4)))[2]


def reduce_in_a_branch(x):
    total = lambda x: lax.psum(x, "data").sum()  # noqa: E731
    return lax.cond(lax.axis_index("data") > 1, total, lambda x: total(2 * x), x)


def potrf(x):
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    return jax.ffi.ffi_call("anything", shape)(x)


# What JAX takes for the same everywhere although it isn't, or runs into a deadlock with.
HOLES = {
    "pure_callback": (callback_sum(jax.pure_callback), "the input of the pure_callback at"),
    "io_callback": (callback_sum(io_callback), "the input of the io_callback at"),
    "ffi_call": (potrf, "the input of the ffi_call at .*\n.*mylib.opaque"),
    "while": (count_to_index, "condition of the while_loop at .*\n.*mylib.loops.while_loop"),
    "cond": (branch_on_index, "predicate of the cond at .*\n.*mylib.vary"),
    "loop that communicates": (reduce_in_a_loop, "some devices would wait forever\n.*sync='any'"),
    "branch that communicates": (
        reduce_in_a_branch,
        "would wait forever\n.*communicate outside the cond",
    ),
}


class TestHoles:
    @MESHES
    @pytest.mark.parametrize("hole", HOLES)
    def test_are_refused(self, hole, mesh):
        fun, words = HOLES[hole]
        f = mylib.filter_shard_map(fun, mesh=mesh, in_specs=P("data"), out_specs=P())
        for call in (f, jax.jit(f), f.lower):
            with pytest.raises(ValueError, match=words) as caught:
                call(X)
        assert "test_opaque.py" in str(caught.value) and "along 'data'" in str(caught.value)

    @pytest.mark.parametrize("hole", ["pure_callback", "io_callback", "while", "cond"])
    def test_jax_lets_them_pass(self, hole):
        """Else the checks could be dropped: a "replicated" array of which the copies differ."""
        fun, _ = HOLES[hole]
        y = jax.jit(jax.shard_map(fun, mesh=AUTO, in_specs=P("data"), out_specs=P()))(X)
        assert y.sharding.is_fully_replicated
        assert len({float(shard.data) for shard in y.addressable_shards}) > 1

    @pytest.mark.slow
    def test_jax_runs_into_the_deadlock(self, checkout_env):
        """In a process of its own, which JAX aborts after a while."""
        program = """
            import jax
            from test_opaque import AUTO, P, X, reduce_in_a_loop
            f = jax.shard_map(reduce_in_a_loop, mesh=AUTO, in_specs=P("data"), out_specs=P())
            print("begins", flush=True)
            jax.block_until_ready(jax.jit(f)(X))
            print("ends")
        """
        flags = (
            "--xla_cpu_collective_call_warn_stuck_timeout_seconds=1",
            "--xla_cpu_collective_call_terminate_timeout_seconds=3",
        )
        here = Path(__file__).parent
        env = {
            **checkout_env,
            "PYTHONPATH": os.pathsep.join(
                [checkout_env["PYTHONPATH"], str(here.parent), str(here)]
            ),
            "XLA_FLAGS": " ".join([checkout_env["XLA_FLAGS"], *flags]),
        }
        ended = run_python("-c", textwrap.dedent(program), env=env)
        assert ended.returncode != 0
        assert "begins" in ended.stdout and "ends" not in ended.stdout
        assert "rendezvous" in ended.stderr

    def test_all_are_named_at_once(self):
        def f(x):
            return [fun(x) for fun, _ in HOLES.values()]

        with pytest.raises(ValueError) as caught:
            mylib.filter_shard_map(f, mesh=AUTO, in_specs=P("data"), out_specs=P())(X)
        assert str(caught.value).count("instead:") == len(HOLES)
        assert str(caught.value).startswith("f can't run on several devices:")

    @pytest.mark.parametrize("branches", ["one", "both", "switch"])
    def test_gradients_of_what_branches_share(self, branches):
        """JAX adds them up inside the branches: over devices that took another one."""
        threshold = X[3].sum() + X[4].sum()

        def choose(w, x):
            which = x.sum() > threshold
            if branches == "switch":
                rules = [lambda x, i=i: w * (i + 1) * x for i in range(3)]
                return lax.switch(lax.axis_index("data") % 3, rules, x)
            return lax.cond(which, lambda: 2 * w * x, lambda: w * x if branches == "both" else x)

        def ready(w, x):
            return choose(mylib.vary(w, "data"), x)

        specs = dict(mesh=AUTO, in_specs=(P(), P("data")), out_specs=P("data"))
        with pytest.raises(ValueError, match="predicate of the cond at .*\n.*made before the cond"):
            mylib.filter_shard_map(choose, **specs)(jnp.asarray(1.0), X)
        f = mylib.filter_shard_map(ready, **specs)
        parts = X.reshape(4, 2, 4)
        factors = (
            [1, 2, 3, 1]
            if branches == "switch"
            else [
                2 if part.sum() > threshold else (1 if branches == "both" else 0) for part in parts
            ]
        )
        expected = sum(k * part.sum() for k, part in zip(factors, parts, strict=True))
        assert len(set(factors)) > 1
        for grad in (jax.grad, lambda g: jax.jit(jax.grad(g))):
            np.testing.assert_allclose(grad(lambda w: f(w, X).sum())(1.0), expected, rtol=1e-5)

    def test_constants_to_choose_from_are_none(self):
        def f(x):
            which = x.sum() > 4
            factor = lax.cond(which, lambda: 1.0, lambda: 0.0)
            count = lax.cond(which, lambda: 1, lambda: 2)
            nested = lax.cond(which, lambda: 3.0, lambda: 1.0)
            return x * factor * count * jax.jit(lambda n: n * 2)(nested) + jax.nn.relu(factor) * x

        specs = dict(mesh=AUTO, in_specs=P("data"), out_specs=P("data"))
        ours = mylib.filter_shard_map(f, **specs)
        expected = np.concatenate([p * 7 if p.sum() > 4 else p * 0 for p in X.reshape(4, 2, 4)])
        np.testing.assert_allclose(ours(X), expected, rtol=1e-5)
        parts = X[:, 0].reshape(4, 2)
        expected = np.concatenate([p * 7 if p.sum() > 4 else p * 0 for p in parts])
        np.testing.assert_allclose(ours(X[:, 0]), expected, rtol=1e-5)

    def test_tables_to_choose_from_are_none(self):
        """They are operands of the cond as weights are, but nobody differentiates them."""
        table, other = np.arange(4.0, dtype=np.float32), jnp.arange(4.0)

        def f(x):
            which = x.sum() > 4
            one = lax.cond(which, lambda: x * table, lambda: x * jnp.asarray([1.0, 2.0, 3.0, 4.0]))
            two = jax.jit(lambda x: lax.cond(which, lambda: x * (other + 1), lambda: x))(x)
            return one + two

        ours = mylib.filter_shard_map(f, mesh=AUTO, in_specs=P("data"), out_specs=P("data"))
        scale = [2 * table + 1 if p.sum() > 4 else table + 2 for p in X.reshape(4, 2, 4)]
        factors = np.repeat(np.stack(scale), 2, axis=0)
        np.testing.assert_allclose(ours(X), X * factors, rtol=1e-5)
        gradient = jax.grad(lambda x: ours(x).sum())(jnp.asarray(X))
        np.testing.assert_allclose(gradient, factors, rtol=1e-5)

    def test_the_rules_of_custom_derivatives_are_not_looked_into(self):
        """Said in docs/shard-map.md. `opaque` covers what is called in its `fwd` and `bwd`."""

        @jax.custom_vjp
        def h(w, x):
            return w * x

        def backward(kept, g):
            w, x = kept
            total = jax.pure_callback(
                lambda x, g: np.float32((x * g).sum()), jax.ShapeDtypeStruct((), jnp.float32), x, g
            )
            return total, g * w

        h.defvjp(lambda w, x: (w * x, (w, x)), backward)
        f = mylib.filter_shard_map(h, mesh=AUTO, in_specs=(P(), P("data")), out_specs=P("data"))
        found = jax.grad(lambda w: f(w, jnp.asarray(X)).sum())(1.0)
        np.testing.assert_allclose(found, X[:2].sum(), rtol=1e-5)  # of the first device alone

    def test_a_line_that_jax_does_not_know(self):
        def f(x):
            on_row = callback_sum(lambda *a: jax.pure_callback(*a, vmap_method="sequential"))
            return jax.vmap(on_row)(x)

        mapped = mylib.filter_shard_map(f, mesh=AUTO, in_specs=P("data"), out_specs=P())
        with pytest.raises(ValueError, match="input of the pure_callback .*differs"):
            mapped(X)

    def test_what_is_cast_at_once_is_none(self):
        def f(x):
            total = mylib.vary(callback_sum(jax.pure_callback)(x), "data")
            branch = lax.cond(
                lax.axis_index("data") > 1,
                lambda: mylib.vary(jnp.asarray(1.0), "data"),
                lambda: mylib.vary(jnp.asarray(2.0), "data"),
            )
            count = lax.while_loop(
                lambda n: n <= lax.axis_index("data"),
                lambda n: n + 1,
                mylib.vary(jnp.asarray(0), "data"),
            )
            io_callback(lambda v: None, None, x)
            jax.debug.callback(lambda v: None, x)
            return jnp.stack([total, branch, count.astype(float)])[None]

        out = mylib.filter_shard_map(f, mesh=AUTO, in_specs=P("data"), out_specs=P("data"))(X)
        np.testing.assert_allclose(out[:, 0], X.reshape(4, -1).sum(1), rtol=1e-6)
        assert out[:, 1].tolist() == [2, 2, 1, 1] and out[:, 2].tolist() == [1, 2, 3, 4]

    def test_the_same_everywhere_is_none(self):
        def f(x):
            total = lax.psum(x.sum(), "data")
            host = callback_sum(jax.pure_callback)(total[None])
            mean = lax.cond(total > 1, lambda: total / 4, lambda: total)

            def turn(state):
                return state[0] * 2 + 1, state[1] + lax.psum(x[0], "data")

            start = (host * 0, mean + jnp.zeros(4))
            return host, lax.while_loop(lambda s: s[0] < total, turn, start)

        f = mylib.filter_shard_map(f, mesh=AUTO, in_specs=P("data"), out_specs=P())
        assert float(f(X)[0]) == X.sum()

    def test_kernels_are_their_own_affair(self):
        """A loop inside a kernel runs on one device."""

        def kernel(source, target):
            target[...] = lax.fori_loop(0, 3, lambda i, v: v + source[...], source[...] * 0)

        @mylib.opaque
        def triple(x):
            call = pl.pallas_call(kernel, out_shape=like(x), interpret=pltpu.InterpretParams())
            return call(x)

        f = mylib.filter_shard_map(triple, mesh=AUTO, in_specs=P("data"), out_specs=P("data"))
        np.testing.assert_allclose(f(X), 3 * X)
