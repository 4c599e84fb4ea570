"""Errors of JAX in our transformations say what they are about, and what to do."""

import jax
import jax.numpy as jnp
import pytest
from contexts import AUTO, EXPLICIT
from jax import lax
from jax.sharding import PartitionSpec as P

import mylib

ROWS, COLUMNS = (jnp.ones((8, 8)), P("data")), (jnp.ones((8, 8)), P(None, "data"))


def notes(error) -> list[str]:
    return [note for note in error.value.__notes__ if note.startswith("(")]


class TestExplicitAxes:
    said = (
        "('data', 'model' are Explicit axes: JAX asks for the sharding of this result, where Auto "
        "axes leave it to the compiler. Either give it, or place an operand with "
        "mylib.filter_shard before; or use a mesh of mylib.make_mesh, whose axes are Auto)"
    )

    def fails(self, call):
        x, y = (mylib.filter_shard(*given, mesh=EXPLICIT) for given in (ROWS, COLUMNS))
        with pytest.raises(Exception, match="produces an illegally sharded result") as error:
            call(x, y)
        assert notes(error) == [self.said]

    def test_call(self):
        self.fails(mylib.filter_jit(jnp.add))

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

    @pytest.mark.parametrize("donate, own", [("none", "kept"), ("all", "donated")])
    def test_on_different_devices(self, donate, own):
        add = mylib.filter_jit(lambda model, x: model["w"] + x, donate=donate)
        with pytest.raises(ValueError, match="incompatible devices") as error:
            add({"w": self.here}, self.there)
        (note,) = notes(error)
        assert f"{own}[0] is model['w'], {own}[1] is x. Place all arguments" in note

    def test_of_a_compiled_program(self):
        add = mylib.filter_jit(lambda model, x: model["w"] + x)
        compiled = add.lower({"w": self.here}, self.here).compile()
        with pytest.raises(ValueError, match="disagree with the shardings") as error:
            compiled({"w": self.here}, self.there)
        assert notes(error) == ["(kept[1] is x)"]

    def test_other_errors_have_none(self):
        with pytest.raises(TypeError) as error:
            mylib.filter_jit(lambda x: x + "a")(self.here)
        assert not notes(error)
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
