"""How long a call takes: figures that can be checked by hand. None of this needs a compiler."""

import dataclasses
import math

import jax
import known
import pytest
import steps

import mylib
from mylib import machines
from mylib._programs.audit.links import Message
from mylib._programs.audit.moments import Begin, End
from mylib._programs.audit.roofline import estimate
from mylib._programs.audit.work import Loop, Operation, Work

ONE = machines.gpu("h100", devices_per_host=1)
EIGHT = machines.gpu("h100")
FLOPS, BYTES = 989.5e12, 3352.32e9


def work(*operations, unknown=0):
    flops = {}
    for times, products, _ in operations:
        for dtype, n in products:
            flops[dtype] = flops.get(dtype, 0) + times * n
    traffic = sum(times * size for times, _, size in operations)
    return Work(flops, traffic, unknown, tuple(Operation(*one) for one in operations))


def products(count):
    return (("bfloat16", int(count)),)


def test_each_operation_waits_for_the_slower_of_both():
    """One second of products, then ten times 0.1 s of memory: together two, not one."""
    seconds_of_both = work(
        (1, products(0.55 * FLOPS), 0), (10, (), int(0.1 * 0.7 * BYTES)), (1, products(1e6), 10)
    )
    found = estimate(seconds_of_both, [], {}, ONE)
    assert found.seconds == pytest.approx(2, rel=1e-3)
    assert found.parts == pytest.approx({"compute": 1, "memory": 1}, rel=1e-3)
    low, high = found.interval
    assert low == pytest.approx(0.55 + 0.7, rel=1e-3) and high == pytest.approx(2, rel=1e-3)


def test_unknown_shares_of_a_chip():
    """At most as long as at the lowest share that is known: H100's of products, not v6e's."""
    v4 = machines.tpu("v4", (2, 2, 1))
    found = estimate(work((1, products(v4.chip.flops["bfloat16"]), 0)), [], {}, v4)
    assert found.seconds == pytest.approx(1 / 0.95, rel=1e-3)
    assert found.interval == pytest.approx((1, 1 / 0.55), rel=1e-3)


HALF = Message("all-gather", ("data",), int(0.5 * 0.77 * 450e9), 1)
PRODUCT = Operation(1, products(0.55 * FLOPS), 0)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ((Begin(0, 1.0), End(0), PRODUCT), 1.5),
        ((Begin(0, 1.0), PRODUCT, End(0)), 1.0),
        # Beside nothing, although other work is scheduled elsewhere.
        ((PRODUCT, Begin(0, 1.0), Operation(1, (), 1000), End(0), PRODUCT), 2.5),
        # Two of them wait for each other.
        ((Begin(0, 1.0), Begin(1, 1.0), PRODUCT, End(0), End(1)), 1.0),
        ((Begin(0, 1.0), Begin(1, 1.0), Begin(0, 1.0), PRODUCT, End(0), End(1)), 1.5),
        # A chain of four parts, in a loop.
        ((Loop(4, (Begin(0, 0.25), PRODUCT, End(0))),), 4.0),
        ((Loop(4, (Begin(0, 0.25), End(0))), PRODUCT), 1.5),
    ],
)
def test_the_schedule_is_played(schedule, expected):
    found = estimate(Work({"bfloat16": 1}, 0, 0, schedule), [HALF, HALF], {"data": 8}, EIGHT)
    assert found.seconds == pytest.approx(expected, rel=1e-3)
    assert found.parts["communication over data"] == pytest.approx(1.0, rel=1e-3)
    whole = Work({}, 0, 0, schedule).operations
    products_of_all = sum(one.times for one in whole if one.flops)
    assert found.exposed == pytest.approx(expected - products_of_all, abs=1e-3)
    low, high = found.interval
    assert low <= found.seconds * 1.001 and found.seconds <= high * 1.001


def test_waits_for_the_host_are_not_exposed_communication():
    """Copies of three seconds beside a second of products, and half a second of gathering."""
    chip = dataclasses.replace(EIGHT.chip, host_bandwidth=1e9)
    machine = dataclasses.replace(EIGHT, chip=chip)
    copy = Operation(1, (), 0, host=int(3e9))
    schedule = (copy, Begin(0, 1.0), End(0), PRODUCT)
    found = estimate(Work({"bfloat16": 1}, 0, 0, schedule), [HALF], {"data": 8}, machine)
    assert found.seconds == pytest.approx(3, rel=1e-3)
    assert found.exposed == pytest.approx(0.5, rel=1e-2)
    assert found.parts["host memory"] == pytest.approx(3, rel=1e-3)


def test_what_is_unknown_has_no_upper_bound():
    found = estimate(work((1, products(1e12), 0), unknown=2), [], {}, ONE)
    assert found.unknown == 2 and math.isinf(found.interval[1])
    assert "unknown: 2 kernels or loops" in repr(found) and "an unknown time" in repr(found)


