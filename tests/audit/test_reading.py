"""Reading the text of programs: groups in every spelling, and what is not understood."""

import re

import jax
import known
import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxlib import lapack

import mylib
from mylib._programs.audit.dataflow import Source
from mylib._programs.audit.groups import MeshAxes, groups_of, pairs_of
from mylib._programs.audit.hlo import HloModule, arrays_of
from mylib._programs.audit.positions import positions
from mylib._programs.audit.targets import TARGETS
from mylib._programs.audit.values import Value, before
from mylib._programs.audit.walk import graph_of


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{{0,2}, {1,3}}", [[0, 2], [1, 3]]),
        ("{}", [[0, 1, 2, 3]]),
        ("[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("mesh['x'=2,'y'=2] {'x'}", [[0, 2], [1, 3]]),
        ("mesh['x'=2,'y'=2] {'x','y'}", [[0, 1, 2, 3]]),
        ("mesh['x'=2,'y'=2] {'y','x'}", [[0, 2, 1, 3]]),
        ("mesh[x=4] {x:(1)2}", [[0, 2], [1, 3]]),
        ("mesh['x'=4] {'x':(2)2}", [[0, 1], [2, 3]]),
        ("mesh['x'=2,'y'=2], device_ids=(3,1,0,2) {'y'}", [[3, 1], [0, 2]]),
        ("mesh['x'=2,'y'=2], device_ids=([2,2]T(1,0)) {'y'}", [[0, 2], [1, 3]]),
    ],
)
def test_spellings_of_groups(text, groups):
    assert groups_of(text, 4).tolist() == groups


@pytest.mark.parametrize(
    "text",
    [
        "{{0,1},{2}}",
        "{{0,1},{1,2}}",
        "{{0,1}}",
        "[2,2]<=[8]",
        "[2,2]<=4",
        "mesh['x'=2] {'y'}",
        "mesh['x'=2,'y'=2] {}",
        "devices of a friend",
    ],
)
def test_groups_that_are_not_understood(text):
    with pytest.raises(mylib.errors.AuditError, match="replica_groups"):
        groups_of(text, 4)


def test_pairs():
    assert pairs_of("{{0,1},{1,0},{2,2}}", 4).tolist() == [[0, 1], [1, 0], [2, 2]]
    with pytest.raises(mylib.errors.AuditError, match="source_target_pairs"):
        pairs_of("{{0,1},{1,9}}", 4)


@given(
    st.permutations(["a", "b", "c"]).flatmap(
        lambda names: st.tuples(st.just(names), st.lists(st.integers(2, 4), min_size=3, max_size=3))
    ),
    st.sets(st.integers(0, 2), min_size=1),
)
def test_axes_of_any_subset(mesh, chosen):
    names, sizes = mesh
    axes = MeshAxes(tuple(names), tuple(sizes))
    others = [i for i in range(3) if i not in chosen]
    each = int(np.prod([sizes[i] for i in chosen]))
    devices = np.arange(axes.size).reshape(sizes)
    groups = devices.transpose(others + sorted(chosen)).reshape(-1, each)
    assert axes.named(groups) == tuple(names[i] for i in sorted(chosen))


def test_types():
    (a,) = arrays_of("bf16[4,256]{1,0:T(8,128)(2,1)S(1)}")
    assert (a.dtype, a.shape, a.bytes) == ("bf16", (4, 256), 2048)
    assert [x.bytes for x in arrays_of("(f32[2]{0}, /*index=1*/pred[], s4[3])")] == [8, 1, 2]
    assert arrays_of("f8e4m3fn[16]")[0].bytes == 16
    with pytest.raises(mylib.errors.AuditError, match="'x7'"):
        _ = arrays_of("x7[2]")[0].bytes


MESH = known.mesh_of(jax.devices(), (8,), ("d",))
TEXT = (
    jax.jit(
        known.mapped(
            MESH,
            P("d"),
            lambda x: lax.scan(lambda x, _: (lax.psum(x, "d") * 0.1, None), x, None, length=3)[0],
        )
    )
    .lower(known.abstract(MESH, P("d"), (8, 512)))
    .compile()
    .as_text()
)


