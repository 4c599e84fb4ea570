"""`filter_jit`: all that `equinox.filter_jit` does; placements; returning at once; being told."""

import concurrent.futures
import contextlib
import copy
import functools
import gc
import pickle
import time
import warnings
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from contexts import AUTO as MESH, CONTEXTS, EXPLICIT, MIXED, crossed
from hypothesis import given, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import mylib
from mylib.rules import batch, by_path, fsdp, like, replicated

KEY = jax.random.key(0)
AXES = {"auto": MESH, "explicit": EXPLICIT}
MESHES = pytest.mark.parametrize("mesh", AXES.values(), ids=AXES)


class Counted:
    """A function that counts how often it is traced."""

    def __init__(self, fun):
        self.fun = fun
        self.traces = 0
        functools.update_wrapper(self, fun)

    def __call__(self, *args, **kwargs):
        self.traces += 1
        return self.fun(*args, **kwargs)


def add_zero(x):
    return x + 0


def counted(fun):
    return Counted(fun)


def same(x, y):
    return eqx.tree_equal(x, y, rtol=1e-6, atol=1e-6)


class TestTrees:
    def test_arrays_are_traced_and_the_rest_is_static(self):
        seen = []

        @mylib.filter_jit
        def f(tree, flag, *, name):
            seen.append((tree, flag, name))
            return {"sum": tree["a"] + tree["b"], "n": tree["n"], "name": name}, flag

        tree = {"a": jnp.ones(2), "b": np.ones(2, np.float32), "n": 3, "f": jnp.tanh}
        (out, flag) = f(tree, True, name="x")
        assert out["n"] == 3 and type(out["n"]) is int and out["name"] == "x" and flag is True
        assert jnp.array_equal(out["sum"], jnp.full(2, 2.0))
        ((traced, *_),) = seen
        assert all(isinstance(traced[k], jax.core.Tracer) for k in "ab")
        assert traced["f"] is jnp.tanh and traced["n"] == 3

    def test_static_values_that_are_equal_but_not_the_same(self):
        f = mylib.filter_jit(lambda x, y: (y, 1 / y if y else y))
        x = jnp.ones(())
        for value in (1, True, 1.0, 0.0, -0.0, 0, False, 1 + 0j):
            out, _ = f(x, value)
            assert type(out) is type(value) and repr(out) == repr(value)

    def test_nan_is_one_static_value(self):
        f = counted(lambda x, y: x)
        jitted = mylib.filter_jit(f)
        for _ in range(3):
            jitted(jnp.ones(()), float("nan"))
        assert f.traces == 1

    def test_numpy_scalars_are_arrays_and_strings_are_not(self):
        f = counted(lambda x, name: x + 1)
        jitted = mylib.filter_jit(f)
        assert jitted(np.float32(1), np.str_("a")) == 2 and jitted(np.float32(2), np.str_("a")) == 3
        assert f.traces == 1

    def test_what_has_no_hash_is_named(self):
        class Odd:
            __hash__ = None

        @mylib.filter_jit
        def step(model, *rest, **options):
            return model

        for args, kwargs, name in [
            (({"a": [Odd()]},), {}, "model['a'][0], a Odd"),
            ((1, 2, Odd()), {}, "rest[1], a Odd"),
            ((1,), {"extra": np.array(["x"])}, "extra, a ndarray"),
        ]:
            with pytest.raises(TypeError) as caught:
                step(*args, **kwargs)
            assert f"step was given {name}" in str(caught.value)

    def test_abstract_arrays_are_static_in_a_call(self):
        shape = jax.ShapeDtypeStruct((3,), jnp.float32)
        assert mylib.filter_jit(lambda s: s)(shape) is shape

    def test_a_module_and_its_methods(self):
        traces = []

        class Scale(eqx.Module):
            factor: jax.Array | float

            @mylib.filter_jit
            def method(self, x):
                traces.append(self)
                return self.factor * x

            def plain(self, x):
                traces.append(self)
                return self.factor * x

            @mylib.filter_jit(out_shardings=P("data"), mesh=MESH)
            def __call__(self, x):
                traces.append(self)
                return self.factor * x

        x = jnp.arange(8.0)
        for call in (
            lambda m: m.method(x),
            lambda m: mylib.filter_jit(m.plain)(x),
            lambda m: mylib.filter_jit(m)(x),
            lambda m: m(x),
        ):
            traces.clear()
            for factor in (jnp.array(2.0), jnp.array(3.0)):
                assert jnp.array_equal(call(Scale(factor)), factor * x)
            # One trace for arrays (none, if the function has been seen), one for each static value.
            traced = len(traces)
            assert traced <= 1
            assert jnp.array_equal(call(Scale(2.0)), call(Scale(3.0)) * 2 / 3)
            assert len(traces) <= traced + 2
        assert Scale(jnp.array(2.0))(x).sharding.spec == P("data")

    def test_a_wrapper_looks_like_what_it_wraps(self):
        @mylib.filter_jit
        def documented(x: int, *, y: str = "a") -> int:
            """What it does."""

        assert documented.__name__ == "documented" and documented.__doc__ == "What it does."
        assert documented.__wrapped__.__name__ == "documented"
        assert "documented" in repr(documented)
        assert type(documented).__call__ is not None

    def test_it_is_compiled_once_with_the_same_options(self):
        def program(**options):
            return mylib.filter_jit(add_zero, **options).dispatcher

        same = [{"mesh": MESH}, {"compiler_options": {"xla_cpu_enable_fast_math": True}}]
        other = [{"mesh": EXPLICIT}, {"compiler_options": {"xla_cpu_enable_fast_math": 1}}]
        for one, another in zip(same, other, strict=True):
            assert program(**one) is program(**one)
            assert program(**one) is not program(**another)
            assert program(**one) is not program()

    def test_one_trace_however_an_argument_is_given(self):
        f = counted(lambda x, y: x - y)
        f.__wrapped__ = lambda x, y: None
        jitted = mylib.filter_jit(f)
        one, two = jnp.array(1.0), jnp.array(2.0)
        assert jitted(one, two) == jitted(one, y=two) == jitted(y=two, x=one) == -1
        assert f.traces == 1

    @given(
        st.recursive(
            st.sampled_from([1, 2.5, "s", None, True]) | st.integers(1, 3).map(np.ones),
            lambda t: st.lists(t, max_size=3) | st.dictionaries(st.sampled_from("ab"), t),
            max_leaves=6,
        ),
        st.booleans(),
    )
    def test_any_tree_comes_back(self, tree, donate):
        f = mylib.filter_jit(lambda t: t, donate="all" if donate else "none")
        assert same(f(tree), jax.tree.map(lambda x: jnp.asarray(x) if eqx.is_array(x) else x, tree))


