"""The compilers for GPUs and TPUs themselves, where they are installed."""

import re

import jax
import jax.numpy as jnp
import known
import numpy as np
import pytest
import steps
from jax.sharding import PartitionSpec as P

import mylib
from mylib import contracts

pytestmark = pytest.mark.compilers
KEY = jax.random.key(0)
MACHINES = pytest.mark.compiles_for("h100 x 8", "v5e 2x4")


@MACHINES
def test_known_answers(machine):
    devices = list(machine.devices)
    wrong = []
    count = 0
    for case in known.cases(devices):
        # The TPU's compiler joins or splits some of these; its texts are read in test_texts.py.
        if machine.chip.platform in case.without:
            continue
        count += 1
        found = known.answer_of(mylib.audit(jax.jit(case.fun), *case.args))
        if found != sorted(case.answer):
            wrong.append((case.name, found, case.answer))
    assert count >= 60 and not wrong


# Weekly in the other form, too, and for a machine of the other kind.
CONTRACTS = [
    "h100 x 8-data_parallel-scan",
    "h100 x 8-fsdp-list",
    "h100 x 8-two_d-scan",
    "v5e 2x4-fsdp-scan",
    "v5e 2x4-tensor_parallel-scan",
    "v5e 2x4-two_d-list",
]


@MACHINES
@pytest.mark.parametrize("stacked", [False, True], ids=["list", "scan"])
@pytest.mark.parametrize("name", ["data_parallel", "fsdp", "tensor_parallel", "two_d"])
@pytest.mark.everyday(*CONTRACTS, rest="thorough")
def test_contracts(machine, name, stacked):
    strategy = steps.strategies(*known.meshes(list(machine.devices)))[name]
    report = mylib.audit(strategy.step(stacked), *strategy.args(stacked))
    report.expect(
        {
            "data_parallel": contracts.data_parallel("data"),
            "fsdp": contracts.fsdp("data"),
            "tensor_parallel": contracts.tensor_parallel("model", forward=steps.LAYERS),
            "two_d": contracts.two_d("data", "model"),
        }[name]
    )
    estimate = report.estimate(machine)
    assert estimate.seconds > 0 and np.isfinite(estimate.seconds)


@MACHINES
def test_what_programs_of_one_device_call_is_known(machine):
    """The compilers' own calls, for gathers and linear algebra: they move nothing."""
    whole = jax.NamedSharding(known.mesh_of(list(machine.devices), (1,), ("one",)), P())

    def abstract(*shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    def fun(a, table, i, j):
        cut = jnp.take_along_axis(table, j, -1), table[i, i], table.at[i, i].add(1.0)
        solved = jnp.linalg.solve(a, table), jnp.linalg.svd(a), jnp.linalg.qr(a), jnp.linalg.eigh(a)
        random = jax.random.normal(jax.random.key(i[0]), (64,)), jax.random.permutation(KEY, i)
        chosen = jax.lax.top_k(table, 4), jax.lax.approx_max_k(table, 4), jnp.sort(table)
        resized = jax.image.resize(table, (32, 32), "linear"), jnp.fft.fft(table)
        kernel = a[:3, :3].reshape(1, 1, 3, 3)
        image = jax.lax.conv(table.reshape(1, 1, 64, 64), kernel, (1, 1), "SAME")
        return cut, jnp.linalg.cholesky(a), solved, random, chosen, resized, image

    args = abstract(64, 64), abstract(64, 64), abstract(16, dtype="int32")
    compiled = jax.jit(fun).lower(*args, abstract(64, 1, dtype="int32")).compile()
    assert mylib.audit(compiled).collectives == ()
    targets = set(re.findall(r'custom_call_target="([^"]*)"', compiled.as_text()))
    ours = {
        "gpu": {"cusolver_potrf_ffi", "cusolver_geqrf_ffi", "cusolver_syevd_ffi"},
        "tpu": {"GatherScatterIndicesBitpacked", "Cholesky", "QrDecompositionBlock", "EighTpu"},
    }
    assert targets >= ours[machine.chip.platform]
