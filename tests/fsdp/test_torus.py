"""Where a weight is between two gathers."""

import jax
import numpy as np
from hypothesis import given, strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from mylib._training.fsdp import torus

SIZES = {(8,): ("a",), (4, 2): ("a", "b"), (2, 2, 2): ("a", "b", "c"), (2, 1, 4): ("a", "b", "c")}


@st.composite
def kept(draw):
    """All axes of a mesh, in any order, over the dimensions of an array."""
    shape = draw(st.sampled_from(list(SIZES)))
    names = draw(st.permutations(SIZES[shape]))
    ends = sorted(draw(st.lists(st.integers(0, len(names)), min_size=2, max_size=2)))
    entries = [tuple(names[i:j]) or None for i, j in zip([0, *ends], [*ends, None], strict=True)]
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(shape), SIZES[shape])
    return NamedSharding(mesh, P(*entries))


@given(kept())
def test_each_device_has_more_of_the_weight_that_lies_together(sharding):
    """Each of the two gathers is over a part of the devices."""
    between = torus._of_parts(sharding.spec, sharding.mesh)
    shape = (8, 8, 8)
    before, after = (s.devices_indices_map(shape) for s in (sharding, between))
    assert list(before) == list(after)
    for device, index in before.items():
        for mine, larger in zip(index, after[device], strict=True):
            a, b = mine.indices(8), larger.indices(8)
            assert b[0] <= a[0] <= a[1] <= b[1]
    assert between.num_devices == 8
    assert 1 < len({str(index) for index in after.values()}) < 8


def test_only_where_it_is_needed():
    """Other devices, and what is not gathered over all of them, are left alone."""
    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("a",), axis_types=(AxisType.Auto,))
    kept, used = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
    assert torus.halfway(kept, used) is None
    assert torus.halfway(None, used) is None
    assert torus.halfway(kept, None) is None
