"""What `mylib.audit` costs, and how well its estimate ranks steps.

    python benchmarks/audit.py            every row, some minutes
    python benchmarks/audit.py --quick    smaller models

Times are of this process's own CPU, beyond compilation: the machine may do other work.
"""

import os

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("NPROC", "32")

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The steps are those of the tests.
sys.path.append(str(ROOT / "tests"))
import steps  # noqa: E402

# isort: split
import argparse  # noqa: E402
import gzip  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AbstractMesh, AxisType  # noqa: E402

import mylib  # noqa: E402
from mylib import machines  # noqa: E402

ONE = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
TWO = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller models")
    quick = parser.parse_args().quick
    print(f"jax {jax.__version__}, 8 simulated CPU devices")
    layers(quick)
    texts()
    ranking(quick)


def cpu_time(call: Callable[[], Any], repeats: int = 5) -> float:
    """The best of a few."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def layers(quick: bool) -> None:
    """The cost is linear in the size of the program."""
    print("\nFSDP step of an MLP, its layers in a list")
    print("  layers  text KiB  collectives  compile s  audit ms  ms a collective  promise")
    for count in (6, 12) if quick else (6, 12, 24, 48):
        steps.LAYERS = count
        strategy = steps.strategies(ONE, TWO)["fsdp"]
        lowered = strategy.step(False).lower(*strategy.args(False))
        start = time.process_time()
        compiled = lowered.compile()
        compiling = time.process_time() - start
        text = compiled.as_text() or ""
        took = cpu_time(lambda c=compiled: mylib.audit(c))
        found = len(mylib.audit(compiled).collectives)
        kept = "under a second: " + ("kept" if took < 1 else "BROKEN")
        print(
            f"  {count:6}  {len(text) / 1024:8.0f}  {found:11}  {compiling:9.1f}  "
            f"{took * 1e3:8.0f}  {took * 1e3 / found:15.2f}  {kept}"
        )


def texts() -> None:
    """Programs that the compilers for GPUs and TPUs have made."""
    print("\nprograms of the GPU's and the TPU's compilers, from tests/audit/texts")
    folder = ROOT / "tests" / "audit" / "texts"
    for path in sorted([*folder.glob("*mlp_*"), *folder.glob("*transformer_*")]):
        text = gzip.decompress(path.read_bytes()).decode()
        mesh = AbstractMesh((4, 2), ("data", "model"))
        took = cpu_time(lambda text=text, mesh=mesh: mylib.audit(text, mesh=mesh))
        rate = took * 1e3 / len(text) * 2**20
        kept = "kept" if rate < 300 else "BROKEN"
        name = path.name.removesuffix(".hlo.gz")
        print(f"  {name:42} {len(text) // 1024:5} KiB  {took * 1e3:5.0f} ms  {rate:5.0f} ms/MiB"
              f"  under 300: {kept}")  # fmt: skip


def ranking(quick: bool) -> None:
    """Twelve steps, by the estimate and by the clock."""
    print("\nthe estimate's ranking of CPU steps against the clock's")
    steps.LAYERS = 3
    # A CPU has no data sheet: rough figures, of which only the ratios matter for a ranking.
    chip = machines.Chip(
        "cpu", "gpu", flops={"float32": 2e10}, memory_bandwidth=5e9, links=1, link_bandwidth=1e9
    )
    machine = machines.Machine(chip, 1, (1, 8))
    estimated: list[float] = []
    measured: list[float] = []
    for rows in (512, 2048) if quick else (512, 2048, 8192):
        for name, strategy in steps.strategies(ONE, TWO).items():
            strategy.rows = rows
            compiled = strategy.step(True).lower(*strategy.args(True)).compile()
            args = jax.tree.map(
                lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding),
                strategy.args(True),
            )
            jax.block_until_ready(compiled(*args))
            times: list[float] = []
            for _ in range(7):
                start = time.perf_counter()
                jax.block_until_ready(compiled(*args))
                times.append(time.perf_counter() - start)
            estimated.append(mylib.audit(compiled).estimate(machine).seconds)
            measured.append(min(times))
            print(
                f"  {name:16} {rows:5} rows  estimated {estimated[-1] * 1e3:7.2f} ms  "
                f"measured {measured[-1] * 1e3:7.2f} ms"
            )
    ranks = [np.argsort(np.argsort(x)) for x in (estimated, measured)]
    correlation = np.corrcoef(ranks)[0, 1]
    print(f"  rank correlation {correlation:.2f}")


if __name__ == "__main__":
    main()
