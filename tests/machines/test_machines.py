"""Machines: descriptions, meshes, data sheets, and what is said where a compiler is missing.

None of this needs a compiler.
"""

import dataclasses
import importlib.metadata
import re
import subprocess
import sys
import tomllib

import _pages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rooms
from jax.sharding import AxisType

import mylib
from mylib import machines
from mylib._programs import machines as room
from mylib._programs.machines import out_of_memory

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
GPUS = ("a100-40gb", "a100-80gb", "h100", "h200", "b200")
TPUS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
SHEETS = tomllib.loads(
    (rooms.PACKAGE / "_programs/machines/chips.toml").read_text(encoding="utf-8")
)


def row(chip):
    """What the table in docs/data-sheets.md says of a chip."""
    flops = {name: f"{peak / 1e12:g}" for name, peak in chip.flops.items()}
    rates = [flops.get(name, "") for name in ("bfloat16", "float32", "int8")]
    rates.insert(2, flops.get("float8_e4m3fn", ""))
    figures = [
        f"`{chip.name}`",
        f"{chip.memory / 2**30:.2f}",
        f"{chip.memory_bandwidth / 1e9:.0f}",
        *rates,
        f"{chip.links} x {chip.link_bandwidth / 1e9:g}",
        f"{chip.network_bandwidth / 1e9:g}",
        "" if chip.host_bandwidth is None else f"{chip.host_bandwidth / 1e9:g}",
        str(chip.devices),
    ]
    links = [f"[{n}]({url})" for n, url in enumerate(SHEETS[chip.name]["sources"], 1)]
    return "| " + " | ".join([*figures, " ".join(links)]) + " |"


def test_the_table_of_the_docs():
    page = (_pages.ROOT / "docs" / "data-sheets.md").read_text(encoding="utf-8")
    for chip in machines.CHIPS.values():
        assert row(chip) in page.splitlines(), "docs/data-sheets.md: its table has another row"


class TestMakeMesh:
    def test_axes_are_auto_and_one_takes_what_is_left(self):
        mesh = mylib.make_mesh(data=-1, model=2)
        assert dict(mesh.shape) == {"data": 4, "model": 2}
        assert mesh.axis_types == (AUTO, AUTO)
        assert set(mesh.devices.flat) == set(jax.devices())

    def test_explicit_axes_are_named(self):
        assert mylib.make_mesh(a=2, b=4, explicit="b").axis_types == (AUTO, EXPLICIT)
        assert mylib.make_mesh(a=2, b=4, explicit=["a", "b"]).axis_types == (EXPLICIT, EXPLICIT)

    def test_of_some_devices(self):
        mesh = mylib.make_mesh(data=2, devices=jax.devices()[4:6])
        assert list(mesh.devices) == jax.devices()[4:6]
        in_rows = np.array(jax.devices()).reshape(4, 2)
        mesh = mylib.make_mesh(data=4, model=2, devices=in_rows)
        assert mesh == mylib.make_mesh(data=4, model=2)

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            ({}, "needs an axis"),
            (
                {"a": 3},
                r"a=3 needs 3 devices, and there are 8. Change a size, or let one be -1, or leave "
                r"devices out: devices=jax.devices\(\)\[:3\]$",
            ),
            ({"a": 9}, "To simulate 9 devices on a CPU, set XLA_FLAGS=--xla_force_host_platform_"),
            ({"a": -1, "b": 3}, "needs a multiple of 3 devices"),
            ({"a": -1, "b": -1}, "one of them may be -1"),
            ({"a": 0}, "sizes are positive"),
            ({"a": 8, "explicit": "b"}, r"explicit=\['b'\]: the axes of this mesh are \['a'\]"),
        ],
    )
    def test_what_cannot_be(self, arguments, told):
        with pytest.raises(ValueError, match=told):
            mylib.make_mesh(**arguments)