def test_text_alone():
    report = mylib.audit(TEXT, mesh=MESH)
    assert report.count("all-reduce", "d") == 3 and report.memory is None
    with pytest.raises(TypeError, match="takes no arguments"):
        mylib.audit(TEXT, 1)
    with pytest.raises(ValueError, match="no collective 'allreduce'"):
        report.count("allreduce")
    with pytest.raises(ValueError, match="no axis 'data': it has d"):
        report.count("all-reduce", "data")


def test_text_without_a_mesh():
    unnamed = re.sub(
        r"replica_groups=[^ ]*( \{.*?\})?,", "replica_groups={{0,1,2,3,4,5,6,7}},", TEXT
    )
    report = mylib.audit(unnamed)
    assert report.collectives[0].axes is None and report.count("all-reduce") == 3
    with pytest.raises(mylib.errors.AuditError, match="Pass mesh="):
        report.count("all-reduce", "d")
    with pytest.raises(mylib.errors.AuditError, match="runs on 8 devices, and the mesh"):
        mylib.audit(TEXT, mesh=known.mesh_of(jax.devices(), (4,), ("d",)))


_DAMAGES = {
    "cut in the middle": lambda text: text[: len(text) // 2],
    "cut before its entry": lambda text: text[: text.index("ENTRY")],
    "empty": lambda text: "",
    "two programs": lambda text: text + text,
    "not HLO": lambda text: "module @jit_f {}",
    "an unknown opcode": lambda text: text.replace(" all-reduce(", " all-reduce-and-pray("),
    "no groups": lambda text: re.sub(r"replica_groups=[^ ]*( \{.*?\})?, ", "", text),
    "groups of strangers": lambda text: re.sub(
        r"replica_groups=[^ ]*( \{.*?\})?, ", "replica_groups={{0,99}}, ", text
    ),
    "a lost instruction": lambda text: re.sub(r"\n.* all-reduce\(.*", "", text),
    "a lost body": lambda text: text.replace("body=%", "body=%x"),
    "an operand from nowhere": lambda text: re.sub(r"all-reduce\(%", "all-reduce(%x", text),
    "a start without its end": lambda text: text.replace(" all-reduce(", " all-reduce-start("),
    "an unknown type": lambda text: re.sub(r"f32(\S* all-reduce\()", r"q32\1", text),
    "an unknown call": lambda text: re.sub(
        r"all-reduce\((.*?)\), .*", r'custom-call(\1), custom_call_target="my_kernel"', text
    ),
    "another unknown call": lambda text: re.sub(
        r"all-reduce\((.*?)\), .*", r'custom-call(\1), custom_call_target="custom_sum"', text
    ),
    "a kernel that communicates": lambda text: re.sub(
        r"all-reduce\((.*?)\), .*",
        r'custom-call(\1), custom_call_target="tpu_custom_call", '
        r'backend_config={"custom_call_config":{"has_communication":true}}',
        text,
    ),
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_damaged_text_is_an_error(damage):
    damaged = _DAMAGES[damage](TEXT)
    assert damaged != TEXT
    with pytest.raises(mylib.errors.AuditError):
        mylib.audit(damaged, mesh=MESH)


def test_calls_that_are_said_to_stay_local():
    called = _DAMAGES["an unknown call"](TEXT)
    with pytest.raises(mylib.errors.AuditError, match="is called by nothing that is understood"):
        mylib.audit(called, mesh=MESH, local=("my_kernel",))  # the sum of the all-reduce is left
    (sum_,) = re.findall(r"to_apply=(%[\w.]+)", TEXT)
    name = 'custom_call_target="my_kernel"'
    called = called.replace(name, f"{name}, called_computations={{{sum_}}}")
    report = mylib.audit(called, mesh=MESH, local=("my_kernel",))
    assert report.collectives == ()


@given(st.integers(0, TEXT.count("\n") - 1), st.booleans())
def test_a_lost_line_is_never_a_smaller_number(number, cut):
    """Each line that is lost is an error, or doesn't matter."""
    lines = TEXT.split("\n")
    left = lines[:number] if cut else lines[:number] + lines[number + 1 :]
    try:
        report = mylib.audit("\n".join(left), mesh=MESH)
    except mylib.errors.AuditError:
        return
    assert [c.times for c in report.collectives] in ([3], [None])


def test_elements_of_tuples_in_the_short_form_of_dumps():
    """`%while.1#0` in place of a get-tuple-element: it isn't the whole tuple."""
    short = re.sub(r"%[\w.\-]*get-tuple-element[\w.\-]*(?=[,)])", "%while.1#0", TEXT)
    assert short != TEXT
    with pytest.raises(mylib.errors.AuditError, match=r"uses %while.1#0, which is not in the text"):
        mylib.audit(short, mesh=MESH)


def program(*body: str, computations: str = "") -> str:
    lines = "\n".join(f"  {line}" for line in body)
    header = "HloModule jit_f, is_scheduled=true, num_partitions=8"
    return f"{header}\n\n{computations}\nENTRY %main (x: f32[8]) -> f32[64] {{\n{lines}\n}}\n"


PARAMETER = '%x = f32[8]{0} parameter(0), metadata={op_name="x"}'


SUM = """%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}
"""
GATHER = """%async (p: f32[8]) -> f32[64] {
  %p = f32[8]{0} parameter(0)
  ROOT %g = f32[64]{0} all-gather(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
}
"""


@pytest.mark.parametrize(("opcode", "role"), [("async", "calls"), ("call", "to_apply")])
def test_a_computation_that_is_started(opcode, role):
    text = program(
        PARAMETER,
        f"%s = ((f32[8]{{0}}), f32[64]{{0}}, u32[]) {opcode}-start(%x), {role}=%async",
        f"%u = ((f32[8]{{0}}), f32[64]{{0}}, u32[]) {opcode}-update(%s)",
        f"ROOT %d = f32[64]{{0}} {opcode}-done(%u)",
        computations=GATHER,
    )
    (only,) = mylib.audit(text, mesh=MESH).collectives
    assert (only.kind, only.bytes, only.times, only.arrays) == ("all-gather", 256, 1, ("x",))
    assert only.overlapped


def test_slices_of_host_memory_are_fetched_beside_other_work():
    """What a TPU offloads. The device writes what it fetches, and reads nothing of its own."""
    host, device = "f32[4,8]{1,0:T(8,128)S(5)}", "f32[1,8]{1,0:T(8,128)}"
    text = program(
        PARAMETER,
        f"%h = {host} parameter(1)",
        "%i = s32[] constant(0)",
        f"%s = (({host}, s32[], s32[]), {device}, u32[]) dynamic-slice-start(%h, %i, %i), "
        "dynamic_slice_sizes={1,8}",
        f"%d = {device} dynamic-slice-done(%s)",
        f"%u = (({host}, {device}, s32[], s32[]), {host}, u32[]) "
        "dynamic-update-slice-start(%h, %d, %i, %i)",
        f"ROOT %e = {host} dynamic-update-slice-done(%u)",
    )
    report = mylib.audit(text, mesh=MESH)
    # A tile of 8 x 128 numbers, written and then read; and four indices.
    assert not report.collectives and report.work.traffic == 2 * 8 * 128 * 4 + 4 * 4


FUSED = """%part (p: f32[4096], i: s32[], q: f32[8]) -> (f32[8], f32[4096], f32[64]) {
  %p = f32[4096]{0} parameter(0)
  %i = s32[] parameter(1)
  %q = f32[8]{0} parameter(2)
  %zero = f32[] constant(0)
  %more = f32[4104]{0} pad(%p, %zero), padding=0_8
  %some = f32[8]{0} dynamic-slice(%more, %i), dynamic_slice_sizes={8}
  %g = f32[64]{0} all-gather(%q), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %t = (f32[8]{0}, f32[4096]{0}, f32[64]{0}) tuple(%some, %p, %g)
}
"""


def test_a_fusion_that_goes_on_with_a_collective():
    """As on TPUs: it passes the collective's buffers on, and reads a slice of a padded array."""
    text = program(
        PARAMETER,
        "%y = f32[4096]{0} parameter(1)",
        "%i = s32[] constant(3)",
        "%f = (f32[8]{0}, f32[4096]{0}, f32[64]{0}) fusion(%y, %i, %x), kind=kLoop, calls=%part",
        "ROOT %e = f32[64]{0} get-tuple-element(%f), index=2",
        computations=FUSED,
    )
    report = mylib.audit(text, mesh=MESH)
    assert report.count("all-gather") == 1
    # The slice is read and written; the index is read.
    assert report.work.traffic == 2 * 8 * 4 + 4


def test_a_sparse_core_is_started_before_it_has_operands():
    text = program(
        PARAMETER,
        "%s = ((), (), (s32[1]{0:T(128)S(2)})) call-start(), to_apply=%async",
        "%u = ((f32[8]{0}), f32[64]{0}) call-update(%s, %x)",
        'ROOT %d = f32[64]{0} call-done(%u), metadata={op_name="jit(f)/transpose(jvp())/mul"}',
        computations=GATHER,
    )
    (only,) = mylib.audit(text, mesh=MESH).collectives
    assert (only.kind, only.bytes, only.arrays) == ("all-gather", 256, ("x",))
    assert only.overlapped and only.primitive == "mul"


KERNEL = """%k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128, \\"open\\": \\"{\\"}"
}}, metadata={op_name="jit(f)/pallas_call"}, backend_config={}"""


def test_metadata_of_a_kernel_spans_lines():
    """JAX's splash attention has such."""
    text = program(
        PARAMETER,
        KERNEL,
        "ROOT %g = f32[64]{0} all-gather(%k), channel_id=1, replica_groups=[1,8]<=[8], "
        "dimensions={0}",
    )
    (only,) = mylib.audit(text, mesh=MESH).collectives
    assert (only.kind, only.bytes) == ("all-gather", 256)
    (kernel,) = [x for x in HloModule(text).entry.instructions if x.opcode == "custom-call"]
    assert kernel.op_names == ["jit(f)/pallas_call"] and kernel.attribute("backend_config") == "{}"
    with pytest.raises(mylib.errors.AuditError, match="a bracket is not closed: %k = "):
        mylib.audit(text.replace("}}, metadata", ", metadata"), mesh=MESH)


def calling(target: str) -> str:
    call = f'ROOT %c = f32[8]{{0}} custom-call(%x), custom_call_target="{target}"'
    return program(PARAMETER, call)


@pytest.mark.parametrize(
    "target",
    ["cublasMpGemm", "cusolverMpPotrf", "xla.gpu.ext.all_reduce", "RaggedDotAllToAll"]
    + ["lapack_spotrf_ffi_mp", "__cublas$lt$matmulAllReduce", "Sharding2", "mosaic_gpu_v2", ""],
)
def test_calls_whose_names_only_begin_like_known_ones_are_errors(target):
    with pytest.raises(
        mylib.errors.AuditError, match=re.escape(f"calls {target!r}, which is not in the")
    ):
        mylib.audit(calling(target), mesh=MESH)
    if target:
        assert mylib.audit(calling(target), mesh=MESH, local=[target]).collectives == ()


@pytest.mark.parametrize(
    "target",
    ["cusolver_potrf_ffi", "hipsolver_getrf_ffi", "__cublas$lt$matmul", "xla.gpu.ext.cub_sort_keys"]
    + ["cu_threefry2x32_ffi", "__cudnn$norm", "xla_ffi_python_gpu_callback"],
)
def test_calls_that_are_known_by_their_names(target):
    assert mylib.audit(calling(target), mesh=MESH).collectives == ()


def test_all_that_jax_registers_for_cpus_is_known():
    """If one is missing that stays on its device, add it to `audit/targets.py`."""
    registered = {name for name, *_ in lapack.registrations()["cpu"]}
    assert len(registered) > 50 and registered <= TARGETS.keys()


def test_send_and_receive():
    text = program(
        PARAMETER,
        "%t = token[] after-all()",
        "%s = (f32[8]{0}, u32[], token[]) send(%x, %t), channel_id=1, frontend_attributes="
        '{_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}',
        "%r = (f32[8]{0}, u32[], token[]) recv(%t), channel_id=1",
        "%sd = token[] send-done(%s), channel_id=1",
        "%rd = (f32[8]{0}, token[]) recv-done(%r), channel_id=1",
        "ROOT %g = f32[8]{0} get-tuple-element(%rd), index=0",
    )
    (only,) = mylib.audit(text, mesh=MESH).collectives
    assert (only.kind, only.axes, only.bytes) == ("collective-permute", ("d",), 32)
    # Besides what is sent, `send` returns a context and a token.
    flow = mylib.audit(text, mesh=MESH).flow
    assert [flow.array(bit).shape for bit in flow.graph.into] == [(8,)]
    to_host = text.replace("send(%x, %t),", "send(%x, %t), is_host_transfer=true,")
    assert mylib.audit(to_host, mesh=MESH).collectives == ()
    with pytest.raises(mylib.errors.AuditError, match="which devices it moves data between"):
        mylib.audit(re.sub(r", frontend_attributes=.*", "", text), mesh=MESH)


def test_quotients_of_places_are_rounded_as_in_hlo():
    text = program(
        "%p = u32[] partition-id()",
        "%i = s32[] convert(%p)",
        "%four = s32[] constant(4)",
        "%d = s32[] subtract(%i, %four)",
        "%two = s32[] constant(2)",
        "%q = s32[] divide(%d, %two)",
        "%r = s32[] remainder(%d, %two)",
        "ROOT %t = (s32[], s32[]) tuple(%q, %r)",
    )
    quotients, rests = (positions(x, 8) for x in HloModule(text).entry.result.inputs())
    assert quotients[:, 0].tolist() == [-2, -1, -1, 0, 0, 0, 1, 1]
    assert rests[:, 0].tolist() == [0, -1, 0, -1, 0, 1, 0, 1]


def test_the_sum_of_a_collective_that_is_started():
    """Its parameters are not the operands of the collective: it may have one, and the sum two."""
    text = program(
        PARAMETER,
        "%s = f32[8]{0} all-reduce-start(%x), channel_id=1, replica_groups=[1,8]<=[8], "
        'to_apply=%sum, metadata={op_name="jit(f)/transpose(jvp())/reduce_sum"}',
        "ROOT %d = f32[8]{0} all-reduce-done(%s)",
        computations=SUM,
    )
    (only,) = mylib.audit(text, mesh=MESH).collectives
    assert (only.kind, only.bytes, only.phase) == ("all-reduce", 32, "backward")
    sum_ = HloModule(text).computations["sum"]
    assert [before(Value(x)) for x in sum_.instructions[:2]] == [None, None]


def test_a_broadcast_of_what_a_copy_in_the_background_returns():
    """The copy's start is a tuple, whose parts come from the same value."""
    text = program(
        PARAMETER,
        "%s = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%x)",
        "%c = f32[8]{0} copy-done(%s)",
        "ROOT %b = f32[1,8]{1,0} broadcast(%c), dimensions={1}",
    )
    graph = graph_of(HloModule(text), [], 8)
    assert graph.results[0].near == 1 << graph.bits[Source("parameter", 0)]


def test_a_loop_that_nobody_knows_and_one_that_counts_down():
    def looped(condition: str) -> str:
        computations = f"""{SUM}
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %p = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[8]{{0}} get-tuple-element(%p), index=1
  %two = s32[] constant(2)
  %j = s32[] subtract(%i, %two)
  %r = f32[8]{{0}} all-reduce(%v), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%sum
  ROOT %t = (s32[], f32[8]{{0}}) tuple(%j, %r)
}}

%condition (q: (s32[], f32[8])) -> pred[] {{
  %q = (s32[], f32[8]{{0}}) parameter(0)
  %k = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant(1)
  ROOT %go = pred[] compare({condition}
}}
"""
        return program(
            PARAMETER,
            "%start = s32[] constant(8)",
            "%init = (s32[], f32[8]{0}) tuple(%start, %x)",
            "%w = (s32[], f32[8]{0}) while(%init), condition=%condition, body=%body",
            "ROOT %g = f32[8]{0} get-tuple-element(%w), index=1",
            computations=computations,
        )

    for condition, times in (
        ("%k, %n), direction=GT", 4),  # 8, 6, 4, 2
        ("%k, %n), direction=GE", 4),
        ("%n, %k), direction=LT", 4),
        ("%n, %k), direction=LE", 4),
        ("%k, %n), direction=NE", None),
        ("%k, %n), direction=LT", None),
        ("%k, %k), direction=GT", None),
    ):
        (only,) = mylib.audit(looped(condition), mesh=MESH).collectives
        assert only.times == times, condition
