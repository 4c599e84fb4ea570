"""`equinox.error_if` in programs over several devices: the error that Equinox raises, on the host,
when the work is done. No device waits for another.
"""

import itertools
import subprocess
import sys

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import AxisType, PartitionSpec as P
from scripts import run_python

import mylib

AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
GRID = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
MESHES = pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
GOOD, BAD = np.full(16, 0.5, np.float32), np.ones(16, np.float32)


def check(x):
    return eqx.error_if(x, jnp.sum(x) > 10, "too large")


def _double(x):
    return [2 * eqx.error_if(x, jnp.sum(x) > 10, "too large")]


def _slope(primals, tangents):
    (x,), (t,) = primals, tangents
    return double_p.bind(x), [3 * x * t]


double_p = eqxi.create_vprim("checked_double", _double, lambda x: [x], _slope, None)


def checked_double(x):
    return double_p.bind(x)[0]


def in_scan_of(fun):
    return lambda x: lax.scan(lambda carry, _: (carry, fun(carry)), x, None, length=2)[1][1]


def in_scan(x):
    def turn(carry, step):
        return eqx.error_if(carry * 1.0, jnp.sum(carry) + 0 * step > 10, "too large"), step

    return lax.scan(turn, x, jnp.arange(3.0))[0]


def in_while(x):
    def turn(state):
        x, i = state
        return check(x), i + 1

    return lax.while_loop(lambda state: state[1] < 2, turn, (x, 0))[0]


def in_condition(x):
    def go_on(state):
        x, i = state
        return eqx.error_if(i, jnp.sum(x) > 10, "too large") < 2

    return lax.while_loop(go_on, lambda state: (state[0], state[1] + 1), (x, 0))[0]


def in_cond(x):
    return lax.cond(jnp.sum(x) > 9, check, lambda x: x, x)


def in_jit(x):
    return jax.jit(check)(jax.jit(check)(x))


def in_filter_jit(x):
    return mylib.filter_jit(check)(x)


def in_equinox_jit(x):
    return eqx.filter_jit(check)(x)


def in_vmap(x):
    return jax.vmap(lambda x: eqx.error_if(x, x > 0.9, "too large"))(x)


def in_batched_while(x):
    # Each of the batch takes a number of turns of its own.
    def one(x, n):
        def turn(state):
            x, i = state
            return eqx.error_if(x, x > 0.9, "too large"), i + 1

        return lax.while_loop(lambda state: state[1] < n, turn, (x, 0))[0]

    return jax.vmap(one)(x, (4 * jnp.sin(1000 * x) ** 2).astype(int))


def in_batched_condition(x):
    def one(x, n):
        def go_on(state):
            return eqx.error_if(state, x > 0.9, "too large") < n

        return x + 0 * lax.while_loop(go_on, lambda i: i + 1, 0)

    return jax.vmap(one)(x, (4 * jnp.sin(1000 * x) ** 2).astype(int))


def in_grad(x):
    return jax.grad(lambda x: jnp.sum(jnp.sin(check(x))))(x)


def in_grad_of_scan(x):
    return jax.grad(lambda x: jnp.sum(jnp.sin(in_scan(x))))(x)


def in_checkpoint(x):
    return jax.grad(lambda x: jnp.sum(jnp.sin(mylib.filter_checkpoint(check)(x))))(x)


def in_custom_jvp(x):
    @jax.custom_jvp
    def f(x):
        return check(x)

    f.defjvp(lambda primals, tangents: (f(*primals), 3 * tangents[0]))
    return f(x)


def in_custom_vjp(x):
    @jax.custom_vjp
    def f(x):
        return check(x)

    f.defvjp(lambda x: (check(x), None), lambda _, ct: (3 * ct,))
    return f(x)


def in_custom_vmap(x):
    @jax.custom_batching.custom_vmap
    def f(x):
        return check(x)

    f.def_vmap(lambda size, batched, x: (3 * jax.vmap(check)(x), batched[0]))
    return f(x)