class TestDescriptions:
    def test_the_chips_that_are_known(self):
        assert {*GPUS, *TPUS} <= set(machines.CHIPS)

    @pytest.mark.parametrize("chip", machines.CHIPS.values(), ids=str)
    def test_every_figure_is_there(self, chip):
        figures = {"memory", "flops", "memory_bandwidth"}
        figures |= {"links", "link_bandwidth", "network_bandwidth"}
        figures |= {"target"} if chip.platform == "gpu" else {"largest"}
        assert all(url.startswith("https://") for url in SHEETS[chip.name]["sources"])
        for name in figures:
            assert getattr(chip, name), name
        assert chip.flops["bfloat16"] > 1e14 and 8e9 < chip.memory < 300e9

    @pytest.mark.parametrize("name", ["h100 x 8", "b200 x 2", "a100-40gb x 64", "v5e 4x4"])
    def test_names(self, name):
        assert str(machines.Machine.of(name)) == name

    @pytest.mark.parametrize("name", ["h100", "h100 x 12", "h100 x 0", "v5e", "moon x 8", "v5e 4"])
    def test_names_of_nothing(self, name):
        with pytest.raises(ValueError, match=name.split()[0]):
            machines.Machine.of(name)

    def test_counts_and_memory(self):
        gpus = machines.gpu("h100", hosts=8)
        assert (gpus.count, gpus.hosts, gpus.shape) == (64, 8, (8, 8))
        tpus = machines.tpu("v5e", (16, 16))
        assert (tpus.count, tpus.memory) == (256, 15.75 * 2**30)
        # Two devices a chip.
        split = machines.tpu("tpu7x", (2, 2, 1))
        assert split.count == 8 and split.memory == machines.CHIPS["tpu7x"].memory // 2
        assert split.flops(jnp.bfloat16) == machines.CHIPS["tpu7x"].flops["bfloat16"] / 2
        assert gpus.flops(jnp.complex64) is None

    def test_the_repr_is_a_data_sheet(self):
        assert repr(machines.gpu("h100", hosts=2)).splitlines() == [
            "h100 x 16: 16 devices on 2 hosts",
            "  memory     79.11 GiB on each device, 3352 GB/s",
            "  peak       float64 67, float32 494.5, float16 989.5, bfloat16 989.5, "
            "float8_e4m3fn 1979, int8 1979 TFLOP/s on each device",
            "  links      18 for each chip, 25 GB/s each way",
            "  network    50 GB/s each way for each chip",
            "  host       64 GB/s each way for each chip",
        ]

    @pytest.mark.parametrize(
        ("make", "told"),
        [
            (lambda: machines.gpu("h1000"), "no data sheet of a GPU called 'h1000'. It has a100"),
            (lambda: machines.gpu("v5e"), "no data sheet of a GPU called 'v5e'"),
            (lambda: machines.gpu("h100", hosts=0), "has no devices"),
            (lambda: machines.tpu("v5e", (4, 4, 4)), "has 2 directions, such as 4x4, not 4x4x4"),
            (lambda: machines.tpu("v5e", 16), "has 2 directions, such as 4x4, not 16"),
            (lambda: machines.tpu("v5e", (32, 32)), "larger than the largest slice of v5e, 16x16"),
            (lambda: machines.gpu(machines.Chip("my", "gpu")), "my has no `target`"),
        ],
    )
    def test_what_cannot_be(self, make, told):
        with pytest.raises(ValueError, match=told):
            make()

    def test_described_by_the_user(self):
        chip = dataclasses.replace(machines.CHIPS["h100"], name="h100-94gb", memory=94 * 2**30)
        assert machines.gpu(chip).memory == 94 * 2**30

    def test_here(self):
        here = machines.here()
        assert here.devices == tuple(jax.devices()) and here.is_here
        assert here.mesh(data=-1) == mylib.make_mesh(data=-1)
        assert str(here) == "cpu x 8" and repr(here).startswith("cpu x 8: 8 devices on 1 host")


