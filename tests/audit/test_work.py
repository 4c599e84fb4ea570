"""What a program computes and moves, against theory, and XLA's own count where that is right."""

import jax
import jax.numpy as jnp
import known
import pytest
from counted import PROGRAMS, Program

import mylib
from mylib._programs.audit import Work

CPU = jax.devices()[:1]
# XLA's CPU compiler multiplies each channel with each in the gradient of a depthwise convolution's
# weight, and float8 as float16 or float32. Its program does that work.
_ON_CPU = {"depthwise", "float8"}


def work(program: Program, devices=CPU, options=None):
    compiled = program.compiled(known.mesh_of(devices, (1,), ("one",)), options)
    return mylib.audit(compiled).work, compiled


def check(program: Program, found: Work, slack: float = 1.01):
    flops = sum(found.flops.values())
    assert flops == sum(one.times * n for one in found.operations for _, n in one.flops)
    assert found.traffic == sum(one.times * one.bytes for one in found.operations)
    assert found.unknown == 0
    assert program.flops / 1.01 <= flops <= program.flops * slack
    assert program.flops == 0 or program.dtype in found.flops
    assert program.bytes is None or program.bytes * 0.9 <= found.traffic <= program.bytes * 1.1


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in _ON_CPU])
def test_on_cpu(name):
    program = PROGRAMS[name].as_float32()
    found, compiled = work(program)
    check(program, found)
    # XLA counts a loop's body once, and a kernel's work not at all.
    if name in ("product", "batched", "convolution", "convolution's gradients", "strided"):
        flops = sum(found.flops.values())
        assert flops == pytest.approx(compiled.cost_analysis()["flops"], rel=0.01)


def test_a_scan_costs_what_a_list_costs():
    one = (256, 256), "float32"
    stacked, _ = work(PROGRAMS["scan"].as_float32())
    unrolled, _ = work(Program(lambda *args: _list(args[:-1], args[-1]), (one,) * 51, 0))
    assert stacked.flops == unrolled.flops
    # A turn reads its slice, and may copy it first.
    assert unrolled.traffic / 1.1 <= stacked.traffic <= 1.6 * unrolled.traffic


def _list(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def test_a_loop_of_unknown_length_is_unknown():
    def fun(x):
        return jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ x, x)

    found, _ = work(Program(fun, (((128, 128), "float32"),), 0))
    assert found.unknown == 1 and sum(found.flops.values()) == 2 * 128**3


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_unknown_in_any_branch_is_unknown(place):
    """It counts as one step, so another branch costs most."""

    def unknown(x):
        return jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: x * 0.5 - 1, x)

    branches = [lambda x: x @ x @ x @ x @ x, lambda x: x + 1]
    branches.insert(place, unknown)

    def fun(x):
        return jax.lax.switch(jnp.argmax(x[0, :3]), branches, x)

    found, _ = work(Program(fun, (((128, 128), "float32"),), 0))
    assert found.unknown == 1 and sum(found.flops.values()) == 4 * 2 * 128**3


def test_what_a_library_computes_without_saying_so_is_unknown():
    found, _ = work(Program(jnp.linalg.eigh, (((64, 64), "float32"),), 0))
    assert found.unknown >= 1


def test_attention_of_cudnn():
    """Causal, 2 sequences of 512 with 8 heads of 64: the call is there, the products aren't."""
    found = mylib.audit(known.text_of("gpu-0.12.0.1-attention")).work
    scores = 2 * 8 * 512 * 512
    # Two products forward and five backward, half of each.
    assert dict(found.flops) == {"bfloat16": 7 * 2 * scores * 64 // 2}
    assert found.unknown == 0


@pytest.mark.compilers
@pytest.mark.compiles_for("h100 x 8", "v5e 2x4")
@pytest.mark.parametrize("cublas", [False, True], ids=["", "cublas"])
def test_on_machines(machine, cublas):
    """Both with XLA's own kernels and with NVIDIA's libraries, whose calls show no products."""
    on_gpu = machine.chip.platform == "gpu"
    if cublas and not on_gpu:
        pytest.skip("TPUs have no cuBLAS")
    options = {"xla_gpu_enable_triton_gemm": False} if cublas else None
    wrong = []
    for name, program in PROGRAMS.items():
        found, _ = work(program, list(machine.devices)[:1], options)
        # A convolution of cuDNN multiplies what has been padded before; a product of few rows may
        # be cut into sums, which are written and read again.
        slack = {"strided": 1.07}.get(name, 1.01)
        moved = program.bytes if cublas or not on_gpu else None
        try:
            check(program._replace(bytes=moved), found, slack)
        except AssertionError as error:
            wrong.append((name, str(error), found))
    assert not wrong