class TestTransformations:
    @pytest.mark.slow
    def test_around_and_inside(self):
        f = mylib.filter_jit(lambda x: jnp.sin(x) * 2)
        x = jnp.linspace(0, 1, 6).reshape(3, 2)
        expected = jnp.sin(x) * 2
        assert same(jax.vmap(f)(x), expected)
        assert same(jax.jit(f)(x), expected)
        assert same(mylib.filter_jit(jax.vmap(f))(x), expected)
        assert same(mylib.filter_jit(f)(x), expected)
        assert same(eqx.filter_vmap(f)(x), expected)
        assert same(jax.vmap(jax.grad(jax.checkpoint(f)))(x[0]), 2 * jnp.cos(x[0]))
        assert same(jax.jacfwd(f)(x[0]), jnp.diag(2 * jnp.cos(x[0])))
        assert same(mylib.filter_jit(jax.hessian(f))(x[0, 0]), -2 * jnp.sin(x[0, 0]))
        assert same(jax.lax.map(f, x), expected)
        assert same(jax.lax.scan(lambda c, y: (c, f(y)), 0, x)[1], expected)
        assert eqx.filter_eval_shape(f, x).shape == x.shape
        assert len(jax.make_jaxpr(f)(x).eqns) == 1
        with jax.disable_jit():
            assert same(f(x), expected)

    def test_it_is_a_pytree_of_its_arrays(self):
        linear = mylib.filter_jit(eqx.nn.Linear(2, 2, key=KEY))
        doubled = jax.tree.map(lambda x: 2 * x, linear)
        x = jnp.ones(2)
        assert same(doubled(x), 2 * linear(x))
        grads = eqx.filter_grad(lambda f: jnp.sum(f(x)))(linear)
        assert same(grads.__wrapped__.bias, jnp.ones(2))

    def test_in_a_thread_of_its_own(self):
        f = mylib.filter_jit(lambda x: x + 1)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda n: f(jnp.full(n, 1.0)), range(1, 9)))
        assert [float(r.sum()) for r in results] == [2.0 * n for n in range(1, 9)]

    def test_a_function_in_a_function(self):
        inner = mylib.filter_jit(lambda x: x + 1, donate="warn")
        outer = mylib.filter_jit(lambda x: inner(x) * 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert outer(jnp.ones(())) == 4 and outer(jnp.ones(2)).shape == (2,)


class TestOddities:
    """Each of these went wrong once."""

    def test_values_of_ones_own_that_are_floats(self):
        class Money(float):
            def __repr__(self):
                return "$"

        f = mylib.filter_jit(lambda x, m: x * float(m))
        assert f(jnp.ones(()), Money(1.5)) == 1.5 and f(jnp.ones(()), Money(2.5)) == 2.5

    def test_tangents_of_integers(self):
        grads = jax.grad(lambda t: t["w"] * 1.0, allow_int=True)({"w": 1.0, "n": jnp.ones(2, int)})
        assert mylib.filter_jit(lambda g: g["w"] + 1)(grads) == 2
        f = mylib.filter_jit(lambda g: g["w"] + 1, in_shardings=P(), mesh=MESH)
        assert f(grads) == 2

    def test_without_jit(self):
        f = counted(lambda x: x + 1 if x > 0 else np.float32(x))
        jitted = mylib.filter_jit(f, donate="all")
        with jax.disable_jit():
            assert jitted(jnp.array(1.0)) == 2 and jitted(jnp.array(-1.0)) == -1
        assert f.traces == 2

    def test_too_many_arguments(self):
        with pytest.raises(TypeError) as caught:
            mylib.filter_jit(lambda x: x)(jnp.ones(1), {1})
        assert "args[1], a set" in str(caught.value)

        def inner(x):
            pass

        @functools.wraps(inner)
        def outer(x, y):
            return x.sum() + y.sum()

        with pytest.warns(UserWarning, match=r"x \(3,\), args\[1\] \(2,\)"):
            mylib.filter_jit(outer, donate="warn")(jnp.ones(3), jnp.ones(2))

    def test_names_of_captured_arrays_never_fail(self):
        big = jnp.ones((1024, 512))
        odd = {1: "a", "b": 2}

        def f(x):
            return big.sum() + len(odd) + (later if x is None else x)

        with pytest.warns(UserWarning, match=r"captures large arrays: big \("):
            mylib.filter_jit(f)(jnp.ones(()))
        later = 3
        assert later

    def test_a_name_that_is_no_text(self):
        class Odd:
            __name__ = 3

            def __call__(self, x):
                return x + 1

        assert mylib.filter_jit(Odd())(jnp.ones(())) == 2

    def test_copies(self):
        f = mylib.filter_jit(add_zero)
        f(jnp.ones(2))
        again = [copy.copy(f), copy.deepcopy(f), pickle.loads(pickle.dumps(f))]
        assert [float(g(jnp.zeros(()))) for g in again] == [0.0] * 3

    def test_a_reference(self):
        @mylib.filter_jit(in_shardings=P(), mesh=MESH)
        def read(ref, x):
            return ref[...] + x

        assert jax.jit(lambda x: read(jax.new_ref(x), x))(jnp.ones(())) == 2

    def test_many_threads_place_as_each_asks(self):
        def rule(leaf):
            return P("data") if leaf.shape[0] == 8 else P("model")

        f = mylib.filter_jit(lambda x: x, in_shardings=rule, mesh=MESH)

        def run(size):
            return all(
                f(np.ones(size)).sharding.spec == P("data" if size == 8 else "model")
                for _ in range(20)
            )

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert all(pool.map(run, [8, 6, 8, 6]))

    def test_rules_may_look_at_the_dtype(self):
        f = mylib.filter_jit(
            lambda x: x,
            in_shardings=lambda leaf: P("data") if leaf.dtype == jnp.float32 else P("model"),
            mesh=MESH,
        )
        assert f(np.ones(8, np.float32)).sharding.spec == P("data")
        assert f(np.ones(8, np.int32)).sharding.spec == P("model")

    def test_shared_parts_of_a_program_are_looked_at_once(self):
        f = jnp.sin
        for _ in range(22):
            f = jax.jit(lambda x, f=f: f(f(x)))
        start = time.thread_time()
        mylib.filter_jit(f).lower(jnp.ones(()))
        assert time.thread_time() - start < 10  # of this thread alone, however busy the machine is


class TestErrorChecks:
    @pytest.mark.parametrize(
        "around",
        [
            lambda f, x: f(x),
            lambda f, x: jax.vmap(f)(x[None]),
            lambda f, x: jax.grad(lambda x: f(x).sum())(x),
            lambda f, x: jax.jvp(f, (x,), (x,)),
            lambda f, x: jax.vjp(f, x)[0],
            lambda f, x: jax.linearize(f, x)[0],
        ],
        ids=["plain", "vmap", "grad", "jvp", "vjp", "linearize"],
    )
    @pytest.mark.everyday("plain", "vmap", "vjp", rest="thorough")
    def test_of_values_that_are_not_there_yet(self, around):
        long = jax.jit(TestReturnsAtOnce.long)
        f = mylib.filter_jit(lambda x: eqx.error_if(x * 2, (x < 0).any(), "negative"))
        negative = -jnp.ones(600)
        # Also if the first call is the one that fails.
        for _ in range(2):
            x = long(jnp.eye(600))[0] * 0 + negative
            with pytest.raises(eqx.EquinoxRuntimeError, match="negative"):
                around(f, x)

    def test_the_error_is_readable(self):
        @mylib.filter_jit
        def positive(x):
            return eqx.error_if(x, x < 0, "x must be positive") + 1

        assert positive(jnp.array(1.0)) == 2
        for _ in range(2):
            with pytest.raises(eqx.EquinoxRuntimeError) as caught:
                positive(jnp.array(-1.0))
            text = str(caught.value)
            assert "x must be positive" in text and "def positive" not in text
            assert 'eqx.error_if(x, x < 0, "x must be positive")' in text
            # What is outside of the program is told by Python.
            assert "pytest" not in text

    def test_the_first_call_is_readable_too(self, caplog):
        @mylib.filter_jit
        def positive(x):
            return eqx.error_if(x, x < 0, "not positive")

        with pytest.raises(eqx.EquinoxRuntimeError, match="not positive"):
            positive(jnp.array(-1.0))
        assert not caplog.records

    def test_other_errors_are_left_alone(self):
        def boom(x):
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            mylib.filter_jit(boom)(jnp.ones(2))
        with pytest.raises(TypeError):
            mylib.filter_jit(lambda x: x)()

    def test_in_state_of_a_model(self):
        model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")

        @mylib.filter_jit(donate="all-except-first")
        def run(x, model, state):
            return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
                x, state
            )

        x = jax.random.normal(KEY, (8, 3))
        y, state = run(x, model, state)
        assert np.allclose(y.mean(0), 0, atol=1e-5)