PLACES = [
    check,
    in_scan,
    in_while,
    in_condition,
    in_cond,
    in_jit,
    in_filter_jit,
    in_equinox_jit,
    in_vmap,
    in_batched_while,
    in_batched_condition,
    in_grad,
    in_grad_of_scan,
    in_checkpoint,
    in_custom_jvp,
    in_custom_vjp,
    in_custom_vmap,
]


# JAX refuses those conditions on Explicit axes, whatever they check.
AUTO_ONLY = (in_batched_while, in_batched_condition)


@pytest.mark.parametrize(
    ("place", "mesh"),
    [
        pytest.param(
            place,
            mesh,
            id=f"{place.__name__}-{mesh.axis_types[0].name}",
            # Each place with one kind of axes, which takes turns.
            marks=pytest.mark.thorough if (i + j) % 2 and place not in AUTO_ONLY else [],
        )
        for i, place in enumerate(PLACES)
        for j, mesh in enumerate([AUTO, EXPLICIT])
        if mesh is AUTO or place not in AUTO_ONLY
    ],
)
def test_on_several_devices(place, mesh):
    f = mylib.filter_jit(place, in_shardings=P("data"), mesh=mesh)
    for _ in range(2):
        np.testing.assert_allclose(f(GOOD), jax.jit(place)(GOOD), rtol=1e-6)
        with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
            f(BAD)


def test_the_array_stays_where_it_is():
    f = mylib.filter_jit(check, in_shardings=P("data"), mesh=AUTO)
    text = f.lower(GOOD).compile().as_text()
    assert f(GOOD).sharding.spec == P("data")
    assert "all-gather" not in text and "callback" not in text


def outside_grad(f, x):
    return jax.grad(lambda x: jnp.sum(f(x)))(x)


OUTSIDE = {
    "grad": outside_grad,
    "vmap": lambda f, x: jax.vmap(f)(jnp.stack([x, x / 2]))[0],
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,))[1],
    "vjp": lambda f, x: jax.vjp(f, x)[1](x)[0],
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
}


@pytest.mark.parametrize(
    ("around", "place"),
    [
        *itertools.product(OUTSIDE, [check, in_scan, in_cond, in_jit]),
        *itertools.product(["vmap", "jvp"], [in_while]),
    ],
)
@pytest.mark.everyday(
    "grad-check",
    "grad-in_scan",
    "vmap-in_cond",
    "vmap-in_while",
    "jvp-check",
    "linearize-in_jit",
    rest="thorough",
)
def test_under_an_eager_transformation(place, around):
    x = jax.device_put(GOOD, jax.NamedSharding(AUTO, P("data")))
    f, around = mylib.filter_jit(place), OUTSIDE[around]
    np.testing.assert_allclose(around(f, x), around(jax.jit(place), x), rtol=1e-6)
    with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
        around(f, 2 * x)


def in_backward_rule(x):
    @jax.custom_vjp
    def f(x):
        return check(x)

    f.defvjp(lambda x: (f(x), None), lambda _, ct: (eqx.error_if(ct, ct > 1, "too steep"),))
    return f(x)


def in_linear_solve(x):
    return lax.custom_linear_solve(check, x, lambda matvec, b: matvec(b), symmetric=True)


