"""Errors of JAX in our transformations say what they are about, and what to do."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from contexts import AUTO, EXPLICIT
from jax import lax
from jax.sharding import PartitionSpec as P

import mylib

ROWS, COLUMNS = (jnp.ones((8, 8)), P("data")), (jnp.ones((8, 8)), P(None, "data"))


def first(error) -> str:
    """What an error says first: logs show it, and not always its notes."""
    return str(error.value).split("\n")[0]


class TestExplicitAxes:
    said = (
        "'data', 'model' are Explicit axes: JAX asks for the sharding of this result, where Auto "
        "axes leave it to the compiler. Either give it, or place an operand with "
        "mylib.filter_shard before; or use a mesh of mylib.make_mesh, whose axes are Auto"
    )

    def fails(self, call):
        x, y = (mylib.filter_shard(*given, mesh=EXPLICIT) for given in (ROWS, COLUMNS))
        with pytest.raises(Exception, match="produces an illegally sharded result") as error:
            call(x, y)
        assert first(error) == self.said and str(error.value).count(self.said) == 1

    def test_lower(self):
        self.fails(mylib.filter_jit(jnp.add).lower)

    def test_functions_inside_each_other_say_it_once(self):
        inner = mylib.filter_checkpoint(mylib.filter_jit(lambda x, y: x + y))
        self.fails(mylib.filter_jit(lambda x, y: inner(x, y)))

    def test_with_a_mesh_in_force(self):
        with jax.set_mesh(EXPLICIT):
            inner = mylib.filter_jit(lambda x, y: x + y)
            self.fails(mylib.filter_jit(lambda x, y: inner(x, y)))


class TestArguments:
    """JAX names arrays by their place in the program."""

    here, there = (jax.device_put(jnp.ones(8), device) for device in jax.devices()[:2])

    @pytest.mark.parametrize("donate", ["none", "all"])
    def test_on_different_devices(self, donate):
        add = mylib.filter_jit(lambda model, x: model["w"] + x, donate=donate)
        with pytest.raises(ValueError, match="incompatible devices") as error:
            add({"w": self.here}, self.there)
        assert "arrays[0] is model['w'], arrays[1] is x. Place all arguments" in first(error)

    def test_of_a_compiled_program(self):
        add = mylib.filter_jit(lambda model, x: model["w"] + x)
        compiled = add.lower({"w": self.here}, self.here).compile()
        with pytest.raises(ValueError, match="disagree with the shardings") as error:
            compiled({"w": self.here}, self.there)
        assert first(error) == "arrays[1] is x"

    def test_other_errors_have_none(self):
        with pytest.raises(TypeError) as plain:
            self.here + "a"
        with pytest.raises(TypeError) as error:
            mylib.filter_jit(lambda x: x + "a")(self.here)
        assert first(error)[:20] == str(plain.value)[:20]
        with pytest.raises(mylib.PlacementError, match=r"kept\[0\]") as error:
            mylib.filter_jit(lambda kept: kept, in_shardings=P("dta"), mesh=AUTO)([self.here])
        assert not hasattr(error.value, "__notes__")


@pytest.mark.parametrize("collective", [lax.psum, lax.pmean], ids=lambda f: f.__name__)
def test_a_sum_over_an_axis_that_is_not_there(collective):
    def total(x):
        return collective(jnp.sum(x), "dta")

    f = mylib.filter_shard_map(total, mesh=AUTO, in_specs=P("data"), out_specs=P())
    with pytest.raises(NameError, match="^total communicates over 'dta', .* 'data', 'model'"):
        f(jnp.ones(8))


def test_other_assertions_are_left_alone():
    @mylib.filter_shard_map(mesh=AUTO, in_specs=P("data"), out_specs=P())
    def fails(x):
        assert x.ndim == 2
        return lax.psum(x, "data")

    with pytest.raises(AssertionError):
        fails(jnp.ones(8))


class TestWhatResultsAre:
    """Errors about the placement of results, which the caller hasn't seen."""

    def test_of_another_structure(self):
        step = mylib.filter_jit(lambda x: (x, x, x), out_shardings=(P(), P()), mesh=AUTO)
        with pytest.raises(mylib.PlacementError, match="a prefix that has a tuple of 2") as error:
            step(jnp.ones(8))
        assert "(the tree is what <lambda> returns, placed by its out_shardings)" in (
            error.value.__notes__
        )