class TestReturnsAtOnce:
    @staticmethod
    def long(x):
        return jax.lax.fori_loop(0, 60, lambda _, x: jnp.tanh(x @ x), x)

    @pytest.mark.slow
    def test_before_the_work_is_done(self):
        x = jnp.eye(600)
        f = mylib.filter_jit(self.long)
        jax.block_until_ready(f(x))

        def share():
            start = time.perf_counter()
            y = f(x)
            returned = time.perf_counter() - start
            jax.block_until_ready(y)
            return returned / (time.perf_counter() - start)

        # A busy machine may hold up one call.
        assert min(share() for _ in range(3)) < 0.2

    def test_but_not_with_an_error_check(self):
        f = mylib.filter_jit(lambda x: eqx.error_if(self.long(x), jnp.isnan(x).any(), "nan"))
        assert f(jnp.eye(600)).is_ready()
        assert f(jnp.eye(600)).is_ready()


class TestDonation:
    @pytest.mark.parametrize(
        ("donate", "gone"),
        [
            ("none", (False, False)),
            ("all", (True, True)),
            ("warn", (True, True)),
            ("all-except-first", (False, True)),
            ("warn-except-first", (False, True)),
        ],
    )
    def test_what_is_used_up(self, donate, gone):
        f = mylib.filter_jit(lambda a, b: (a["x"] + 1, b + 1), donate=donate)
        a, b = {"x": jnp.ones(4), "n": 1}, jnp.ones(5)
        f(a, b)
        assert (a["x"].is_deleted(), b.is_deleted()) == gone

    def test_the_arrays_of_the_function_too(self):
        linear = eqx.nn.Linear(2, 2, use_bias=False, key=KEY)
        f = mylib.filter_jit(lambda self: jax.tree.map(lambda x: x + 1, self), donate="all")
        f(linear)
        assert linear.weight.is_deleted()

        class Counter(eqx.Module):
            n: jax.Array

            def __call__(self):
                return self.n + 1

        counter = Counter(jnp.zeros(3))
        mylib.filter_jit(counter, donate="all")()
        assert counter.n.is_deleted()

    def test_what_could_not_be_used_is_named(self):
        @mylib.filter_jit(donate="warn")
        def step(state, x):
            return state["kept"] + jnp.sum(x) + jnp.sum(state["lost"])

        state = {"kept": jnp.ones(3), "lost": jnp.ones((2, 2))}
        with pytest.warns(UserWarning) as caught:
            step(state, jnp.ones(7))
        (warning,) = caught
        text = str(warning.message)
        assert (
            "Some donated buffers were not usable: step was given state['lost'] (2, 2), x (7,)"
            in text
        )
        assert warning.filename == __file__

    def test_abstract_arguments_do_not_count(self):
        f = mylib.filter_jit(lambda a, b: (a + 1, b + 1), donate="all-except-first")
        shape = jax.ShapeDtypeStruct((4,), jnp.float32)
        compiled = f.lower(shape, shape).compile()
        for call in (f, compiled):
            x, y = jnp.ones(4), jnp.ones(4)
            call(x, y)
            assert not x.is_deleted() and y.is_deleted()
        g = mylib.filter_jit(
            lambda a, b: (a["x"] * 1, b * 1),
            donate="all-except-first",
            in_shardings=P("data"),
            mesh=MESH,
        )
        x, y = jnp.ones(8), jnp.ones(8)
        g({"s": shape, "x": x}, y)
        assert not x.is_deleted() and y.is_deleted()

    def test_nothing_is_used_up_by_a_call_that_fails(self):
        def bad(x, y):
            raise RuntimeError("bad")

        x = jnp.ones(8)
        options = dict(donate="all", in_shardings=P("data"), mesh=MESH)
        with pytest.raises(RuntimeError, match="bad"):
            mylib.filter_jit(bad, **options)(x, 1)
        f = mylib.filter_jit(lambda w, x: (w * x).sum(), **options)
        jax.grad(f)(jnp.ones(8), x)
        compiled = mylib.filter_jit(lambda x, n: x * n, **options).lower(jnp.ones(8), 1).compile()
        with pytest.raises(TypeError, match="other static"):
            compiled(x, 2)
        assert not x.is_deleted()

    @pytest.mark.parametrize(
        "before",
        [
            lambda f: jax.eval_shape(f, jnp.ones(3)),
            lambda f: f.lower(jnp.ones(3)),
            lambda f: jax.grad(f)(jnp.ones(3)),
            lambda f: f(jnp.ones(4)),
        ],
        ids=["eval_shape", "lower", "grad", "another shape"],
    )
    def test_told_whatever_came_before(self, before):
        quiet = mylib.filter_jit(lambda a: a.sum(), donate="all")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            before(quiet)
            quiet(jnp.ones(3))
        telling = mylib.filter_jit(lambda a: a.sum(), donate="warn")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before(telling)
        with pytest.warns(UserWarning, match=r"<lambda> was given a \(3,\)"):
            telling(jnp.ones(3))

    def test_told_ahead_of_time_and_of_other_shardings(self):
        f = mylib.filter_jit(lambda a: a.sum(), donate="warn")
        compiled = f.lower(jnp.ones(8)).compile()
        with pytest.warns(UserWarning, match=r"was given a \(8,\)"):
            compiled(jnp.ones(8))
        g = mylib.filter_jit(lambda x: x + 1, donate="warn", out_shardings=P("data"), mesh=MESH)
        g(mylib.filter_shard(jnp.ones((8, 8)), P("data"), mesh=MESH))
        with pytest.warns(UserWarning, match=r"was given x \(8, 8\)"):
            g(mylib.filter_shard(jnp.ones((8, 8)), P(None, "model"), mesh=MESH))