class TestPrimitiveOfEquinox:
    """As `lineax.linear_solve`: JAX sees its checks only when the program is lowered."""

    @pytest.mark.parametrize(
        "around", [lambda f: f, in_scan_of, jax.vmap], ids=["alone", "scan", "vmap"]
    )
    def test_raises(self, around):
        x = np.stack([GOOD, GOOD]) if around is jax.vmap else GOOD
        spec = P(None, "data") if around is jax.vmap else P("data")
        f = mylib.filter_jit(around(checked_double), in_shardings=spec, mesh=AUTO)
        assert "callback" not in f.lower(x).as_text()
        np.testing.assert_array_equal(f(x), 2 * x)
        assert f(x).sharding.spec == spec
        with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
            f(2 * x)

    def test_gradients_are_its_own(self):
        """Inside and around `filter_jit`: its rule says 3 x, where what it does would give 2."""
        x = mylib.filter_shard(GOOD, P("data"), mesh=AUTO)
        f = mylib.filter_jit(lambda x: checked_double(x).sum())
        inside = mylib.filter_jit(jax.grad(lambda x: checked_double(x).sum()))
        for gradient in (jax.grad(f), inside):
            np.testing.assert_array_equal(gradient(x), 3 * GOOD)
        value, slope = jax.jvp(f, (x,), (jnp.ones_like(x),))
        assert (value, slope) == (16, 24)
        with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
            f(2 * x)

    def test_in_a_map(self):
        f = mylib.filter_shard_map(
            checked_double, mesh=AUTO, in_specs=P("data"), out_specs=P("data")
        )
        np.testing.assert_array_equal(f(GOOD), 2 * GOOD)
        with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
            f(np.where(np.arange(16) == 3, np.float32(11), GOOD))


def test_what_can_not_be_returned():
    # Equinox's own callback does it, on one device.
    whole, split = jnp.asarray(GOOD), jax.device_put(GOOD, jax.NamedSharding(AUTO, P("data")))
    f = mylib.filter_jit(in_linear_solve)
    np.testing.assert_array_equal(f(whole), whole)
    with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
        f(2 * whole)
    with pytest.raises(ValueError, match="in a call that mylib can't analyse"):
        f(split)


@pytest.mark.parametrize("place", [in_custom_jvp, in_custom_vjp, in_custom_vmap])
def test_with_rules_of_its_own_a_transformation_goes_inside(place):
    """Nothing returns the errors of rules that JAX calls later. Several devices are here."""
    around = jax.vmap
    if place is not in_custom_vmap:
        around = lambda f: jax.value_and_grad(lambda x: jnp.sum(f(x)))  # noqa: E731
    x = np.stack([GOOD, GOOD]) if place is in_custom_vmap else GOOD
    with pytest.raises(ValueError, match=r"rules of its own(.|\n)*filter_jit\(jax.grad\(f\)\)"):
        around(mylib.filter_jit(place))(x)
    inside = mylib.filter_jit(around(place), in_shardings=P(), mesh=AUTO)
    for ours, theirs in zip(inside(x), around(jax.jit(place))(x), strict=True):
        np.testing.assert_allclose(ours, theirs)
    with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
        inside(2 * x)


def test_in_a_backward_rule():
    split = jax.device_put(GOOD, jax.NamedSharding(AUTO, P("data")))
    inside = mylib.filter_jit(jax.grad(lambda x: jnp.sum(x * in_backward_rule(x))))
    np.testing.assert_array_equal(inside(split), GOOD + GOOD)
    steep = mylib.filter_jit(jax.grad(lambda x: jnp.sum(3 * x * in_backward_rule(x))))
    with pytest.raises(eqx.EquinoxRuntimeError, match="too steep"):
        steep(split)


ON_ONE = """
import equinox as eqx, jax, jax.numpy as jnp
import mylib

@jax.custom_vjp
def f(x):
    return eqx.error_if(x, x > 10, "too large")

f.defvjp(lambda x: (f(x), None), lambda _, ct: (3 * ct,))
grad = jax.grad(mylib.filter_jit(f))
print(grad(1.0))
try:
    grad(11.0)
except eqx.EquinoxRuntimeError as error:
    print("too large" in str(error))
"""


@pytest.mark.slow
def test_rules_of_its_own_on_one_device(checkout_env):
    """There Equinox's callback raises."""
    env = {**checkout_env, "XLA_FLAGS": ""}
    ran = run_python("-c", ON_ONE, env=env)
    assert ran.stdout.split() == ["3.0", "True"], ran.stderr


