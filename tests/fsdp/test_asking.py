"""`fully_shard` and others, asked for something that was not meant."""

from typing import Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxtyping import Array

import mylib
from mylib.rules import fsdp, replicated

AUTO = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
GRID = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
KEPT = fsdp("data", min_size=64)
KEY = jax.random.key(0)
T = TypeVar("T")


class Encoder(eqx.Module):
    """It is not called."""

    linear: eqx.nn.Linear

    def __init__(self):
        self.linear = eqx.nn.Linear(16, 16, key=KEY)

    def encode(self, x):
        return self.linear(x)


class Called(Encoder):
    def __call__(self, x):
        return self.encode(x)


class Typed(eqx.Module, Generic[T]):
    weight: Array

    def __call__(self, x):
        return x @ self.weight


def faults_of(model, *args, **options):
    with pytest.raises(mylib.PlacementError) as caught:
        mylib.fully_shard(model, *args, **{"mesh": AUTO, **options})
    return caught.value.faults


def test_once_for_each_class():
    model = [eqx.nn.Linear(16, 16, key=KEY), eqx.nn.Conv1d(8, 8, 1, key=KEY)]
    once = mylib.fully_shard(model, eqx.nn.Linear, KEPT, mesh=AUTO)
    (fault,) = faults_of(once, eqx.nn.Conv1d, KEPT)
    assert fault.path == "[0]" and "already" in fault.reason and "a tuple" in fault.fix


@pytest.mark.parametrize(
    "layers",
    [Encoder, (Encoder,), {Encoder: ["__call__"]}, {Encoder: ["__call__", "decode"]}],
    ids=["class", "tuple", "mapping", "methods"],
)
def test_methods_that_are_not_there(layers):
    first, second = faults_of([Encoder(), Encoder(), Called()], layers, KEPT)[:2]
    assert (first.path, second.path) == ("[0]", "[1]")
    assert "Encoder has no method __call__" in first.reason
    assert first.fix.endswith("layers={Encoder: ['encode']}")


def test_methods_of_subclasses():
    mylib.fully_shard([Called()], Encoder, KEPT, mesh=AUTO)
    faults = faults_of([Called(), Encoder()], Encoder, KEPT)
    assert [fault.path for fault in faults] == ["[1]"]


def test_a_predicate_that_chooses_a_module_without_call():
    (fault,) = faults_of({"a": Encoder()}, lambda module, path: path == "['a']", KEPT)
    assert fault.path == "['a']" and "Encoder has no method __call__" in fault.reason


@pytest.mark.parametrize("layers", [Typed[int], (Typed[int],), {Typed[int]: "__call__"}])
def test_parameters_of_a_class(layers):
    with pytest.raises(TypeError, match="does not select Modules. Give a class"):
        mylib.fully_shard(Typed[int](jnp.ones((8, 8))), layers, KEPT, mesh=AUTO)


def test_a_class_in_place_of_an_instance():
    for ask in (
        lambda: mylib.filter_shard(eqx.nn.MLP, P(), mesh=AUTO),
        lambda: mylib.filter_device_put(eqx.nn.MLP, P(), mesh=AUTO),
        lambda: mylib.explain(eqx.nn.MLP, KEPT, AUTO),
        lambda: mylib.resolve(eqx.nn.MLP, KEPT, mesh=AUTO),
        lambda: mylib.fully_shard(eqx.nn.MLP, eqx.nn.Linear, KEPT, mesh=AUTO),
    ):
        with pytest.raises(TypeError, match="MLP is a class: pass an instance of the model"):
            ask()
    inside = {"class": eqx.nn.MLP}
    assert mylib.filter_shard(inside, P(), mesh=AUTO) == inside


def test_used_that_splits_a_part_of_what_kept_splits():
    model = eqx.nn.Linear(16, 16, key=KEY)
    kept = eqx.tree_at(lambda x: (x.weight, x.bias), model, (P("data", "model"), P()))
    mylib.fully_shard(model, eqx.nn.Linear, kept, P("model"), mesh=GRID)
    # An axis of size 1 splits nothing, and None leaves it to the compiler.
    one = jax.make_mesh((8, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    mylib.fully_shard(model, eqx.nn.Linear, KEPT, P("model"), mesh=one)
    mylib.fully_shard(model, eqx.nn.Linear, None, P("model"), mesh=GRID)
    mylib.fully_shard(model, eqx.nn.Linear, KEPT, None, mesh=AUTO)


def test_weights_kept_on_a_device():
    model = eqx.nn.Linear(16, 16, key=KEY)
    for kept, used in ((jax.devices()[0], replicated()), (KEPT, jax.devices()[0])):
        faults = faults_of(model, eqx.nn.Linear, kept, used)
        assert {fault.path for fault in faults} == {".weight", ".bias"}
        assert "layers compute on 8 devices, and this is on 1" in faults[0].reason
    alone = mylib.fully_shard(model, eqx.nn.Linear, jax.devices()[0], jax.devices()[0])
    np.testing.assert_allclose(alone(jnp.ones(16)), model(jnp.ones(16)), rtol=1e-6)


# Ensembles.


class Bare(eqx.Module):
    weight: Array
    bias: Array

    def __call__(self, x):
        return x @ self.weight + self.bias


def run(stack, kept, axes, x):
    @eqx.filter_jit
    def loss(stack, x):
        def value(stack):
            layers = mylib.fully_shard(stack, Bare, kept, mesh=AUTO)
            # A prefix of the layers has their classes.
            prefix = jax.tree.unflatten(jax.tree.structure(layers), axes)
            by_layer = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(prefix, None))
            return jnp.sum(by_layer(layers, x) ** 2)

        return eqx.filter_value_and_grad(value)(stack)

    return loss(mylib.filter_shard(stack, kept, mesh=AUTO), x)


def test_the_ensembles_dimension_must_not_be_split():
    stack = Bare(jnp.ones((8, 16, 32)), jnp.ones((8, 32)))
    kept = Bare(P("data"), P(None, "data"))
    with pytest.raises(mylib.PlacementError, match="'data' splits them by layer") as caught:
        run(stack, kept, (0, 0), jnp.ones((8, 16)))
    assert [fault.path for fault in caught.value.faults] == ["Bare.weight"]


def test_ensembles_that_share_an_array():
    stack = Bare(jax.random.normal(KEY, (4, 16, 32)), jnp.ones(32))
    kept = Bare(P(None, "data"), P("data"))
    value, grads = run(stack, kept, (0, None), jnp.ones((8, 16)))
    expected = jnp.sum((jnp.ones((8, 16)) @ stack.weight + 1) ** 2)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert grads.bias.sharding.is_equivalent_to(NamedSharding(AUTO, P("data")), 1)


def test_ensembles_stacked_on_another_dimension():
    stack = Bare(jnp.ones((16, 4, 8)), jnp.ones((4, 8)))
    with pytest.raises(mylib.PlacementError, match="along its first dimensions") as caught:
        run(stack, Bare(P("data"), P(None, "data")), (1, 0), jnp.ones((8, 16)))
    (fault,) = caught.value.faults
    assert fault.path == "Bare.weight" and fault.shape == (16, 8) and "in_axes=0" in fault.fix


def test_arrays_that_are_no_slices():
    layer = mylib.fully_shard(Bare(jnp.ones((4, 16, 32)), jnp.ones(32)), Bare, P(), mesh=AUTO)
    other = eqx.tree_at(lambda x: x.weight, layer, jnp.ones((5, 32)))
    with pytest.raises(mylib.PlacementError, match=r"not a slice .* of shape \(4, 16, 32\)"):
        other(jnp.ones((8, 5)))