class TestInShardings:
    def spec(self, x):
        return x.sharding.spec if isinstance(x.sharding, NamedSharding) else None

    @pytest.mark.parametrize(
        ("given", "specs"),
        [
            (P("data"), [P("data"), P("data"), P("data")]),
            ((P("data"), None, P("model")), [P("data"), None, P("model")]),
            ([P("data"), None, None], [P("data"), None, None]),
            ({"b": P("data")}, [None, P("data"), None]),
            (
                {"a": {"x": P("model"), "s": None}, "c": batch("data")},
                [P("model"), None, P("data")],
            ),
            ((by_path({"x": P("data")}), replicated(), None), [P("data"), P(), None]),
        ],
    )
    def test_by_position_and_by_name(self, given, specs):
        taken = []

        @mylib.filter_jit(in_shardings=given, mesh=MESH)
        def f(a, b, c):
            return a["x"], b, c

        for args, kwargs in [
            (({"x": jnp.ones(8), "s": "s"}, np.ones(8), jnp.ones(8)), {}),
            (({"x": jnp.ones(8), "s": "s"},), {"c": jnp.ones(8), "b": np.ones(8)}),
        ]:
            taken.append([self.spec(x) for x in f(*args, **kwargs)])
        # What comes in whole and is returned as it is comes out as it came in.
        for found in taken:
            assert [s for s, wanted in zip(found, specs, strict=True) if wanted] == [
                s for s in specs if s
            ]

    def test_defaults_and_every_kind_of_parameter(self):
        given = {"a": P("data"), "rest": P("model"), "k": P("data"), "options": P("model")}

        default = np.ones(8)

        @mylib.filter_jit(in_shardings=given, mesh=MESH)
        def f(a=default, /, *rest, k=default, **options):
            return a + 0, rest, k, options

        a, _, k, _ = f()
        assert self.spec(a) == self.spec(k) == P("data")
        a, rest, k, options = f(np.ones(8), np.ones(8), np.ones(8), k=np.ones(8), o=np.ones(8))
        assert [self.spec(x) for x in (a, *rest, k, options["o"])] == [
            P("data"),
            P("model"),
            P("model"),
            P("data"),
            P("model"),
        ]
        g = mylib.filter_jit(f.__wrapped__, in_shardings={"o": P("data")}, mesh=MESH)
        assert self.spec(g(o=np.ones(8))[3]["o"]) == P("data")

    def test_names_that_are_given_twice(self):
        def f(a, /, **rest):
            return a, rest

        given = {"a": P("data"), "rest": P("model")}
        _, rest = mylib.filter_jit(f, in_shardings=given, mesh=MESH)(np.ones(8), a=np.ones(8))
        assert self.spec(rest["a"]) == P("model")

    def test_names_that_are_not_given(self):
        f = mylib.filter_jit(lambda a, **rest: a, in_shardings={"b": P()}, mesh=MESH)
        with pytest.raises(TypeError, match="no parameter 'b'"):
            f(np.ones(8), c=np.ones(8))

    def test_defaults_that_are_not_arrays_or_not_placed(self):
        two = np.int64(2)

        def f(x, n=two, names=frozenset("a"), *, flags=()):
            return x * sum(1 for _ in range(n))

        for placements in ({"x": P("data")}, (P("data"),)):
            y = mylib.filter_jit(f, in_shardings=placements, mesh=MESH)(np.ones(8))
            assert jnp.all(y == 2) and self.spec(y) == P("data")

    def test_of_a_method(self):
        class Model(eqx.Module):
            weight: jax.Array

            @mylib.filter_jit(in_shardings={"x": P("data"), "self": P("model")}, mesh=MESH)
            def run(self, x):
                return self.weight, x

        weight, x = Model(jnp.ones(8)).run(np.ones(8))
        assert (self.spec(weight), self.spec(x)) == (P("model"), P("data"))
        bound = Model(jnp.ones(8))
        f = mylib.filter_jit(bound.run.func.__wrapped__, in_shardings=(None, P("data")), mesh=MESH)
        assert self.spec(f(bound, np.ones(8))[1]) == P("data")

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ((P("data"),), "in_shardings is a tuple of 1; positional arguments in this call: 2."),
            ({"w": P()}, "f has no parameter 'w': it has a, b. To place the entries"),
            (eqx.nn.Lambda(P()), "could be meant for the first argument or for all"),
        ],
    )
    def test_what_is_ambiguous(self, given, told):
        f = mylib.filter_jit(lambda a, b: a, in_shardings=given, mesh=MESH)
        f = eqx.tree_at(lambda f: f.arrays, f, f.arrays)
        with pytest.raises(TypeError, match="in_shardings|parameter|positional") as caught:
            f(jnp.ones(8), jnp.ones(8))
        assert told.replace("f has", "has") in str(caught.value)

    def test_faults_come_before_anything_moves(self):
        x = jnp.ones(6)
        f = mylib.filter_jit(
            lambda x, y: x, in_shardings=(P("data"), P("nothing")), mesh=MESH, donate="all"
        )
        with pytest.raises(mylib.PlacementError) as caught:
            f(x, jnp.ones(8))
        assert [fault.path for fault in caught.value.faults] == ["x", "y"]
        assert not x.is_deleted()

    def test_faults_name_parameters(self):
        @mylib.filter_jit(in_shardings=P("data"), mesh=MESH)
        def f(model, *rest, extra, **options):
            return model

        odd = np.ones(6)
        with pytest.raises(mylib.PlacementError) as caught:
            f({"w": odd}, odd, [odd], extra=odd, other=odd)
        paths = [fault.path for fault in caught.value.faults]
        assert paths == ["model['w']", "rest[0]", "rest[1][0]", "extra", "other"]
        prefix = mylib.filter_jit(f.__wrapped__, in_shardings={"model": {"v": P()}}, mesh=MESH)
        with pytest.raises(mylib.PlacementError, match="^can't place 1 leaf:\n  model\n"):
            prefix({"w": odd}, extra=1)

    def test_arguments_that_no_parameter_takes(self):
        f = mylib.filter_jit(lambda x, *, scale: x, in_shardings={"x": P()}, mesh=MESH)
        with pytest.raises(TypeError, match="<lambda>: missing a required argument: 'scale'"):
            f(x=np.ones(8))
        with pytest.raises(TypeError, match="<lambda>: got an unexpected keyword argument 'y'"):
            f(np.ones(8), scale=1, y=2)

    def test_names_that_are_no_identifiers(self):
        f = mylib.filter_jit(lambda **xs: xs, in_shardings=P("data"), mesh=MESH)
        with pytest.raises(mylib.PlacementError) as caught:
            f(**{"a-b": np.ones(3)})
        assert [fault.path for fault in caught.value.faults] == ["a-b"]

    def test_rules_are_asked_once(self):
        asked = []

        def rule(leaf):
            asked.append(leaf.name)
            return P("data")

        f = mylib.filter_jit(lambda x: x, in_shardings=rule, mesh=MESH)
        for _ in range(3):
            f(np.ones(8))
        assert len(asked) == 1
        f(np.ones(16))
        assert len(asked) == 2

    def test_the_mesh_of_the_surroundings(self):
        f = mylib.filter_jit(lambda x: x, in_shardings=P("data"))
        for mesh in (MESH, EXPLICIT, jax.make_mesh((8,), ("data",))):
            with jax.set_mesh(mesh):
                assert f(np.ones(8)).sharding == NamedSharding(mesh, P("data"))

    @MESHES
    def test_traced_arguments_are_constrained(self, mesh):
        f = mylib.filter_jit(lambda x: x * 2, in_shardings=P("data"), mesh=mesh)
        with jax.set_mesh(mesh):
            y = jax.jit(lambda x: f(x) + 1)(jnp.ones(8))
        assert y.sharding.spec == P("data") and jnp.all(y == 3)
        grad = jax.grad(lambda x: f(x).sum())
        with jax.set_mesh(mesh):
            assert jnp.all(grad(mylib.filter_shard(jnp.ones(8), P("data"))) == 2)

    def test_another_mesh_is_moved_not_rejected(self):
        other = jax.make_mesh(
            (4,), ("data",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,)
        )
        x = mylib.filter_shard(jnp.ones(8), P("data"), mesh=other)
        y = mylib.filter_jit(lambda x: x + 1, in_shardings=P("data"), mesh=MESH)(x)
        assert y.sharding.device_set == set(jax.devices())