class TestShardMap:
    """Each device checks what it has. One of them finds something."""

    one_bad = np.array([0.5] * 15 + [2], np.float32)

    @staticmethod
    def mapped(f, mesh=AUTO, **options):
        options = {"in_specs": P("data"), "out_specs": P("data"), **options}
        return mylib.filter_shard_map(f, mesh=mesh, **options)

    @staticmethod
    def own(x):
        return eqx.error_if(x, jnp.any(x > 1), "too large")

    def assert_checked(self, f):
        for _ in range(2):
            np.testing.assert_array_equal(f(GOOD), GOOD)
            with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
                f(self.one_bad)

    @MESHES
    @pytest.mark.parametrize("check_vma", [True, False])
    def test_one_device(self, mesh, check_vma):
        self.assert_checked(self.mapped(self.own, mesh, check_vma=check_vma))

    @pytest.mark.parametrize(
        "place",
        [
            lambda own, x: lax.scan(lambda c, _: (own(c), None), x, None, length=3)[0],
            lambda own, x: mylib.loops.scan(lambda c, _: (own(c), None), x, None, length=3)[0],
            lambda own, x: lax.while_loop(
                lambda s: jnp.max(s[1]) < 2, lambda s: (own(s[0]), s[1] + 1), (x, x * 0)
            )[0],
            lambda own, x: lax.cond(jnp.max(x) > 1, own, lambda x: x, x),
            lambda own, x: jax.vmap(own)(x),
            lambda own, x: x + 0 * jax.grad(lambda x: jnp.sum(jnp.sin(own(x))))(x),
            lambda own, x: mylib.filter_checkpoint(own)(x),
            lambda own, x: jax.jit(own)(x),
            # The array is the same everywhere, what is checked isn't.
            lambda own, x: x + eqx.error_if(jnp.zeros(()), jnp.any(x > 1), "too large"),
        ],
        ids=["scan", "loops", "while", "cond", "vmap", "grad", "checkpoint", "jit", "replicated"],
    )
    def test_inside_of(self, place):
        self.assert_checked(self.mapped(lambda x: place(self.own, x)))

    @pytest.mark.slow
    def test_partly_manual_and_nested(self):
        inner = self.mapped(
            self.own, None, axis_names={"model"}, in_specs=P("model"), out_specs=P("model")
        )
        self.assert_checked(self.mapped(self.own, GRID, axis_names={"data"}))
        self.assert_checked(self.mapped(inner, GRID, axis_names={"data"}))

    @pytest.mark.slow
    def test_several_maps_in_a_program(self):
        f = self.mapped(self.own)

        def twice(x):
            return lax.scan(lambda c, _: (f(c), None), f(x), None, length=2)[0]

        self.assert_checked(mylib.filter_jit(twice))

    def test_in_a_program_of_others(self):
        f = self.mapped(self.own)
        for jit in (jax.jit, eqx.filter_jit):
            with pytest.raises(ValueError, match="needs mylib.filter_jit around the program"):
                jit(lambda x: f(x))(jnp.asarray(GOOD))


class TestMessages:
    def test_of_a_branch(self):
        def f(x, i):
            return eqx.branched_error_if(x, jnp.sum(x) > 10, i, ["first", "second", "third"])

        f = mylib.filter_jit(f, in_shardings={"x": P("data")}, mesh=AUTO)
        for i, message in enumerate(["first", "second", "third"]):
            with pytest.raises(eqx.EquinoxRuntimeError, match=f"EquinoxRuntimeError: {message}"):
                f(BAD, jnp.asarray(i))

    def test_of_the_first_that_failed(self):
        def f(x):
            x = eqx.error_if(x, jnp.sum(x) > 100, "one")
            x = eqx.error_if(x, jnp.sum(x) > 10, "two")
            return eqx.error_if(x, jnp.sum(x) > 5, "three")

        f = mylib.filter_jit(f, in_shardings=P("data"), mesh=AUTO)
        for factor, message in [(0.5, "three"), (1, "two"), (10, "one")]:
            with pytest.raises(eqx.EquinoxRuntimeError, match=f"EquinoxRuntimeError: {message}"):
                f(BAD * np.float32(factor))

    def test_the_largest_index_of_a_batch(self):
        def f(x, i):
            return eqx.branched_error_if(x, x > 0.9, i, ["first", "second", "third"])

        index = jnp.array([0, 1, 0, 0] * 4)
        for jit in (mylib.filter_jit, eqx.filter_jit):
            with pytest.raises(eqx.EquinoxRuntimeError, match="EquinoxRuntimeError: second"):
                jit(jax.vmap(f))(jnp.asarray(BAD), index)

    @pytest.mark.slow
    def test_is_that_of_equinox(self):
        def f(x):
            return eqx.error_if(x, jnp.sum(x) > 10, "the text")

        texts = []
        for jit in (mylib.filter_jit, eqx.filter_jit):
            jax.clear_caches()
            with pytest.raises(eqx.EquinoxRuntimeError) as caught:
                jit(f)(jnp.asarray(BAD))
            texts.append(str(caught.value))
        ours, theirs = texts
        assert ours == theirs and 'jnp.sum(x) > 10, "the text")' in ours


