"""Compiled programs in files, of several processes."""

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P

import mylib


def _of_several(folder):
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    mesh = mylib.make_mesh(data=jax.device_count())
    step = mylib.filter_jit(lambda x: (x * 2, x.sum()), in_shardings=P("data"), mesh=mesh)
    x = np.arange(16.0, dtype=np.float32)
    path = folder / "step.mylib"
    step.lower(x).compile().save(path)
    mylib.testing.barrier()
    many, one = mylib.load_compiled(path, step, x)(x)
    assert one == 120 and many.addressable_shards[0].data.sum() >= 0
    assert sorted(file.name for file in folder.iterdir()) == ["step.mylib"]


@pytest.mark.multihost(processes=2, devices_per_process=2)
def test_two_processes(multihost_tmp_path):
    _of_several(multihost_tmp_path)


@pytest.mark.slow
@pytest.mark.multihost(processes=4, devices_per_process=1)
def test_four_processes(multihost_tmp_path):
    _of_several(multihost_tmp_path)
