"""Models that are made, transformed and trained by several processes, beside one device's."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agreeing import all_equal, fails
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import mylib
from mylib.rules import by_path, fsdp, like, replicated
from mylib.testing import assert_placed, same_program


def _on(processes: int, devices: int, kind: AxisType):
    marks = [pytest.mark.multihost(processes=processes, devices_per_process=devices)]
    if processes > 2:
        # They take turns on the cores of a small machine.
        marks.append(pytest.mark.thorough)
    return pytest.param(kind, id=f"{processes}x{devices}-{kind.name}", marks=marks)


@pytest.fixture(
    params=[_on(2, 4, AxisType.Auto), _on(2, 4, AxisType.Explicit), _on(4, 2, AxisType.Auto)]
)
def mesh(request) -> Mesh:
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(request.param,) * 2)


OPTIM = optax.adamw(1e-2)


class Net(eqx.Module):
    embed: jax.Array
    layers: list[eqx.nn.Linear]
    name: str = "net"

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.embed = jax.random.normal(keys[0], (16, 8))
        self.layers = [eqx.nn.Linear(8, 32, key=keys[1]), eqx.nn.Linear(32, 8, key=keys[2])]

    def __call__(self, x):
        x = x @ self.embed
        for layer in self.layers:
            x = jax.nn.gelu(x @ layer.weight.T + layer.bias)
        return x


def _make(key):
    net = Net(key)
    return net, OPTIM.init(eqx.filter(net, eqx.is_array))


def _batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(16, 16)).astype(np.float32)


def _assert_shards_of(tree, whole, **tolerance) -> None:
    """Each shard here is its part of what one device has."""
    for y, value in zip(jax.tree.leaves(tree), jax.tree.leaves(whole), strict=True):
        if not isinstance(y, jax.Array):
            continue
        assert y.dtype == value.dtype and y.shape == value.shape
        for shard in y.addressable_shards:
            part, wanted = np.asarray(shard.data), np.asarray(value)[shard.index]
            if tolerance:
                np.testing.assert_allclose(part, wanted, **tolerance)
            else:
                np.testing.assert_array_equal(part, wanted)


@pytest.mark.everyday("2x4-Explicit", rest="thorough")
def test_born_sharded(mesh):
    key = jax.random.key(7)
    rule = by_path({"embed": P("model"), "layers.0.weight": P("model", "data")}) | fsdp("data")
    same_program(mylib.filter_jit(_make, out_shardings=rule, mesh=mesh), key)
    born = mylib.filter_jit(_make, out_shardings=rule, mesh=mesh)(key)
    assert_placed(born, rule, mesh=mesh)
    assert not born[0].layers[0].weight.is_fully_addressable
    _assert_shards_of(born, jax.jit(lambda key: eqx.filter(_make(key), eqx.is_array))(key))
    mylib.check_replicas(born)
    # One that each process has made by itself goes to the same places.
    moved = mylib.filter_shard(_make(key), rule, mesh=mesh, check=True)
    assert_placed(moved, like(born))


def _loss(net, x, y):
    return jnp.mean((net(x) - y) ** 2)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.everyday("2x4-Auto-True", rest="thorough")
def test_three_steps(mesh, checkpointed):
    def step(net, state, x):
        loss = mylib.filter_checkpoint(_loss) if checkpointed else _loss

        def full(net):
            net = mylib.filter_shard(net, replicated(), mesh=mesh)
            return loss(net, x, jnp.flip(x, 1)[:, :8])

        value, grads = eqx.filter_value_and_grad(full)(net)
        updates, state = OPTIM.update(grads, state, eqx.filter(net, eqx.is_array))
        return eqx.apply_updates(net, updates), state, value

    @eqx.filter_jit
    def alone(net, state, x):
        value, grads = eqx.filter_value_and_grad(_loss)(net, x, jnp.flip(x, 1)[:, :8])
        updates, state = OPTIM.update(grads, state, eqx.filter(net, eqx.is_array))
        return eqx.apply_updates(net, updates), state, value

    rule, key = fsdp("data"), jax.random.key(0)
    together = mylib.filter_jit(
        step,
        in_shardings={"x": P(("data", "model"))},
        out_shardings=(rule, rule, P()),
        mesh=mesh,
        donate="all",
    )
    net, state = mylib.filter_jit(_make, out_shardings=rule, mesh=mesh)(key)
    own_net, own_state = _make(key)
    for i in range(3):
        before = net
        net, state, value = together(net, state, _batch(i))
        own_net, own_state, own_value = alone(own_net, own_state, _batch(i))
        assert before.layers[0].weight.is_deleted()
        np.testing.assert_allclose(float(value), float(own_value), rtol=1e-5)
        all_equal(float(value))
    assert_placed(net, rule, mesh=mesh)
    _assert_shards_of(net, own_net, rtol=1e-3, atol=1e-4)
    mylib.check_replicas((net, state))
    assert net.name == "net"


def test_values_of_an_argument_that_differ_are_named(mesh):
    f = mylib.filter_jit(lambda x, w: x @ w, in_shardings={"w": P()}, mesh=mesh)
    x = mylib.filter_shard(_batch(0), P("data"), mesh=mesh)
    mine = np.full((16, 2), jax.process_index(), np.float32)
    assert "differs between them: process 0: " in fails(mylib.PlacementError, f, x, mine)


@pytest.mark.everyday("2x4-Explicit", rest="thorough")
def test_shard_map(mesh):
    net, x = Net(jax.random.key(1)), _batch(3)

    mapped = mylib.filter_shard_map(
        lambda net, x: jax.lax.pmean(jnp.mean(net(x) ** 2), ("data", "model")),
        mesh=mesh,
        in_specs=(P(), P(("data", "model"))),
        out_specs=P(),
    )
    np.testing.assert_allclose(float(mapped(net, x)), float(jnp.mean(net(x) ** 2)), rtol=1e-5)
    placed = mylib.filter_shard(net, P(), mesh=mesh)
    # JAX makes the gradient's own seed on one device, where it knows no mesh.
    with jax.set_mesh(mesh):
        g = eqx.filter_grad(lambda net: mapped(net, x))(placed)
    own = eqx.filter_grad(lambda net: jnp.mean(net(x) ** 2))(net)
    _assert_shards_of(g, own, rtol=1e-4, atol=1e-6)
    mylib.check_replicas(g)


@pytest.mark.everyday("2x4-Explicit", rest="thorough")
def test_keys_of_each_device(mesh):
    keys = jax.random.split(jax.random.key(5), 8)

    def draw(key):
        return jax.random.normal(key[0], (1, 3))

    drawn = mylib.filter_shard_map(
        draw, mesh=mesh, in_specs=P(("data", "model")), out_specs=P(("data", "model"))
    )(keys)
    own = jnp.stack([jax.random.normal(key, (3,)) for key in keys])
    _assert_shards_of(drawn, own)
    split = mylib.filter_shard(keys, P("data"), mesh=mesh)
    _assert_shards_of(jax.random.key_data(split), jax.random.key_data(keys))


def test_explain_says_the_same_everywhere(mesh):
    told = mylib.explain(Net(jax.random.key(0)), fsdp("data"), mesh=mesh)
    all_equal(str(told))