@pytest.mark.parametrize(
    ("chip", "dtype", "rate", "reached"),
    [
        ("a100-80gb", "bfloat16", 312e12, 0.75),
        ("h100", "float8_e4m3fn", 1979e12, 0.55),
        ("v5e", "float8_e4m3fn", 197e12, 0.95),
        ("v5e", "int8", 393e12, 0.95),
        ("v5e", "float32", 197e12, 0.95),
        ("tpu7x", "int8", 2307e12, 0.95),  # that of v6e
    ],
)
def test_rates(chip, dtype, rate, reached):
    chip = machines.CHIPS[chip]
    shape = (1, 1) if chip.platform == "gpu" else (1,) * len(chip.largest)
    found = estimate(work((1, ((dtype, int(1e15)),), 0)), [], {}, machines.Machine(chip, 1, shape))
    assert found.parts["compute"] == pytest.approx(1e15 * chip.devices / rate / reached)
    assert ("are not known" in repr(found)) == (chip.name == "tpu7x")


@pytest.mark.parametrize("rate", [float("nan"), -1.0, float("inf")])
def test_rates_that_are_none(rate):
    machine = machines.gpu("h100")
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    report = mylib.audit(mylib.filter_jit(lambda x: x @ x), x)
    for field in {"memory_bandwidth": rate}, {"flops": {"float32": rate}}:
        wrong = dataclasses.replace(machine, chip=dataclasses.replace(machine.chip, **field))
        with pytest.raises(ValueError, match=f"data sheet is {rate}. Pass"):
            report.estimate(wrong)


def test_hosts_of_another_number_than_the_shape():
    with pytest.raises(ValueError, match="write hosts=1 for shape="):
        machines.Machine(machines.CHIPS["h100"], hosts=3, shape=(1, 8))


def test_kernels_reach_less_than_products():
    chip = machines.CHIPS["v5e"]
    machine = machines.Machine(chip, 1, (1, 1))
    half = int(0.5 * chip.flops["bfloat16"])
    steps = tuple(Operation(1, products(half), 0, is_kernel) for is_kernel in (False, True))
    one, kernel = (
        estimate(Work({"bfloat16": half}, 0, 0, (step,)), [], {}, machine) for step in steps
    )
    assert one.seconds == pytest.approx(0.5 / 0.95) and kernel.seconds == pytest.approx(0.5 / 0.4)
    assert one.interval[0] == kernel.interval[0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("chip", "like"),
    [
        (machines.CHIPS["b200"], "h100"),
        (machines.CHIPS["tpu7x"], "v6e"),
        (dataclasses.replace(ONE.chip, name="mine", reached={"products": 0.8}), "h100"),
    ],
)
def test_unknown_shares_are_those_of_another_chip(chip, like):
    found = estimate(work((1, products(1e12), 10)), [], {}, machines.Machine(chip, 1, (1, 1, 1)))
    missing = "kernels, memory" if chip.reached else "products, kernels, memory"
    assert f"shares that {missing} reach on {chip.name} are not known" in repr(found)
    assert f"are those of {like}" in repr(found)
    share = chip.reached.get("products", machines.CHIPS[like].reached["products"])
    expected = 1e12 / chip.flops["bfloat16"] * chip.devices / share
    assert found.parts["compute"] == pytest.approx(expected, rel=1e-3)


def test_products_without_a_rate():
    some = work((1, (("complex64", 10**15),), 10), (1, products(0.55 * FLOPS), 0))
    found = estimate(some, [], {}, ONE)
    assert found.seconds == pytest.approx(1, rel=1e-3)
    assert "complex64, without a rate" in repr(found)
    with pytest.raises(
        ValueError, match="h100: the rate of complex64 on its data sheet is unknown"
    ):
        estimate(work((1, (("complex64", 1),), 0)), [], {}, ONE)


def test_a_program_for_other_devices():
    with pytest.raises(ValueError, match=r"runs on 64 devices \(data=64\), and h100 x 8 has 8"):
        estimate(work(), [], {"data": 64}, EIGHT)


def test_of_a_report():
    strategy = steps.strategies(*known.meshes(jax.devices()))["data_parallel"]
    report = mylib.audit(strategy.step(True), *strategy.args(True))
    rows, pairs = strategy.rows // 8, steps.LAYERS * steps.WIDTH * steps.HIDDEN * 2
    # Forward, and twice as much backward; the first layer's input needs no gradient.
    count = sum(report.work.flops.values())
    assert 2.5 * 2 * rows * pairs < count <= 3 * 2 * rows * pairs
    found = report.estimate(EIGHT)
    assert found.parts["compute"] == pytest.approx(count / EIGHT.chip.flops["float32"] / 0.55)
    assert found.interval[0] <= found.seconds <= found.interval[1]
    text = repr(found)
    assert text.startswith("an estimate: ") and "reach 55% of the data sheet's rate" in text
    assert f"bound by {found.bound_by}" in text and "data is within a host" in text
