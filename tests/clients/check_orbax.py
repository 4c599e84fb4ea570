"""Orbax: models and training states that are saved and come back where they are asked to be."""

import tempfile
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from common import abstract, assert_close, check, mesh, normal, shard, where
from jax.sharding import PartitionSpec as P

OWN = None


def arrays():
    return eqx.filter(eqx.nn.MLP(16, 8, 32, 1, key=jax.random.key(0)), eqx.is_array)


SPECS = {"layers.0.weight": P("model")}


def sharded(over):
    return eqx.filter_shard(arrays(), where(arrays(), SPECS, over))


@check
def there_and_back():
    """a sharded model, restored with the same shardings"""
    over = mesh(data=4, model=2)
    model = sharded(over)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "model", model)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(Path(folder) / "model", abstract(model, SPECS, over))
    assert eqx.tree_equal(restored, model)
    return eqx.filter_jit(lambda m: jax.tree.map(lambda x: x * 2, m))(restored)


@check
def onto_another_mesh():
    """saved from 4x2, restored on 8x1 and from there placed on 2x4"""
    model = sharded(mesh(data=4, model=2))
    other = mesh(data=8, model=1)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "model", model)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(Path(folder) / "model", abstract(model, SPECS, other))
    last = mesh(data=2, model=4)
    moved = eqx.filter_shard(restored, where(restored, SPECS, last))
    assert_close(moved, arrays(), 0)
    return moved


@check
def resumed_training():
    """a CheckpointManager: three steps, a stop, two more, as five in one run"""
    over, optimiser = mesh(data=4, model=2), optax.adam(0.01)
    batch = shard(normal(1, 32, 16), "data", over=over)

    def loss(model, x):
        y = jnp.tanh(x @ model.layers[0].weight.T + model.layers[0].bias)
        return jnp.mean((y @ model.layers[1].weight.T - 1) ** 2)

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, state):
        gradient = jax.grad(loss)(model, batch)
        updates, state = optimiser.update(gradient, state)
        return optax.apply_updates(model, updates), state

    def start():
        model = sharded(over)
        state = optimiser.init(model)
        return model, eqx.filter_shard(state, where(state, SPECS, over))

    whole = start()
    for _ in range(5):
        whole = step(batch, *whole)
    with tempfile.TemporaryDirectory() as folder:
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        with ocp.CheckpointManager(folder, options=options) as manager:
            training = start()
            for i in range(3):
                training = step(batch, *training)
                manager.save(i, args=ocp.args.StandardSave(training))
            manager.wait_until_finished()
            assert manager.all_steps() == [2]
            target = abstract(jax.eval_shape(start), SPECS, over)
            training = manager.restore(2, args=ocp.args.StandardRestore(target))
    training = tuple(training)
    for _ in range(2):
        training = step(batch, *training)
    assert_close(training, whole, 1e-6)
    return training


@check
def kinds_of_leaves():
    """bfloat16, integers, scalars and NumPy arrays beside sharded ones"""
    tree = {
        "half": shard(jnp.arange(16, dtype=jnp.bfloat16), "data"),
        "count": shard(jnp.int32(3)),
        "host": np.arange(4),
        "step": 7,
    }
    with tempfile.TemporaryDirectory() as folder, ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "tree", tree)
        restored = checkpointer.restore(Path(folder) / "tree")
    restored = shard(restored)
    assert restored["step"] == 7
    return restored