class TestCompilersThatAreMissing:
    @pytest.fixture
    def versions(self, monkeypatch):
        found = {"jaxlib": importlib.metadata.version("jaxlib")}

        def version(name):
            if name in found:
                return found[name]
            raise importlib.metadata.PackageNotFoundError(name)

        inner = sys.modules["mylib._programs.machines.compilers"]
        monkeypatch.setattr(inner.metadata, "version", version)
        monkeypatch.setattr(inner, "_is_installed", lambda module: len(found) > 1)
        monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
        return found

    def test_none(self, versions):
        with pytest.raises(machines.CompilerError, match="no CUDA libraries") as caught:
            _ = machines.gpu("h100").devices
        assert f'pip install "jax-cuda12-plugin=={versions["jaxlib"]}"' in str(caught.value)
        with pytest.raises(machines.CompilerError, match='pip install "libtpu==0'):
            _ = machines.tpu("v5e", (4, 4)).devices

    def test_of_another_version(self, versions):
        versions.update({"jax-cuda13-plugin": "0.1.2", "libtpu": "0.0.1"})
        with pytest.raises(machines.CompilerError, match="cuda13-plugin 0.1.2.*another version"):
            _ = machines.gpu("h100").devices
        with pytest.raises(machines.CompilerError, match="libtpu 0.0.1.*another version of JAX"):
            _ = machines.tpu("v5e", (4, 4)).devices


@pytest.mark.parametrize(
    ("text", "noted"),
    [
        ("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.2", True),
        ("Kernel 'gemm_fusion_dot' launch needs more blocks (3221225472, 1) than allowed", True),
        ("No supported config found for HLO: %gemm_fusion", True),
        ("No supported configs found for HLO: %gemm_fusion", True),
        ("UNIMPLEMENTED: FP8 convolutions", False),
    ],
)
def test_a_note_on_kernels_that_cannot_be_made(text, noted):
    note = room.about_kernels(RuntimeError(text))
    assert (note is not None and "xla_gpu_enable_triton_gemm" in note) == noted


def test_nothing_is_imported_before_it_is_asked_for(checkout_env):
    script = """
import os, sys
before = dict(os.environ)
import mylib
print(repr(mylib.machines.gpu("h100")), mylib.machines.tpu("v5e", (4, 4)))
for name in ("libtpu", "jax_plugins.xla_cuda12", "jax.experimental.topologies", "pytest"):
    assert name not in sys.modules, name
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
added = {name for name in os.environ if os.environ[name] != before.get(name)}
assert not {name for name in added if "CUDA" in name}, added
"""
    subprocess.run([sys.executable, "-c", script], env=checkout_env, check=True, timeout=240)


class TestThePlugin:
    FILE = """
        import pytest

        @pytest.mark.compiles_for("h100 x 8", "v5e 4x4")
        def test_it(machine):
            assert str(machine) in ("h100 x 8", "v5e 4x4")

        def test_without(machine):
            pass
    """

    @pytest.fixture
    def session(self, pytester, checkout_env, monkeypatch):
        # Without the compilers, if they are in a folder of their own.
        monkeypatch.setenv("PYTHONPATH", checkout_env["PYTHONPATH"])
        pytester.makepyfile(self.FILE)
        return lambda *options: pytester.runpytest_subprocess(*options)

    @pytest.mark.thorough
    def test_skipped_or_failed(self, session):
        installed = []
        for platform in ("gpu", "tpu"):
            try:
                room.require(platform)
                installed.append(platform)
            except machines.CompilerError:
                pass
        if installed:
            pytest.skip("a compiler is installed: tests/machines/test_compiling.py uses it")
        done = session("-rs")
        done.assert_outcomes(skipped=2, errors=1)
        done.stdout.fnmatch_lines(["*XLA's compiler for GPUs is not installed*"])
        done = session("--require-compilers", "-k", "test_it")
        done.assert_outcomes(errors=2, deselected=1)
        done.stdout.fnmatch_lines(["*--require-compilers: XLA's compiler for *"])

    @pytest.mark.slow
    def test_the_fixture_is_needed(self, pytester, session):
        pytester.makepyfile(
            "import pytest\n@pytest.mark.compiles_for('h100 x 8')\ndef test_it(): pass"
        )
        done = session()
        done.stdout.fnmatch_lines(["*marked compiles_for, so it has to take the fixture*"])


