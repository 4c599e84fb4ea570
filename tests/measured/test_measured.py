"""Profiles joined with audited programs: where the time went, and who waited for whom."""

import dataclasses
import shutil
import time

import jax
import jax.numpy as jnp
import known
import numpy as np
import profiled
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from terminals import terminal

import mylib

ONE = mylib.make_mesh(data=8)


class Run:
    """A compiled step, its report, and the folder of a profile."""

    def __init__(self, make, folder):
        self.compiled, *self.arguments = make(ONE)
        self.report, self.folder = mylib.audit(self.compiled), folder
        profiled.profile(folder, self.compiled, *self.arguments)


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    return Run(profiled.mlp, tmp_path_factory.mktemp("mlp"))


@pytest.mark.parametrize(
    "make", [profiled.mlp, pytest.param(profiled.gpt, marks=pytest.mark.slow), profiled.experts]
)
def test_all_time_has_a_line(make, tmp_path):
    run = Run(make, tmp_path)
    report, measured = run.report, run.report.measured(run.folder)
    assert measured.attributed >= 0.999 and not measured.unknown
    assert measured.calls == 2 and [x.device for x in measured.devices] == [*range(8)]
    assert [x.times for x in measured.collectives] == [c.times for c in report.collectives]
    assert [x.wire_bytes for x in measured.collectives] == [
        (c.times or 0) * c.wire_bytes for c in report.collectives
    ]
    busy = sum(x.busy for x in measured.devices) / 8
    assert sum(x.seconds for x in measured.lines) == pytest.approx(busy)
    assert sum(x.seconds for x in measured.layers) == pytest.approx(busy)
    exposed = sum(x.exposed for x in measured.devices) / 8
    assert sum(x.exposed for x in measured.collectives) == pytest.approx(exposed)
    for x in measured.devices:
        assert 0 <= x.waiting <= x.exposed <= x.busy <= x.seconds and x.idle >= 0
        assert sum(x.waits_for.values()) == pytest.approx(x.waiting)
    for c in measured.collectives:
        assert c.exposed <= c.in_flight + 1e-12 and c.rate > 0


def test_a_late_device_is_named(tmp_path):
    compiled, *arguments = profiled.sleeping(ONE, 5, "data", 0.1)
    report = mylib.audit(compiled)
    profiled.profile(tmp_path, compiled, *arguments)
    measured = report.measured(tmp_path)
    late = measured.devices[5]
    assert late.computing > 0.1 and late.waiting < 0.05
    # Some callbacks of other devices may only run after it, on a busy machine.
    assert max(x.waits_for.get(5, 0) for x in measured.devices) > 0.09
    assert max(measured.devices, key=lambda x: measured.awaited(x.device)) == late
    (total,) = measured.collectives
    assert total.awaited == 5 and total.in_flight > total.waiting > 0.01
    assert total.sending == pytest.approx(total.in_flight - total.waiting, rel=0.2, abs=1e-3)
    text = repr(measured)
    assert "device 5 is late: others wait " in text
    assert "all-reduce" in text and "profiled.py:" in text


@pytest.mark.parametrize(
    ("axes", "waiting"), [("a", {1}), ("b", {3, 0, 2}), (("a", "b"), {3, 0, 2, 7, 1, 6, 4})]
)
def test_groups_of_devices_in_the_order_of_the_mesh(axes, waiting, tmp_path):
    mesh = known.mesh_of([jax.devices()[i] for i in known.PERMUTED], (2, 4), ("a", "b"))
    # Over a, device 7 is with 3, 5 with 1, 6 with 0, and 4 with 2; over b those of a row.
    late = {"a": 5, "b": 1}.get(axes if isinstance(axes, str) else "", 5)
    compiled, *arguments = profiled.sleeping(mesh, late, axes, 0.05)
    profiled.profile(tmp_path, compiled, *arguments)
    measured = mylib.audit(compiled).measured(tmp_path)
    waits = {x.device for x in measured.devices if x.waits_for.get(late, 0) > 0.04}
    assert waits and waits <= waiting