def test_is_not_made_where_nothing_uses_it():
    def unused(x):
        check(x)
        jax.jit(check)(x)
        lax.scan(lambda c, _: (c, check(x)), 0, None, length=2)
        return x + 1

    f = mylib.filter_jit(unused, in_shardings=P("data"), mesh=AUTO)
    np.testing.assert_array_equal(f(BAD), BAD + 1)


def test_ahead_of_time():
    f = mylib.filter_jit(check, in_shardings=P("data"), mesh=AUTO)
    compiled = f.lower(jax.ShapeDtypeStruct((16,), jnp.float32)).compile()
    np.testing.assert_array_equal(compiled(GOOD), GOOD)
    with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
        compiled(BAD)
    np.testing.assert_array_equal(compiled(GOOD), GOOD)


def test_traced_once():
    traces = []

    def f(x):
        traces.append(x)
        return check(x)

    f = mylib.filter_jit(f)
    f(jnp.asarray(GOOD)), f(jnp.asarray(GOOD))
    assert len(traces) == 1


def test_equations_are_made_once_where_nothing_is_checked():
    made = []
    counted_p = Primitive("counted")
    counted_p.def_abstract_eval(lambda x: made.append(x) or x)
    mlir.register_lowering(counted_p, mlir.lower_fun(lambda x: x, multiple_results=False))
    f = mylib.filter_jit(lambda x: counted_p.bind(x) + 1, in_shardings=P("data"), mesh=AUTO)
    np.testing.assert_array_equal(f(GOOD), GOOD + 1)
    f.lower(GOOD)
    assert len(made) == 1


def check_of_large(x):
    return check(x) if x.size > 4 else x + 1


@pytest.mark.parametrize("ahead", [False, True])
def test_larger_arrays_alone_are_checked(ahead):
    f = mylib.filter_jit(check_of_large)

    def call(x):
        return f.lower(x).compile()(x) if ahead else f(x)

    small = GOOD[:4]
    for _ in range(2):
        np.testing.assert_array_equal(call(small), small + 1)
        np.testing.assert_array_equal(call(GOOD), GOOD)
        with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
            call(BAD)


def test_no_tracer_leaks():
    """Where a check is found when the program is lowered, too."""
    f = mylib.filter_jit(check_of_large)
    with jax.checking_leaks():
        f(GOOD[:4]), f(GOOD)


def test_without_jit():
    calls = []

    @mylib.filter_jit
    def f(x):
        calls.append(float(x[0]))
        return check(x)

    with jax.disable_jit():
        f(jnp.asarray(GOOD))
        with pytest.raises(RuntimeError, match="too large"):
            f(jnp.asarray(BAD))
    assert calls == [0.5, 1.0]