class TestLayers:
    """`fully_shard` makes classes with the names of the originals."""

    def test_combined_with_the_model_before(self):
        model = eqx.nn.Linear(8, 8, key=jax.random.key(0))

        @mylib.filter_jit
        def update(model):
            sharded = mylib.fully_shard(model, eqx.nn.Linear, P("data"), mesh=AUTO)
            return jax.tree.map(jnp.add, model, sharded)

        with pytest.raises(ValueError, match="different type") as error:
            update(model)
        assert "one of them is of fully_shard" in first(error)

    def test_other_trees_have_none(self):
        with pytest.raises(ValueError, match="different type") as error:
            mylib.filter_jit(lambda x: jax.tree.map(jnp.add, [x], (x,)))(jnp.ones(8))
        assert "fully_shard" not in str(error.value)


class Silent:
    def __str__(self):
        raise OSError("it has no words")


@pytest.mark.parametrize("base", [Exception, ValueError, AssertionError, NotImplementedError])
def test_errors_that_cannot_be_shown(base):
    """A user's error whose text can't be had leaves as it is."""

    class Failed(Silent, base):
        pass

    def fails(x):
        raise Failed

    kept = jnp.ones(())
    for decorate in (
        mylib.filter_jit,
        mylib.filter_jit(in_shardings=P("data"), mesh=AUTO),
        mylib.filter_shard_map(mesh=AUTO, in_specs=P("data"), out_specs=P()),
        mylib.filter_shard_map(mesh=AUTO, in_specs=P("data"), out_specs=P(), jit=False),
    ):
        with pytest.raises(Failed):
            decorate(lambda x: fails(x + kept))(jnp.ones(8))
        with pytest.raises(Failed):
            mylib.filter_jit(fails).lower(jnp.ones(8))


def test_what_was_compiled_for_other_types():
    compiled = mylib.filter_jit(lambda x, w: x @ w).lower(jnp.ones(8), jnp.ones(8)).compile()
    with pytest.raises(TypeError, match="compiled with") as error:
        compiled(jnp.ones(8), jnp.ones(8, int))
    assert first(error) == "arrays[1] is w"


class TestTwoMeshes:
    """One of `mesh=` and another of `jax.set_mesh`."""

    SMALL = mylib.make_mesh(data=4, devices=jax.devices()[:4])

    @pytest.mark.parametrize("where", ["in_shardings", "out_shardings"])
    def test_they_are_named(self, where):
        f = mylib.filter_jit(lambda x: x * 2, **{where: P("data")}, mesh=self.SMALL)
        with jax.set_mesh(AUTO), pytest.raises(ValueError) as error:
            f(jnp.ones(8))
        said = first(error)
        assert "<lambda> has mesh=mesh ('data': 4), and is called under" in said
        assert "mesh ('data': 4, 'model': 2), which differs: leave out mesh=" in said

    def test_other_types_of_axes(self):
        f = mylib.filter_jit(lambda x: x * 2, in_shardings=P("data"), mesh=EXPLICIT)
        with jax.set_mesh(AUTO), pytest.raises(ValueError) as error:
            f(jnp.ones(8))
        assert "which differs: leave out mesh=" in first(error)

    def test_one_mesh_is_not(self):
        f = mylib.filter_jit(lambda x: x * 2, in_shardings=P("nowhere"), mesh=AUTO)
        with jax.set_mesh(AUTO), pytest.raises(ValueError, match="mesh") as error:
            f(jnp.ones(8))
        assert not hasattr(error.value, "__notes__")