def test_one_instruction_for_several_gradients(mlp):
    """It has the bytes of all of them, and each array its part of the time."""
    report, measured = mlp.report, mlp.report.measured(mlp.folder)
    names = [c.instructions for c in report.collectives]
    combined = [
        (a, b)
        for i, a in enumerate(measured.collectives)
        for j, b in enumerate(measured.collectives)
        if i < j and names[i] == names[j]
    ]
    assert combined  # a reduce-scatter of weights, and an all-reduce of biases
    for a, b in combined:
        assert a.in_flight / b.in_flight == pytest.approx(a.wire_bytes / b.wire_bytes)
    total = sum(c.times * c.wire_bytes for c in report.collectives)
    assert sum(x.wire_bytes for x in measured.collectives) == total


def test_loops_and_conditions(tmp_path):
    """Of nested loops only the innermost instructions count."""
    x = jax.device_put(jnp.ones((8, 64)), NamedSharding(ONE, P("data")))

    @jax.jit
    def nested(x):
        def inner(i, x):
            return jnp.sin(x + x.sum() * 1e-9)

        def outer(x, _):
            x = jax.lax.fori_loop(0, 3, inner, x)
            return jax.lax.cond(x[0, 0] > 2, jnp.cos, jnp.tanh, x), None

        return jax.lax.scan(outer, x, None, length=2)[0]

    compiled = nested.lower(x).compile()
    report = mylib.audit(compiled)
    profiled.profile(tmp_path, compiled, x)
    measured = report.measured(tmp_path)
    # A call of 1 ms: on a busy machine 2 % of it were between two instructions.
    assert measured.attributed >= 0.95
    times = {x.times for x in measured.collectives if x.times != 2}
    assert times == {6}
    for device in measured.devices:
        assert device.busy <= device.seconds


def test_text(mlp, monkeypatch):
    measured = mlp.report.measured(mlp.folder)
    text = repr(measured)
    assert text.startswith("step, measured: 2 calls on 8 devices, ")
    assert "100.0% of the busy time has a line of Python" in text
    for word in ("squares", "backward", "all-gather", "data", "weight", "device 7", "idle"):
        assert word in text
    assert max(map(len, text.splitlines())) > 72
    with terminal(monkeypatch, 72):
        narrow = repr(measured)
    cells = [line for line in narrow.partition("\n\n")[2].splitlines() if line.startswith("  ")]
    assert cells and max(map(len, cells)) <= 72
    assert "waiting" in narrow


def test_a_trace_of_another_program(mlp, tmp_path):
    report = mlp.report

    @jax.jit
    def other(x):
        return jnp.sin(x) @ x.T

    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(ONE, P("data")))
    profiled.profile(tmp_path / "other", other, x)
    with pytest.raises(mylib.errors.AuditError, match=r"no call of 'step', but .*jit_other"):
        report.measured(tmp_path / "other")

    # Of the same name, with other instructions; or with some of them.
    for name, function in (("more", lambda x: jnp.linalg.qr(x)[0]), ("fewer", lambda x: x.sum())):
        function.__name__ = "step"
        profiled.profile(tmp_path / name, jax.jit(function), x)
        with pytest.raises(
            mylib.errors.AuditError, match=r"is not the audited program: it (runs|doesn't)"
        ):
            report.measured(tmp_path / name)


def test_a_trace_of_fewer_devices(tmp_path):
    def step(x):
        return jnp.sin(x) + 1

    reports = []
    for count in (8, 4):
        mesh = Mesh(jax.devices()[:count], "d")
        x = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("d")))
        reports.append(mylib.audit(jax.jit(step), x))
    profiled.profile(tmp_path / "of 4", jax.jit(step), x)
    with pytest.raises(mylib.errors.AuditError, match="has 4 devices, and step runs on 8"):
        reports[0].measured(tmp_path / "of 4")


def test_several_programs_in_a_trace(mlp, tmp_path):
    compiled, arguments, report = mlp.compiled, mlp.arguments, mlp.report
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(ONE, P("data")))

    @jax.jit
    def step(x):
        return jnp.sin(x) @ x.T

    jax.block_until_ready([step(x), compiled(*arguments)])
    with jax.profiler.trace(tmp_path):
        for _ in range(2):
            jax.block_until_ready([step(x), compiled(*arguments)])
    measured = report.measured(tmp_path)
    assert measured.calls == 2 and measured.attributed >= 0.999
    assert mylib.audit(step, x).measured(tmp_path).calls == 2
    # The same for two sizes: their instructions have the same names.
    both = [jax.device_put(jnp.ones((8, n)), x.sharding) for n in (4, 8)]
    double = jax.jit(lambda x: 2 * x)
    jax.block_until_ready([*map(double, both)])
    with jax.profiler.trace(tmp_path / "both"):
        jax.block_until_ready([*map(double, both)])
    with pytest.raises(mylib.errors.AuditError, match="has 2 programs .* with the instructions"):
        mylib.audit(double, both[0]).measured(tmp_path / "both")


