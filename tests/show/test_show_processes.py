"""`show` of arrays whose devices belong to several processes."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import mylib

pytestmark = [pytest.mark.multihost(processes=2, devices_per_process=4), pytest.mark.thorough]


def test_one_process_alone_sees_the_devices_of_all():
    if jax.process_index() == 0:
        return
    mesh = jax.make_mesh((2, 4), ("host", "data"), axis_types=(AxisType.Auto,) * 2)
    place = NamedSharding(mesh, P(("host", "data")))
    x = jax.make_array_from_callback((16,), place, lambda index: np.ones(16, np.float32)[index])
    assert not x.is_fully_addressable
    shown = mylib.show(x)
    (row,) = shown.rows
    assert (row.state, row.nbytes, row.devices) == ("committed", 64, 8)
    assert shown.bytes_by_device == dict.fromkeys(jax.devices(), 8)
    text, page = str(shown), shown._repr_html_()
    of_process = [[d.id for d in jax.devices() if d.process_index == i] for i in range(2)]
    numbers = [f"{ids[0]}-{ids[-1]}" for ids in of_process]
    assert text.endswith(f"process 0 has {numbers[0]}, process 1 has {numbers[1]}")
    assert f"cpu {of_process[0][0]}, process 0" in page
    assert f"cpu {of_process[1][0]}, process 1" in page
    # What moves from one process to the other is counted for all devices.
    turned = NamedSharding(mesh, P(("data", "host")))
    (move,) = mylib.show(x, jax.ShapeDtypeStruct((16,), np.float32, sharding=turned)).moves
    assert move.nbytes == 6 * 8
