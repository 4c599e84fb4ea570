"""The classes that `fully_shard` makes: what is hidden of them, and from whom."""

import copy
import dataclasses
import inspect
import pickle
import typing
from typing import ClassVar, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jaxtyping import Array, Float

import mylib
from mylib.rules import fsdp

AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
KEPT = fsdp("data", min_size=1)
X = np.ones((2, 8), np.float32)
T = TypeVar("T")


class Registered(eqx.Module):
    """Its subclasses register themselves, and must say under which name."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, known_as, **others):
        super().__init_subclass__(**others)
        Registered.known[known_as] = cls


class Hooked(Registered, known_as="hooked"):
    weight: Float[Array, "a b"]

    def __call__(self, x):
        return x @ self.weight


class Typed(eqx.Module, Generic[T]):
    weight: Array
    kind: str = eqx.field(static=True, default="typed")

    def __call__(self, x):
        return x @ self.weight


class Abstract(eqx.Module):
    weight: eqx.AbstractVar[Array]

    def __call__(self, x):
        raise NotImplementedError


class Concrete(Abstract, strict=True):
    weight: Array
    scale: float = eqx.field(default=1.0, kw_only=True)

    def __call__(self, x):
        return super().__call__(x) if self.scale == 0 else self.scale * x @ self.weight


class Initialised(eqx.Module):
    weight: Array

    def __init__(self, weight):
        self.weight = weight

    def __check_init__(self):
        assert self.weight.ndim == 2

    def __call__(self, x):
        return x @ self.weight


class Plain:
    """A base that is no Module."""

    def scaled(self, x):
        return 3 * x


class Mixed(Plain, eqx.Module):
    weight: Array

    def __call__(self, x):
        return self.scaled(x @ self.weight)


WEIGHT = jnp.arange(64.0).reshape(8, 8)
MODELS = [Hooked(WEIGHT), Typed(WEIGHT), Concrete(WEIGHT), Initialised(WEIGHT), Mixed(WEIGHT)]
ALL = pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)


def layer_of(model):
    return mylib.fully_shard(model, type(model), KEPT, mesh=AUTO)


def test_hooks_for_subclasses_do_not_run():
    layer = layer_of(MODELS[0])
    assert Registered.known == {"hooked": Hooked}
    np.testing.assert_allclose(layer(X), X @ WEIGHT)


@ALL
def test_the_fields_are_those_of_the_model(model):
    layer = layer_of(model)
    assert dataclasses.fields(layer) == dataclasses.fields(model)
    assert typing.get_type_hints(type(layer)) == typing.get_type_hints(type(model))
    assert dataclasses.asdict(layer).keys() == dataclasses.asdict(model).keys()
    assert isinstance(layer, type(model)) and type(layer) is not type(model)
    assert type(layer).__mro__[2:] == type(model).__mro__
    assert type(layer).__name__ == type(model).__name__
    assert repr(layer) == repr(model)


@ALL
def test_what_is_done_with_modules(model):
    layer, expected = layer_of(model), model(X)
    structure = jax.tree.structure(layer)
    assert eqx.tree_equal(pickle.loads(pickle.dumps(layer)), model)
    for same in (copy.copy(layer), copy.deepcopy(layer), jax.tree.map(lambda x: x, layer)):
        assert jax.tree.structure(same) == structure
        np.testing.assert_allclose(same(X), expected)
    twice = eqx.tree_at(lambda layer: layer.weight, layer, 2 * WEIGHT)
    assert jax.tree.structure(twice) == structure
    np.testing.assert_allclose(twice(X), 2 * expected)
    assert eqx.tree_equal(layer, layer_of(model))
    assert inspect.signature(layer) == inspect.signature(model)


def test_replace():
    layer = layer_of(Typed(WEIGHT))
    twice = dataclasses.replace(layer, weight=2 * WEIGHT)
    assert jax.tree.structure(twice) == jax.tree.structure(layer)
    np.testing.assert_allclose(twice(X), 2 * X @ WEIGHT)


@pytest.mark.parametrize("model", [Typed(WEIGHT), Initialised(WEIGHT)])
def test_what_the_class_of_a_layer_makes_is_no_layer(model):
    made = type(layer_of(model))(WEIGHT)
    with pytest.raises(TypeError, match="was made by the class of a layer of fully_shard"):
        made(X)


def test_a_step_with_layers_is_compiled_once():
    count = 0

    @mylib.filter_jit
    def run(layer, x):
        nonlocal count
        count += 1
        return layer(x)

    for model in MODELS[:1] * 3:
        run(layer_of(model), X)
    assert count == 1


def test_a_weight_of_another_shape():
    """Rules have been asked about the shapes that `fully_shard` was given."""
    mesh = mylib.make_mesh(data=8)

    @mylib.filter_jit
    def run(layer, other):
        layer = mylib.fully_shard(layer, eqx.nn.Linear, fsdp("data"), mesh=mesh)
        return eqx.tree_at(lambda layer: layer.weight, layer, other)(jnp.ones(8))

    layer = eqx.nn.Linear(8, 8, use_bias=False, key=jax.random.key(0))
    assert run(layer, jnp.ones((8, 8))).shape == (8,)
    with pytest.raises(mylib.PlacementError, match=r"Linear.weight \(9, 8\)[\s\S]*not a slice"):
        run(layer, jnp.ones((9, 8)))
