"""Each warning has a category of its own, and can be silenced by it; and `jax.jit`'s options."""

import ast
import inspect
import warnings
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from contexts import AUTO as MESH
from jax.sharding import PartitionSpec as P

import mylib


def capture():
    big = jnp.ones((1024, 512))
    mylib.filter_jit(lambda x: big.sum() + x)(jnp.ones(()))


def donate():
    mylib.filter_jit(lambda x: x.sum(), donate="warn")(jnp.ones(8))


def recompile():
    f = mylib.filter_jit(lambda x: x + 1, out_shardings=P("data"), mesh=MESH)
    f(f(jnp.ones(8)))


def count():
    f = mylib.filter_jit(lambda x, n: x + n)
    for n in range(10):
        f(jnp.ones(()), n)


def prefetch():
    def loss(model):
        x = jnp.ones(2)
        for layer in mylib.fully_shard(model, eqx.nn.Linear, P(), mesh=MESH, prefetch=1):
            x = jax.checkpoint(lambda x, layer=layer: layer(x))(x)
        return x.sum()

    jax.make_jaxpr(loss)([eqx.nn.Linear(2, 2, key=jax.random.key(0))] * 3)


def place():
    kept = mylib.rules.fsdp("data", min_size=1)

    @mylib.filter_jit
    def step(model, x):
        return mylib.fully_shard(model, eqx.nn.Linear, kept, mesh=MESH)(x)

    model = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    step(mylib.filter_shard(model, P(), mesh=MESH), jnp.ones(8))


def replicate():
    x = mylib.filter_shard(jnp.ones((512, 512)), P(), mesh=MESH)
    mylib.filter_jit(lambda x: x @ x)(x)


CASES = {
    mylib.errors.CapturedArrayWarning: capture,
    mylib.errors.DonationWarning: donate,
    mylib.errors.PlacementWarning: place,
    mylib.errors.PrefetchWarning: prefetch,
    mylib.errors.RecompilationWarning: recompile,
    mylib.errors.ReplicatedWarning: replicate,
    mylib.errors.StaticNumberWarning: count,
}


@pytest.mark.parametrize("category", CASES)
class TestCategories:
    def test_is_raised(self, category):
        with pytest.warns(category) as caught:
            CASES[category]()
        assert [type(w.message) for w in caught] == [category]
        assert caught[0].filename == __file__

    @pytest.mark.parametrize("base", [None, mylib.MylibWarning, UserWarning])
    def test_can_be_silenced(self, category, base):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", category=base or category)
            CASES[category]()
        assert caught == []

    def test_is_documented(self, category):
        assert category.__doc__
        page = (Path(__file__).parents[2] / "docs" / "filter-jit.md").read_text()
        assert category.__name__ in page


def test_every_warning_has_a_category():
    warning = [
        path.name
        for path in Path(mylib.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("warnings.warn")
    ]
    assert warning == ["errors.py"]


class TestOptions:
    def test_fun_by_keyword(self):
        assert mylib.filter_jit(fun=lambda x: x + 1)(jnp.ones(())) == 2

    @pytest.mark.parametrize(
        "option",
        [
            {"inline": True},
            {"keep_unused": True},
            {"compiler_options": {"xla_cpu_enable_fast_math": True}},
        ],
        ids=str,
    )
    def test_is_passed_on(self, option):
        f = mylib.filter_jit(lambda x, y: x + 1, **option)
        g = mylib.filter_jit(**option)(lambda x, y: x + 1)
        assert f(jnp.ones(()), jnp.ones(3)) == g(jnp.ones(()), jnp.ones(3)) == 2

    def test_has_its_effect(self):
        x, y = jnp.ones(()), jnp.ones(3)

        def told(jit, inline):
            f = jit(lambda x: x + 1, inline=inline)
            (eqn, *_) = jax.make_jaxpr(lambda x: f(x) * 2)(x).eqns
            return eqn.primitive.name, str(eqn.params.get("inline"))

        assert told(mylib.filter_jit, True) == told(jax.jit, True)
        assert told(mylib.filter_jit, False) == told(jax.jit, False) != told(jax.jit, True)
        kept = mylib.filter_jit(lambda x, y: x + 1, keep_unused=True).lower(x, y).as_text()
        left = mylib.filter_jit(lambda x, y: x + 1).lower(x, y).as_text()
        assert "tensor<3xf32>" in kept and "tensor<3xf32>" not in left
        with pytest.raises(Exception, match="no_such_option"):
            mylib.filter_jit(lambda x: x + 1, compiler_options={"no_such_option": True})(x)

    @pytest.mark.parametrize(
        ("option", "told"),
        [
            ("static_argnums", "leave it out: everything that is not an array is static"),
            ("static_argnames", "leave it out: everything that is not an array is static"),
            ("donate_argnums", "write donate='all'"),
            ("donate_argnames", "write donate="),
            ("device", "write in_shardings=device"),
            ("backend", "write in_shardings=jax.devices"),
            ("inlined", "unexpected keyword argument 'inlined'$"),
        ],
    )
    def test_others_are_refused(self, option, told):
        for make in (
            lambda: mylib.filter_jit(lambda x: x, **{option: 0}),
            lambda: mylib.filter_jit(**{option: 0}),
        ):
            with pytest.raises(TypeError, match=f"{option}.*{told}|{told}"):
                make()

    def test_every_option_of_jax_is_taken_or_explained(self):
        taken = set(inspect.signature(mylib.filter_jit).parameters)
        for name in inspect.signature(jax.jit).parameters:
            if name not in taken:
                with pytest.raises(TypeError, match=f"{name!r}: "):
                    mylib.filter_jit(lambda x: x, **{name: None})