def links(machine, sizes):
    """Between devices that are next to each other along each axis: on average, and at most."""
    places = room.coordinates(machine, sizes)[:, :-1].reshape(*sizes, -1)
    size = (*machine.shape, 1)[: places.shape[-1]]
    for axis in range(len(sizes)):
        steps = np.abs(np.diff(places, axis=axis))
        rings = [n % machine.chip.wraps == 0 for n in size]
        around = np.where(rings, np.minimum(steps, np.array(size) - steps), steps)
        yield float(np.mean(around.sum(-1))), int(np.max(around.sum(-1)))


def told(average, most):
    return f"{average:.2g}" + (f", at most {most}" if most > average else "")


def test_the_table_of_neighbours():
    page = (_pages.ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    rows = [
        row.strip("| ").split(" | ") for row in page.splitlines() if re.match(r"\| v5\w \d", row)
    ]
    assert len(rows) == 6
    for name, axes, *cells in rows:
        sizes = tuple(map(int, axes.split(", ")))
        found = [told(*each) for each in links(machines.Machine.of(name), sizes)]
        assert found == [cell.strip(" |") for cell in cells if cell.strip(" |")], name


class TestFits:
    """In bytes; what the compilers say of real programs is in test_compiling.py."""

    def memory(self, accepted=""):
        parts = {"results": 2, "temporaries": 14, "aliased": 2, "code": 0, "constants": 0}
        return machines.Memory(arguments=4, **parts, host=0, peak=9, accepted=accepted, largest=())

    def test_arguments_that_are_the_cause_are_listed(self):
        arguments = (machines.Argument("model.up", (32, 64), 4),)
        memory = dataclasses.replace(self.memory(), peak=5, largest=arguments)
        lines = str(memory.fits(self.machine(3))).splitlines()
        assert lines[2:] == [
            "  its largest arguments, by their bytes on each device:",
            "           4 B  model.up (32, 64)",
            "  shard the large ones over more devices, and donate what a step replaces",
        ]

    def test_temporaries_that_are_the_cause_are_listed(self):
        memory = dataclasses.replace(self.memory(), arguments=1)
        scores = mylib.machines.Alive(4, 2, "bf16", (8, 4), "dot_general", "step.py:3")
        fit = dataclasses.replace(memory.fits(self.machine(7)), temporaries=(scores,))
        lines = str(fit).splitlines()
        assert lines[2:4] == [
            "  the largest arrays that it computes, by their bytes on each device:",
            "           4 B  2 x bf16[8, 4]  dot_general  step.py:3",
        ]
        assert lines[4].startswith("  use a smaller batch, recompute more")
        assert "in blocks, such as the loss over a large vocabulary" in lines[4]
        assert len(lines) == 5

    def machine(self, memory, chip="v5e"):
        return machines.tpu(dataclasses.replace(machines.CHIPS[chip], memory=memory), (4, 4))

    def test_xlas_peak_decides(self):
        memory = self.memory()
        assert memory.total == 18
        fit = memory.fits(self.machine(9))
        assert fit and (fit.needed, fit.missing) == (9, 0)
        assert memory.fits(self.machine(8)).missing == 1

    def test_what_a_tpus_compiler_has_accepted_fits_there(self):
        memory = dataclasses.replace(self.memory("TPU v5 lite"), peak=20 * 2**30)
        fit = memory.fits(machines.tpu("v5e", (4, 4)))
        assert fit and fit.missing == 0 and "its compiler has accepted the program" in str(fit)
        # With less memory, and on another TPU, the number decides.
        assert memory.fits(self.machine(10 * 2**30)).missing == 10 * 2**30
        assert not memory.fits(machines.tpu("v5p", (2, 2, 1))).accepted


class TestWhatTheTpusCompilerRefuses:
    """The texts of its errors, which https://openxla.org/xla/errors/error_1000 explains."""

    EARLY = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
        "required for HLO temporaries (64.75G) exceeds available HBM (15.75G). HLO module: jit_f."
    )
    LATE = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory \
