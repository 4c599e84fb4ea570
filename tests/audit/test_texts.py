"""What the compilers for GPUs and TPUs wrote for programs of 8 and 16 devices, kept as text.

The steps train 4 pairs of weights, 512 x 2048 and 2048 x 512 float32 (4 MiB each), on a batch of
1024 rows; the large one 2048 x 8192 bfloat16 (32 MiB each). They are read here without compilers.
"""

import pytest
from jax.sharding import AbstractMesh
from known import answer_of, text_of

import mylib
from mylib import contracts
from mylib._programs.audit.hlo import HloModule
from mylib._programs.audit.peak import peak_of

MIB = 2**20
ONE = AbstractMesh((8,), ("data",))
TWO = AbstractMesh((4, 2), ("data", "model"))


def read(name: str, mesh: AbstractMesh = ONE) -> mylib.results.Report:
    return mylib.audit(text_of(name), mesh=mesh)


def test_tpu_prints_no_trip_counts():
    report = read("tpu-0.12.0.1-scan53")
    assert answer_of(report) == [("all-reduce", ("data",), 2048, 15)]
    (only,) = report.collectives
    assert (only.source, only.primitive, only.inserted) == ("steps.py:43", "psum", False)
    assert only.loops == ("steps.py:43",) * 2 and only.arrays == ()


def test_tpu_writes_a_reduce_scatter_as_two():
    mesh = AbstractMesh((2, 2, 2), ("a", "b", "c"))
    report = read("tpu-0.10.2-iota_rs_b", mesh)
    assert answer_of(report) == [("reduce-scatter", ("b",), 16384, 1)]
    (only,) = report.collectives
    assert only.spelling == "all-reduce + dynamic-slice"
    assert only.wire_bytes == 16384  # an all-reduce is what is sent; half would be enough


@pytest.mark.parametrize("compiler", ["gpu", "tpu"])
def test_ragged(compiler):
    report = read(f"{compiler}-0.12.0.1-ragged")
    assert answer_of(report) == [("ragged-all-to-all", ("data",), 16384, 1)]


def test_broadcast():
    report = read("gpu-0.10.2-pbroadcast")
    assert answer_of(report) == [("broadcast", ("data",), 2048, 1)]


def test_branches():
    report = read("gpu-0.12.0.1-cond")
    assert sorted((c.bytes, c.sometimes) for c in report.collectives) == [
        (4, False),
        (2048, True),
        (2048, True),
    ]


def test_data_parallel():
    """The gradients of all weights, and the loss."""
    report = read("tpu-0.12.0.1-mlp_dp_list")
    assert answer_of(report) == [("all-reduce", ("data",), 32 * MIB + 4, 1)]
    report = read("gpu-0.12.0.1-mlp_dp_scan")
    assert answer_of(report) == [
        ("all-reduce", ("data",), 4, 1),
        ("all-reduce", ("data",), 8 * MIB, 4),  # a pair in each turn
    ]
    report.expect(
        contracts.communicates({("all-reduce", "data"): 5}),
        contracts.at_most("33 MiB"),
        contracts.never("all-gather"),
    )
    gradient = next(c for c in report.collectives if c.bytes > 4)
    assert gradient.phase == "backward" and gradient.overlapped and gradient.inserted
    assert gradient.loops == ("steps.py:71",)


@pytest.mark.parametrize("name", ["gpu-0.12.0.1-mlp_tp_list", "tpu-0.12.0.1-mlp_tp_scan"])
def test_tensor_parallel(name):
    report = read(name, TWO)
    activations = report.among("all-reduce", "model")
    counts = {phase: 0 for phase in ("forward", "backward")}
    for c in activations:
        assert c.bytes == 256 * 512 * 4
        counts[c.phase] += c.times or 0
    assert counts["forward"] == 4 and counts["backward"] in (3, 4)
    assert report.bytes("all-reduce", "data") == 16 * MIB + 4
    assert report.count("all-gather") == 0


def test_tpu7x_gives_its_sparse_cores_their_operands_later():
    """The gradient of the sum of `(x @ w) ** 2` with respect to `w`, both split over the mesh."""
    report = read("tpu7x-0.12.0.1-product")
    assert answer_of(report) == [
        ("all-reduce", ("data",), 64 * MIB, 1),
        ("all-to-all", ("data",), MIB, 1),
        ("reduce-scatter", ("data",), 16 * MIB, 1),
    ]
    assert [(c.phase, c.overlapped) for c in report.among("all-reduce")] == [("backward", True)]