def test_folders(mlp, tmp_path):
    report = mlp.report
    with pytest.raises(mylib.errors.AuditError, match="no trace in .*nowhere"):
        report.measured(tmp_path / "nowhere")
    shutil.copytree(mlp.folder, tmp_path / "a")
    (file,) = (tmp_path / "a").rglob("*.xplane.pb")
    assert report.measured(file).calls == report.measured(str(tmp_path)).calls == 2
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(
        mylib.errors.AuditError, match="2 traces in .* Pass the path of one of them"
    ):
        report.measured(tmp_path)
    whole = file.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 3):
        file.write_bytes(whole[:length])
        with pytest.raises(mylib.errors.AuditError, match="not a whole trace|no compiled program"):
            report.measured(tmp_path / "a")


def test_calls_that_are_cut_off(tmp_path):
    """The trace begins while a call runs."""
    compiled, *arguments = profiled.sleeping(ONE, 5, "data", 0.8)
    report = mylib.audit(compiled)
    jax.block_until_ready(compiled(*arguments))
    compiled(*arguments)
    time.sleep(0.3)  # it has begun, also on a busy machine
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(compiled(*arguments))
    measured = report.measured(tmp_path)
    assert measured.calls == 1
    assert "1 call that the trace has cut off left out" in repr(measured)


HLO = """
HloModule jit_step, is_scheduled=true, num_partitions=2

%add {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main {
  %x = f32[64] parameter(0)
  %start = f32[64] all-reduce-start(%x), replica_groups={{0,1}}, channel_id=1, to_apply=%add, PSUM
  %y = f32[64] sine(%x), metadata={op_name="jit(step)/jvp(one)/sin"}
  %done = f32[64] all-reduce-done(%start)
  ROOT %z = f32[64] add(%done, %y), metadata={op_name="jit(step)/jvp(two)/add"}
}
""".replace("PSUM", 'metadata={op_name="jit(step)/jvp(one)/psum"}')


def device(late):
    """A stream of a GPU whose events start later by this. The collective is in two events."""
    ops = [("start", 0, 2), ("y", 2, 40), ("done", 42, 58 - late), ("z", 100 - late, 10)]
    of = {"hlo_module": "jit_step", "program_id": 7}
    return {
        "Stream #1": [
            (name, 1000 * i + late + start, length, {"hlo_op": name, **of})
            for i in (0, 1)
            for name, start, length in ops
        ]
    }


def test_a_collective_in_two_events(tmp_path):
    report = mylib.audit(HLO)
    written = profiled.written(tmp_path, GPU_0=device(0), GPU_1=device(30))
    measured = report.measured(written)
    assert measured.calls == 2 and not measured.notes
    (sum_,) = measured.collectives
    first, second = measured.devices
    ns = pytest.approx
    assert first.seconds * 1e9 == ns(110) and first.computing * 1e9 == ns(50)
    # In flight from the start to the end of what waits for it, and hidden while y is computed.
    assert first.exposed * 1e9 == ns(2 + 58) and second.exposed * 1e9 == ns(2 + 28)
    assert first.waits_for == {1: ns(2e-9)} and second.waits_for == {}
    assert sum_.in_flight * 1e9 == ns((100 + 70) / 2) and sum_.awaited == 1
    assert sum_.times == 1 and sum_.sending * 1e9 == ns(70)
    assert first.between * 1e9 == ns(1000 - 110)
    assert [(x.scope, x.phase) for x in measured.layers][:1] == [("one", "forward")]


