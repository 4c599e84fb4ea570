"""`verify` in several processes: all of them compare, and raise the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreeing import all_equal
from jax.sharding import PartitionSpec as P

import mylib
from mylib.testing import VerifyError, verify

pytestmark = pytest.mark.multihost(processes=2, devices_per_process=2)


def test_all_processes_say_the_same():
    mesh = mylib.make_mesh(data=4)
    x = mylib.filter_shard(np.arange(16, dtype=np.float32).reshape(8, 2), P("data"), mesh=mesh)

    @mylib.filter_jit(in_shardings=(P("data"),), out_shardings=P("data"), mesh=mesh)
    def double(x):
        return 2 * jnp.sin(x)

    assert not verify(double, x).differs

    @mylib.filter_shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def shifted(x):
        return jax.lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])

    with pytest.raises(VerifyError) as error:
        verify(shifted, x, reference=lambda x: x)
    all_equal(str(error.value))