class TestOutShardings:
    @crossed(how=["mesh=", "set_mesh", "placement"], mesh=AXES)
    def test_born_sharded(self, mesh, how):
        placement = fsdp("data", min_size=0)
        eager = eqx.nn.MLP(8, 8, 32, 2, key=KEY)
        if how == "placement":
            shape = eqx.filter_eval_shape(lambda: eager)
            placement = like(mylib.filter_device_put(shape, placement, mesh=mesh))
        make = mylib.filter_jit(
            eqx.nn.MLP, out_shardings=placement, mesh=mesh if how == "mesh=" else None
        )
        with jax.set_mesh(mesh) if how == "set_mesh" else contextlib.nullcontext():
            model = make(8, 8, 32, 2, key=KEY)
        wanted = jax.tree.leaves(mylib.resolve(model, fsdp("data", min_size=0), mesh=mesh))
        arrays = jax.tree.leaves(eqx.filter(model, eqx.is_array))
        for x, target in zip(arrays, wanted, strict=True):
            assert x.sharding.is_equivalent_to(target, x.ndim)
        for x, y in zip(arrays, jax.tree.leaves(eqx.filter(eager, eqx.is_array)), strict=True):
            np.testing.assert_array_equal(x, y)

    @MESHES
    def test_no_device_holds_more_than_its_share(self, mesh):
        def make(key):
            return jax.random.normal(key, (512, 512)), jnp.ones((512, 512))

        rule = fsdp(("data", "model"))
        compiled = mylib.filter_jit(make, out_shardings=rule, mesh=mesh).lower(KEY).compile()
        memory = compiled.compiled.memory_analysis()
        share = 2 * 512 * 512 * 4 / 8
        assert memory.output_size_in_bytes <= 1.1 * share
        assert memory.peak_memory_in_bytes <= 1.1 * share

    @pytest.mark.slow
    def test_an_optimiser_state(self):
        model = mylib.filter_jit(eqx.nn.MLP, out_shardings=fsdp("data", min_size=0), mesh=MESH)(
            8, 8, 32, 2, key=KEY
        )
        init = mylib.filter_jit(optax.adamw(1e-3).init, out_shardings=like(model))
        state = init(eqx.filter(model, eqx.is_array))
        assert state[0].mu.layers[0].weight.sharding == model.layers[0].weight.sharding
        assert state[0].count.sharding.is_fully_replicated

    def test_a_prefix_of_the_result_and_statics(self):
        f = mylib.filter_jit(
            lambda x: {"a": x, "b": (x * 2, "static", None), "c": 3},
            out_shardings={"a": None, "b": P("data"), "c": P("data")},
            mesh=MESH,
        )
        out = f(jnp.ones(8))
        assert out["b"][0].sharding.spec == P("data") and out["b"][1:] == ("static", None)
        assert out["c"] == 3

    def test_other_memory(self):
        host = NamedSharding(MESH, P("data"), memory_kind="pinned_host")
        y = mylib.filter_jit(lambda x: x * 2, out_shardings=host)(
            mylib.filter_shard(jnp.ones(8), P("data"), mesh=MESH)
        )
        assert y.sharding.memory_kind == "pinned_host"

    def test_rules_cost_no_second_trace(self):
        f = counted(lambda x: {"y": x + 1})
        jitted = mylib.filter_jit(f, out_shardings=by_path({"y": P("data")}), mesh=MESH)
        jitted(jnp.ones(8)), jitted(jnp.ones(8))
        assert f.traces == 1

    def test_faults(self):
        f = mylib.filter_jit(lambda x: {"y": x}, out_shardings=P("data"), mesh=MESH)
        with pytest.raises(mylib.PlacementError, match=r"\['y'\] \(7,\)"):
            f(jnp.ones(7))