def test_tpu_repeats_a_gather_in_each_fusion():
    """Each is counted once."""
    report = read("tpu-0.10.2-mlp_fsdp_scan")
    gathers = [c for c in report.among("all-gather") if c.arrays]
    assert [(c.arrays, c.bytes, c.times, c.phase) for c in gathers] == [
        (("model['layers'][1]",), 2 * MIB, 4, "forward"),
        (("model['layers'][0]",), 2 * MIB, 4, "forward"),
        (("model['layers'][0]",), 2 * MIB, 4, "backward"),
    ]
    assert {c.dtype for c in gathers} == {"bf16"} and gathers[0].overlapped
    (gradient,) = report.among("reduce-scatter")
    assert (gradient.bytes, gradient.times) == (4 * MIB, 4)
    assert gradient.spelling == "all-reduce-scatter fusion"


def test_tpu_uses_a_channel_for_several_collectives():
    report = read("tpu-0.12.0.1-mlp_2d_list", TWO)
    assert report.count("reduce-scatter", "data") == 3
    assert report.bytes("reduce-scatter", "data") == 16 * MIB
    # 8 weights, each gathered once in bfloat16.
    gathered = [c for c in report.among("all-gather", "data") if c.arrays]
    assert sorted(c.arrays[0] for c in gathered) == sorted(
        f"model['layers'][{i}][{j}]" for i in range(4) for j in range(2)
    )


def test_gpu_joins_gathers():
    report = read("gpu-0.12.0.1-mlp_fsdp_list")
    joined = max(report.among("all-gather"), key=lambda c: len(c.arrays))
    assert len(joined.arrays) == 7 and joined.bytes == 28 * MIB
    (gradients,) = report.among("reduce-scatter")
    assert gradients.bytes == 16 * MIB and gradients.spelling == ""


def test_gpu_loops():
    report = read("gpu-0.10.2-mlp_fsdp_scan")
    (joined,) = [c for c in report.among("all-gather") if len(c.arrays) == 2]
    assert (joined.bytes, joined.times, joined.overlapped) == (8 * MIB, 4, True)


def test_windowed_einsum():
    """The TPU's compiler makes matrix products of gathers and reduce-scatters: each is told as what
    it is, and as its chain.
    """
    report = read("tpu-0.12.0.1-big_fsdp_scan", AbstractMesh((16,), ("data",)))
    assert answer_of(report) == sorted(
        [
            *[("all-gather", ("data",), 32 * MIB, 4)] * 4,
            *[("reduce-scatter", ("data",), 32 * MIB, 4)] * 2,
            ("all-reduce", ("data",), 4, 1),
        ]
    )
    chains = [c for c in report.collectives if c.spelling]
    assert {c.spelling for c in chains} == {"17 collective-permutes"} and len(chains) == 5
    # 15 would be enough; two of the parts are sent for nothing.
    assert {c.wire_bytes for c in chains} == {17 * 2 * MIB}
    assert {c.arrays for c in report.among("all-gather")} == {("params[0]",), ("params[1]",)}
    assert all(c.overlapped for c in chains)
    assert "17 collective-permutes" in str(report)


@pytest.mark.parametrize(
    ("name", "arguments", "peak"),
    # Donated state on a v5e, 16 devices; kept state on H100s, 8 devices.
    [("tpu-0.12.0.1-adam_scan", 2312.2, 3831.8), ("gpu-0.12.0.1-adam_list", 73, 245)],
)
def test_what_is_alive_accounts_for_the_peak(name, arguments, peak):
    """The compilers' own counts of the arguments and of the peak, in MiB."""
    found = arguments + peak_of(HloModule(text_of(name))).bytes / MIB
    assert abs(found / peak - 1) < 0.05


def test_windows_that_sum_over_another_axis():
    """A step of 64 layers with FSDP 16 x TP 4 on 64 v5p. The loops that multiply and sum the
    gradients of weights around the ring of 16 sum over the four, too.
    """
    mesh = AbstractMesh((16, 4), ("fsdp", "tensor"))
    text, local = text_of("tpu-0.12.0.1-llama_fsdp_tensor_scan"), "GatherScatterIndicesBitpacked"
    report = mylib.audit(text, mesh=mesh, local=(local,))
    chains = [c for c in report.among("reduce-scatter", "fsdp") if c.spelling.startswith("17 ")]
    assert len(chains) >= 3 and {c.times for c in chains} == {64}
    # Of the MLP's weights: 8192 x 28672 in bfloat16, a quarter on each of the four.
    assert max(c.bytes for c in chains) == 2 * 8192 * 28672 // 4
