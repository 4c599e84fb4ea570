"""PyTorch: batches of its DataLoader, tensors as they are, on the mesh."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import torch
from common import check, mesh, placed
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

OWN = None


def tensors():
    return TensorDataset(torch.arange(384.0).reshape(96, 4), torch.arange(96))


@eqx.filter_jit
def step(batch):
    x, label = batch
    return jnp.mean(x, axis=1) * 2 + label


def results(loader):
    found = []
    for batch in placed(loader, mesh()):
        assert batch[0].sharding.spec[0] == "data"
        found.append(step(batch))
    assert len(found) == 6
    return found


@check
def tensors_in_order():
    """a TensorDataset, in batches of tensors"""
    return results(DataLoader(tensors(), batch_size=16))


@check
def shuffled():
    """shuffled by a seeded generator, the incomplete batch left off"""
    generator = torch.Generator().manual_seed(3)
    return results(DataLoader(tensors(), 15 + 1, shuffle=True, generator=generator, drop_last=True))


@check
def worker_processes():
    """two worker processes of the loader"""
    return results(DataLoader(tensors(), 16, num_workers=2, multiprocessing_context="spawn"))


@check
def sampler_that_distributes():
    """a DistributedSampler for one reader of one"""
    sampler = DistributedSampler(tensors(), num_replicas=1, rank=0, seed=4)
    return results(DataLoader(tensors(), 16, sampler=sampler))


class Arrays(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, i):
        return np.full(4, i, np.float32), i


@check
def arrays_of_numpy():
    """a Dataset of NumPy arrays and Python numbers, by the loader's own collation"""
    return results(DataLoader(Arrays(), 16))