@crossed(context=[*CONTEXTS], mesh=AXES | {"mixed": MIXED})
def test_placements_in_every_context(context, mesh):
    """In and out placements where the function is called from, values against no placement."""
    x = np.arange(1.0, 65.0, dtype=np.float32).reshape(8, 8)
    expected = CONTEXTS[context](lambda x: jnp.sin(x) * 2, x)
    f = mylib.filter_jit(
        lambda x: jnp.sin(x) * 2, in_shardings=P("data"), out_shardings=P("data", "model")
    )
    with jax.set_mesh(mesh):
        result = CONTEXTS[context](f, mylib.filter_shard(x, P("data", "model")))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    if context in ("eager", "jit", "filter_jit", "checkpoint"):
        wanted = NamedSharding(mesh, P("data", "model"))
        assert result.sharding.is_equivalent_to(wanted, 2)


@given(st.data())
def test_signatures(data):
    """Whatever is given by position, by name, or not at all is placed as its parameter says."""
    spec = st.sampled_from([None, P(), P("data"), P(None, "data")])
    given_specs = data.draw(st.fixed_dictionaries({}, optional={n: spec for n in "abck"}))
    default = np.ones((8, 8), np.float32)

    def f(a, b=default, /, c=default, *, k=default, **others):
        return {"a": a, "b": b, "c": c, "k": k}

    by_position = data.draw(st.integers(1, 3))
    by_name = data.draw(st.sets(st.sampled_from("ck" if by_position < 3 else "k")))
    jitted = mylib.filter_jit(f, in_shardings=given_specs, mesh=FLAT)
    out = jitted(*[default] * by_position, **dict.fromkeys(by_name, default))
    for name, wanted in given_specs.items():
        if wanted is not None:
            assert out[name].sharding.is_equivalent_to(NamedSharding(FLAT, wanted), 2)


