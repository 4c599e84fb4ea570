"""How long collectives take, against published measurements of them. None of this compiles."""

import math

import numpy as np
import pytest

from mylib import machines
from mylib._programs.audit.links import Message, seconds
from mylib._programs.machines import coordinates

GB = 1e9


def whole(kind, size, axes, names, machine):
    """Bytes of the whole array over the time, as nccl-tests prints it ("algbw"), in GB/s."""
    count = math.prod(axes[name] for name in names)
    sent = size * (count - 1) // count * (2 if kind == "all-reduce" else 1)
    time, _ = seconds(Message(kind, names, int(sent), 1), axes, machine)
    return size / time / GB


def gpus(hosts, per_host=8):
    return machines.gpu("h100", hosts=hosts, devices_per_host=per_host)


@pytest.mark.parametrize(
    ("kind", "count", "published"),
    [
        ("all-gather", 2, 537), ("reduce-scatter", 4, 434), ("all-gather", 8, 394),
        ("all-reduce", 2, 324), ("all-reduce", 4, 236), ("all-reduce", 8, 267),
    ],
)  # fmt: skip
def test_in_a_host(kind, count, published):
    found = whole(kind, 1e9, {"data": count}, ("data",), gpus(1, count))
    assert found == pytest.approx(published, rel=0.05)


def test_the_switch_between_a100s_does_not_add_up():
    """230 GB/s of bus bandwidth, as for other collectives, where H100s have 470."""
    a100 = machines.gpu("a100-80gb")
    found = whole("all-reduce", 1e9, {"data": 8}, ("data",), a100) * 2 * 7 / 8
    gathered = whole("all-gather", 1e9, {"data": 8}, ("data",), a100) * 7 / 8
    assert found == pytest.approx(230, rel=0.05) == gathered