def test_traces_of_tpus_are_asked_for(tmp_path):
    written = profiled.written(tmp_path, TPU_0=device(0))
    with pytest.raises(
        mylib.errors.AuditError, match="can't read traces of TPUs.*issue with this one"
    ):
        mylib.audit(HLO).measured(written)


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_a_real_gpu(name, tmp_path):
    """One H100: all kernels have an instruction, if there are no command buffers."""
    report, trace = profiled.of_h100(f"{name}_without_command_buffers", tmp_path)
    measured = report.measured(trace)
    assert measured.calls == 2 and [x.device for x in measured.devices] == [0]
    assert measured.attributed == 1.0 and not measured.unknown and not measured.notes
    (device,) = measured.devices
    assert sum(x.seconds for x in measured.lines) == pytest.approx(device.busy)
    assert 1e-5 < device.busy < device.seconds < 1e-2


@pytest.mark.parametrize(("name", "share"), [("mlp", 1.0), ("gpt", 0.747)])
def test_a_real_gpu_with_command_buffers(name, share, tmp_path):
    """XLA's own kernels have their instruction's name there, and others none."""
    report, trace = profiled.of_h100(name, tmp_path)
    measured = report.measured(trace)
    assert measured.calls == 2 and measured.attributed == pytest.approx(share, abs=1e-3)
    assert all(x.startswith("command_buffer_") for x in measured.unknown)
    advice = "XLA_FLAGS=--xla_gpu_enable_command_buffer= (with nothing behind the =)"
    assert (advice in repr(measured)) == bool(measured.unknown) == (share < 1)


def kernels_of_gpus(op, *names, first):
    """Kernels of an instruction, one after the other, of ten nanoseconds each."""
    stats = {"hlo_module": "jit_step", "program_id": "7", "hlo_op": op}
    return [(x, first + 10 * i, 10, stats) for i, x in enumerate(names)]


def later(events, *times):
    return [(name, at + start, n, stats) for at in times for name, start, n, stats in events]


def test_executions_of_several_kernels(tmp_path):
    """Libraries fill memory before, and run several kernels for an instruction."""
    call = [
        *kernels_of_gpus("start", *["Memset", "Memset", "product", "sum", "sum"] * 2, first=0),
        *kernels_of_gpus("y", "sine", "sine", first=100),
        *kernels_of_gpus("z", "add", first=120),
    ]
    plane = {"Stream #1(Compute)": [*later(call, 0, 1000), ("MemcpyD2D", 500, 5, {})]}
    measured = mylib.audit(HLO).measured(profiled.written(tmp_path, GPU_0=plane, GPU_1=plane))
    (sum_,) = measured.collectives
    assert measured.calls == 2 and sum_.times == 2 and sum_.in_flight == pytest.approx(1e-7)


def test_calls_of_gpus(tmp_path):
    """A call begins with its first instruction, or with what comes before that without a pause."""
    call = [
        *kernels_of_gpus("command_buffer_1", "Memcpy", "y", first=0),
        *kernels_of_gpus("command_buffer_2", "z", "Memcpy", first=20),
    ]
    # The trace begins within a call.
    plane = {"Stream #1(Compute)": later(call, 0, 90, 180)[2:]}
    measured = mylib.audit(HLO).measured(profiled.written(tmp_path, GPU_0=plane))
    assert measured.calls == 2 and "1 call that the trace has cut off" in repr(measured)
    (device,) = measured.devices
    assert device.seconds == pytest.approx(40e-9) and device.between == pytest.approx(50e-9)
    each = pytest.approx(10e-9)
    assert measured.unknown == {"command_buffer_1": each, "command_buffer_2": each}


def test_instructions_of_collectives(mlp):
    """Others can join by them, too."""
    (one,) = mylib.audit(HLO).collectives
    assert one.instructions == ("start", "done")
    text = mlp.compiled.as_text()
    for c in mlp.report.collectives:
        assert c.instructions and all(f"%{name} = " in text for name in c.instructions)


def test_data_is_plain(tmp_path):
    measured = mylib.audit(HLO).measured(
        profiled.written(tmp_path, GPU_0=device(0), GPU_1=device(0))
    )
    assert dataclasses.is_dataclass(measured) and type(measured).__module__ == "mylib.results"
    for x in (measured.parts[0], measured.collectives[0], measured.devices[0]):
        assert dataclasses.is_dataclass(x) and type(x).__module__ == "mylib.results"
