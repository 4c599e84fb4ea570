"""Grain: its loaders' batches on the mesh, ahead of the step."""

import equinox as eqx
import grain
import jax.numpy as jnp
import numpy as np
from common import check, mesh, placed

OWN = None


def examples():
    pairs = [{"x": np.full((4,), i, np.float32), "label": np.int32(i)} for i in range(96)]
    return grain.MapDataset.source(pairs)


@eqx.filter_jit
def step(batch):
    return jnp.mean(batch["x"], axis=1) * 2 + batch["label"]


def results(batches):
    over = mesh()
    found = []
    for batch in placed(batches, over):
        assert batch["x"].sharding.spec[0] == "data"
        found.append(step(batch))
    return found


@check
def map_dataset():
    """a MapDataset that is shuffled, mapped and batched"""

    def double(x):
        return {**x, "x": x["x"] * 2}

    found = results(examples().shuffle(seed=1).map(double).batch(16))
    assert len(found) == 6
    return found


@check
def iter_dataset():
    """an IterDataset with its own threads, over two epochs"""
    options = grain.ReadOptions(num_threads=2)
    found = results(examples().shuffle(seed=1).repeat(2).to_iter_dataset(options).batch(32))
    assert len(found) == 6
    return found


@check
def data_loader():
    """a DataLoader with a sampler and operations"""
    sampler = grain.samplers.IndexSampler(
        96, grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=2
    )
    source = [examples()[i] for i in range(96)]
    loader = grain.DataLoader(
        data_source=source, sampler=sampler, operations=[grain.transforms.Batch(16)]
    )
    found = results(loader)
    assert len(found) == 6
    return found


@check
def resumed():
    """an iterator's state, saved after two batches and set in a new one"""
    dataset = examples().shuffle(seed=1).batch(16).to_iter_dataset()
    iterator = iter(dataset)
    first = [next(iterator), next(iterator)]
    state = iterator.get_state()
    again = iter(dataset)
    again.set_state(state)
    found = results(first) + results(again)
    assert len(found) == 6
    return found