@pytest.mark.parametrize(
    ("ranks", "hosts", "published"),
    [
        (8, 2, 410), (8, 4, 396), (8, 8, 390), (8, 16, 387), (8, 32, 386),
        (1, 2, 96), (1, 4, 64), (1, 8, 55), (1, 16, 51), (1, 32, 50), (2, 8, 102), (4, 8, 198),
    ],
)  # fmt: skip
def test_over_hosts(ranks, hosts, published):
    """The others of a host's 8 GPUs are in other groups, which use their own network cards."""
    axes = {"data": hosts, "other": 8 // ranks, "here": ranks}
    size = 64e9
    found = whole("all-gather", size, axes, ("data", "here"), gpus(hosts))
    # From 32 MB a GPU on, all but nccl-tests' largest arrays reach 0.87 of these.
    assert found == pytest.approx(0.87 * published, rel=0.06)


@pytest.mark.parametrize(("size", "share"), [(8e3, 0.36), (1e6, 0.68), (64e6, 0.87)])
def test_small_arrays(size, share):
    axes, hosts = {"data": 64}, gpus(8)
    message = Message("all-gather", ("data",), int(size * 63), 1)
    time = seconds(message, axes, hosts)[0] - 8 * 36e-6
    assert 64 * size / time / GB == pytest.approx(390 * share, rel=0.1)


def test_hosts_of_four():
    axes, two = {"data": 8}, gpus(2, 4)
    in_one = whole("all-gather", 1e9, axes, ("data",), gpus(1))
    assert whole("all-gather", 1e9, axes, ("data",), two) < 4 * 50 < in_one
    message = Message("all-gather", ("data",), 1, 1)
    assert "4 of each host's" in seconds(message, axes, two)[1]


@pytest.mark.parametrize(
    ("axes", "names", "text"),
    [
        ({"data": 4, "model": 4}, ("model",), "within a host"),
        ({"data": 4, "model": 4}, ("data",), "crosses 2 hosts, over the network of 2 of"),
        ({"data": 16}, ("data:(2)8",), "within a host"),
        ({"data": 16}, ("data:(1)8",), "crosses 2 hosts, over the network of 4 of"),
        ({"data": 16}, ("data:(8)2",), "within a host"),
        ({"data": 16}, ("data",), "crosses 2 hosts, over the network of 8 of"),
    ],
)
def test_which_hosts(axes, names, text):
    message = Message("all-gather", names, 10**9, 1)
    assert text in seconds(message, axes, gpus(2))[1]


def test_an_axis_that_straddles_hosts_is_as_slow_as_its_slowest_group():
    axes = {"data": 4, "model": 6}  # the second group has 2 GPUs on the first host, 4 on the next
    assert "2 of each" in seconds(Message("all-gather", ("model",), 1, 1), axes, gpus(3))[1]


def rate(name, shape, axes, names, kind="all-gather", size=10**10):
    """GB/s that a device sends, without the time of the hops."""
    message = Message(kind, names, size, 1)
    return size / seconds(message, axes, machines.tpu(name, shape))[0] / GB


@pytest.mark.parametrize(
    ("name", "shape", "axes", "names", "expected"),
    [
        # Both ways around a ring.
        ("v5e", (16, 16), {"data": 16, "model": 16}, ("model",), 90),
        ("v6e", (16, 16), {"data": 16, "model": 16}, ("data",), 180),
        ("v5p", (4, 4, 8), {"data": 8, "rest": 16}, ("data",), 180),
        ("v4", (4, 4, 4), {"data": 4, "rest": 16}, ("data",), 81),
        # No ring: v5e below 16, a slice of v5p that is no cube, half of a ring.
        ("v5e", (8, 8), {"data": 8, "model": 8}, ("model",), 45),
        ("v5p", (2, 2, 4), {"data": 4, "rest": 4}, ("data",), 90),
        # Two and three directions of the slice.
        ("v5e", (16, 16), {"data": 256}, ("data",), 180),
        ("v5e", (8, 8), {"data": 64}, ("data",), 90),
        ("v5p", (4, 4, 4), {"data": 64}, ("data",), 540),
        ("v5p", (4, 4, 4), {"data": 4, "model": 16}, ("data", "model"), 540),
        ("v5p", (4, 4, 8), {"data": 8, "rest": 16}, ("rest",), 360),
    ],
)
def test_on_a_torus(name, shape, axes, names, expected):
    assert rate(name, shape, axes, names) == pytest.approx(expected, rel=0.01)


def test_a_permutation_goes_one_way():
    axes = {"data": 16, "model": 16}
    found = rate("v5e", (16, 16), axes, ("data",), "collective-permute")
    assert found == pytest.approx(45, rel=0.01)


def test_an_all_to_all_takes_a_quarter():
    """Of an all-gather of as much as all devices have together."""
    axes, count = {"data": 16, "model": 16}, 16
    gather = 1 / rate("v5e", (16, 16), axes, ("data",), size=10**10)
    exchange = 1 / rate("v5e", (16, 16), axes, ("data",), "all-to-all", size=10**10 // count)
    assert exchange / count == pytest.approx(gather / 4, rel=0.01)


def test_two_devices_a_chip_share_its_links():
    axes = {"data": 64, "core": 2}
    assert rate("tpu7x", (4, 4, 4), axes, ("core",)) > 1000
    alone = rate("tpu7x", (4, 4, 4), axes, ("data",))
    assert alone == pytest.approx(3 * 2 * 90 / 2, rel=0.01)
    assert rate("tpu7x", (4, 4, 4), axes, ("data", "core")) == pytest.approx(2 * alone, rel=0.01)


def test_v4_has_a_device_a_chip():
    assert machines.tpu("v4", (2, 2, 1)).count == 4


@pytest.mark.compilers
@pytest.mark.compiles_for("v5e 4x4", "v5p 4x4x4", "v5p 2x2x4", "tpu7x 2x2x2", "v6e 4x8", "v4 2x2x2")
def test_the_mesh_is_where_it_is_assumed_to_be(machine):
    for sizes in ((machine.count,), (2, machine.count // 2), (machine.count // 4, 4), (4, 2, -1)):
        names = "abc"[: len(sizes)]
        mesh = machine.mesh(**dict(zip(names, sizes, strict=True)))
        real = [(*d.coords, d.core_on_chip) for d in mesh.devices.flat]
        assert np.array_equal(real, coordinates(machine, mesh.devices.shape))