FLAT = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


class TestBeingTold:
    def adam(self):
        optim = optax.adam(1e-3)
        model = mylib.filter_shard({"w": jnp.ones((8, 8))}, P("data"), mesh=MESH)
        return optim, model, optim.init(model)

    def step(self, optim):
        def step(model, state):
            updates, state = optim.update(model, state, model)
            return optax.apply_updates(model, updates), state

        return step

    def test_a_state_that_moves_is_named(self):
        optim, model, state = self.adam()
        step = mylib.filter_jit(self.step(optim))
        model, state = step(model, state)
        with pytest.warns(UserWarning, match="step was compiled twice") as caught:
            model, state = step(model, state)
        text = str(caught[0].message)
        assert "state[0].count: cpu 0 (not committed), then P()" in text
        assert "mu" not in text and text.index("in_shardings and out_sh") < text.index("state[0]")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, state)

    def test_equal_layers_are_told_of_together(self):
        model = [{"weight": jnp.ones((8, 8)), "bias": jnp.ones(8)} for _ in range(50)]
        rows = mylib.filter_shard(jnp.ones((8, 8)), P("data"), mesh=MESH)

        @mylib.filter_jit
        def step(model, rows):
            return jax.tree.map(lambda w: w + jnp.sum(rows), model)

        with pytest.warns(mylib.errors.RecompilationWarning) as caught:
            step(step(model, rows), rows)
        text = str(caught[0].message)
        assert len(text) < 350 and "NamedSharding" not in text
        assert "model[0..49]['weight']" in text and "model[0..49]['bias']" in text
        assert text.count("cpu 0 (not committed), then P()") == 1

    @pytest.mark.parametrize("how", ["in and out", "placed"])
    def test_a_state_that_is_placed_is_compiled_once(self, how):
        optim, model, state = self.adam()
        rule = like(model)
        fun = counted(self.step(optim))
        if how == "placed":
            model, state = mylib.filter_shard((model, state), rule)
            step = mylib.filter_jit(fun, out_shardings=rule)
        else:
            step = mylib.filter_jit(fun, in_shardings=rule, out_shardings=rule)
        model, state = step(model, state)
        with warnings.catch_warnings(), jax.log_compiles():
            warnings.simplefilter("error")
            for _ in range(3):
                model, state = step(model, state)
        assert fun.traces == 1

    def test_another_shape_is_no_surprise(self):
        f = mylib.filter_jit(lambda w, x: (w + x.sum(), x))
        w, _ = f(jnp.ones(8), mylib.filter_shard(jnp.ones(8), P("data"), mesh=MESH))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            f(w, jnp.ones(9))

    def test_another_dtype_is_no_surprise(self):
        f = mylib.filter_jit(lambda x: 1.5 * x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            f(f(jnp.ones(8, jnp.int32)))

    def test_captured_arrays_are_told_of_once(self):
        big = jnp.ones((1024, 512))
        inner = mylib.filter_jit(lambda x: big.sum() + x)
        with pytest.warns(UserWarning) as caught:
            mylib.filter_jit(lambda x: inner(x) * 2)(jnp.ones(()))
        assert len(caught) == 1 and caught[0].filename == __file__
        assert "big (float32[1024, 512], 2 MiB)" in str(caught[0].message)
        # Also if the inner one is JAX's.
        bare = jax.jit(lambda x: big.sum() + x)
        with pytest.warns(UserWarning, match="captures large arrays: float32"):
            mylib.filter_jit(lambda x: bare(x) * 2)(jnp.ones(()))

    def test_other_arguments_elsewhere_are_no_surprise(self):
        f = mylib.filter_jit(lambda x: x + 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for device in jax.devices()[:3]:
                f(jax.device_put(jnp.ones(8), device))

    def test_large_captured_arrays_are_named(self):
        big = {"table": mylib.filter_shard(jnp.ones((1024, 512)), P("data"), mesh=MESH)}
        host = np.ones((512, 1024), np.float32)
        small = jnp.ones(8)

        @mylib.filter_jit
        def lookup(i):
            return big["table"][i] @ host + small.sum()

        with pytest.warns(UserWarning, match="lookup captures large arrays") as caught:
            lookup(3 * jnp.ones((), int))
        text = str(caught[0].message)
        assert "big['table'] (float32[1024, 512], 2 MiB)" in text
        assert "host (float32[512, 1024], 2 MiB)" in text and "small" not in text
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lookup(4 * jnp.ones((), int))

    def test_what_is_captured_by_a_bound_method_or_a_partial(self):
        big = jnp.ones((1024, 512))

        class Model(eqx.Module):
            def __call__(self, x):
                return big.sum() + x

        for f in (Model(), functools.partial(lambda y, x: big.sum() + x, 1), Model().__call__):
            with pytest.warns(UserWarning, match=r"big \(float32"):
                mylib.filter_jit(f)(jnp.ones(()))


class TestAheadOfTime:
    @pytest.mark.parametrize("donate", ["all", "all-except-first", "none"])
    def test_as_in_a_call(self, donate):
        f = mylib.filter_jit(lambda x, y, **kwargs: (2 * x["a"] + y, kwargs), donate=donate)
        lowered = f.lower({"a": jnp.ones(3)}, 4, k=1)
        assert "main" in lowered.as_text()
        compiled = lowered.compile()
        assert compiled.as_text() and compiled.cost_analysis() == compiled.compiled.cost_analysis()
        assert compiled.memory_analysis().argument_size_in_bytes == compiled.memory.arguments
        out, kwargs = compiled({"a": jnp.ones(3)}, 4, k=1)
        assert jnp.all(out == 6) and kwargs == {"k": 1}
        with pytest.raises(TypeError, match="compiled for other static arguments"):
            compiled({"a": jnp.ones(3)}, 5, k=1)

    def test_of_abstract_arguments(self):
        f = mylib.filter_jit(lambda x: x + 1, in_shardings=P("data"), mesh=MESH)
        abstract = jax.ShapeDtypeStruct((8,), jnp.float32)
        compiled = f.lower(abstract).compile()
        assert compiled.compiled.input_shardings[0][0].spec == P("data")
        assert jnp.all(compiled(np.ones(8, np.float32)) == 2)
        with pytest.raises(TypeError, match="ShapeDtypeStruct is for compiling only"):
            compiled(abstract)

    def test_lowering_moves_nothing(self):
        x = jnp.ones(8)
        f = mylib.filter_jit(lambda x: x + 1, in_shardings=P("data"), mesh=MESH, donate="all")
        f.lower(x).compile()
        assert not x.is_deleted()


def test_nothing_is_kept_alive():
    class Big(eqx.Module):
        x: jax.Array

        def __call__(self):
            return self.x + 1

    big = Big(jnp.ones(8))
    f = mylib.filter_jit(big)
    y = f()
    gone = [weakref.ref(x) for x in (big.x, y)]
    del big, f, y
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_device_is_a_placement_too():
    device = jax.devices()[3]
    y = mylib.filter_jit(lambda x: x + 1, in_shardings=device)(jnp.ones(3))
    assert y.sharding == SingleDeviceSharding(device)


def test_paths_of_arguments():
    f = mylib.filter_jit(lambda model, x: x, in_shardings={"x": by_path({"y": P()})}, mesh=MESH)
    with pytest.raises(mylib.PlacementError, match="by_path: 'y'"):
        f({"w": jnp.ones(2)}, {"z": jnp.ones(2)})
    assert jtu.tree_structure(f) is not None


@pytest.mark.parametrize("name", ["filter_jit", "filter_shard_map"])
def test_what_is_given_by_position(name):
    options = {"in_specs": P(), "out_specs": P()} if name == "filter_shard_map" else {}
    with pytest.raises(TypeError, match="a mesh is given by position.*write mesh=mesh"):
        getattr(mylib, name)(MESH, **options)
    with pytest.raises(TypeError, match=r"takes from 0 to 1 positional arguments but 2"):
        getattr(mylib, name)(lambda x: x, MESH, **options)