SCRIPT = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
import mylib

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
x = np.arange(16.0, dtype=np.float32)
f = mylib.filter_jit(
    lambda x: eqx.error_if(x, x.sum() > 10, "too large"), in_shardings=P("data"), mesh=mesh
)
own = mylib.filter_shard_map(
    lambda x: eqx.error_if(x, x.sum() > 28, "too large"),
    mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False,
)
print(np.isnan(f(x)).sum(), np.isnan(own(x)).sum())
print(own(x.astype(np.int32))[-1], own(x.astype(np.int32))[0])
gradient = jax.grad(lambda x: jnp.sum(own(x) * 2))(jnp.asarray(x))
print(np.asarray(gradient).sum())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("on_error", "nans"), [("nan", "16 2"), ("off", "0 0")])
def test_the_environment_variable(on_error, nans, checkout_env):
    last = 2**31 - 1 if on_error == "nan" else 15
    env = {**checkout_env, "EQX_ON_ERROR": on_error}
    ran = run_python("-c", SCRIPT, env=env)
    assert ran.stdout.split("\n")[:3] == [nans, f"{last} 0", "32.0"], ran.stderr


STOPPING = """
import equinox as eqx, numpy as np
import mylib

def user(x):
    y = x + 1
    return eqx.error_if(y, y.sum() > 10, "too large")

x = np.ones(16, np.float32)
print(mylib.filter_jit(user)(x))
"""


@pytest.mark.slow
def test_a_breakpoint_shows_the_users_frame(checkout_env):
    env = {**checkout_env, "EQX_ON_ERROR": "breakpoint"}
    ran = subprocess.run(
        [sys.executable, "-c", STOPPING],
        env=env,
        input="p y.shape\nc\n",
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "Entering jdb" in ran.stdout and "(jdb) (16,)" in ran.stdout, ran.stderr


@pytest.mark.multihost(processes=2, devices_per_process=4)
class TestProcesses:
    def test_every_process_raises(self):
        f = mylib.filter_jit(check, in_shardings=P("data"), mesh=AUTO)
        for _ in range(2):
            assert_good(f)
            with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
                f(BAD)

    def test_one_device_of_one_process(self):
        f = TestShardMap.mapped(TestShardMap.own)
        for _ in range(2):
            assert_good(f)
            with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
                f(TestShardMap.one_bad)


def assert_good(f):
    for shard in f(GOOD).addressable_shards:
        np.testing.assert_array_equal(shard.data, GOOD[shard.index])


def test_a_check_that_is_hidden_in_a_primitive_is_refused():
    """In one that has a function among its parameters, or knows it without them. Nobody looks into
    it before it is lowered.
    """

    checked_p = Primitive("somebodys_check")
    checked_p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(checked_p, mlir.lower_fun(check, multiple_results=False))
    f = mylib.filter_jit(lambda x: checked_p.bind(x) * 2, in_shardings=P("data"), mesh=AUTO)
    with pytest.raises(ValueError, match="error_if is called in a call that mylib can't analyse"):
        f(GOOD)
    alone = mylib.filter_jit(lambda x: checked_p.bind(x) * 2)
    np.testing.assert_allclose(alone(GOOD), 2 * GOOD)
    with pytest.raises(eqx.EquinoxRuntimeError, match="too large"):
        alone(BAD)


def test_two_programs_with_one_check():
    """Equinox's own `jit` keeps what it has traced, so both programs have the same check."""

    def own_check(x):
        return eqx.error_if(x, jnp.sum(x) > 10, "in two programs")

    def solved(x):
        return lax.custom_linear_solve(own_check, x, lambda matvec, b: matvec(b), symmetric=True)

    holder_p = Primitive("holder")
    holder_p.def_abstract_eval(lambda x, program: x)
    lower = mlir.lower_fun(lambda x, program: jaxpr_as_fun(program)(x), multiple_results=True)
    mlir.register_lowering(holder_p, lower)

    def held(x):
        return holder_p.bind(x, program=jax.make_jaxpr(own_check)(x))

    split = jax.device_put(GOOD, jax.NamedSharding(AUTO, P("data")))
    for f in [mylib.filter_jit(solved), mylib.filter_jit(held)] * 2:  # JAX then has the traces
        with pytest.raises(ValueError, match="in a call that mylib can't analyse"):
            f(split)