space hbm. Used 41.74G of 16.00G hbm. Exceeded hbm capacity by 25.74G.

Total hbm usage >= 41.74G:
    reserved        528.00M
    program          41.22G
    arguments            0B

  Largest program allocations in hbm:

  1. Size: 7.00G
     Shape: f32[7,16384,16384]{2,1,0:T(8,128)}
     Unpadded size: 7.00G
     Allocation type: HLO temp
     ==========================

  2. Size: 32.00G
     Operator: op_type="sub" op_name="jit(f)/jvp()/sub" source_file="/home/me/step.py" source_line=7
     Shape: s32[8388608,8,4]{2,1,0:T(8,128)}
     Unpadded size: 1.00G
     Allocation type: HLO temp
     ==========================

  3. Size: 1.00G
     Shape: f32[16384,16384]{1,0:T(8,128)}
     Unpadded size: 1.00G
     Allocation type: argument
     =========================="""
    PARTS = (
        "RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 34.00G, SparseCore Hbm usage 174.00G, "
        "exceeding available bytes: 95.74G"
    )

    def read(self, text):
        arguments = [machines.Argument("x", (512, 8), 512 * 8 * 2)]
        found = out_of_memory(RuntimeError(text), arguments)
        return found and found.fit

    def test_what_it_counts_is_the_total(self):
        """Of a program with arguments and results alone, too; test_compiling.py compiles one."""
        fit = self.read(self.EARLY)
        assert (fit.needed, fit.available) == (64.75 * 2**30, 15.75 * 2**30)
        assert self.read(self.PARTS).needed == 208 * 2**30
        assert self.read("RESOURCE_EXHAUSTED: of something else") is None

    def test_the_largest_arrays_that_it_lists(self):
        fit = self.read(self.LATE)
        assert (fit.needed, fit.available) == (int(41.74 * 2**30), 16 * 2**30)
        assert fit.temporaries == (
            mylib.machines.Alive(32 * 2**30, 1, "s32", (8388608, 8, 4), "sub", "step.py:7"),
            mylib.machines.Alive(7 * 2**30, 1, "f32", (7, 16384, 16384), "", ""),
        )
        assert "by their bytes on each device:\n     32.00 GiB  s32[8388608, 8, 4]  sub" in str(fit)

    def test_without_a_list(self):
        text = str(self.read(self.EARLY))
        assert "that it computes" not in text and "use a smaller batch" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"devices": 8}, r"devices=8: write a sequence of devices, such as jax.devices\(\)\[:8\]"),
        ({"data": 4, "devices": [0, 1, 2, 3]}, "write a sequence of devices"),
        ({"data": 8, "devices": "cpu"}, "devices='cpu': write a sequence of devices"),
        ({"data": 8, "explicit": True}, r"explicit=True: write the names .*, of \('data'\)"),
        ({"data": "8"}, "the size of 'data' is no integer"),
        ({"axis_shapes": (8,), "axis_names": ("data",)}, "the size of 'axis_shapes' is no integer"),
    ],
)
def test_wrong_arguments_of_make_mesh(options, says):
    with pytest.raises(TypeError, match=says):
        mylib.make_mesh(**options)
