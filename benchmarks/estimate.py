"""Published training steps, compiled by the compilers of their machines, and estimated.

    python benchmarks/estimate.py                          every row: hours on two cores
    python benchmarks/estimate.py --only "8 H100" "v5e"    rows with one of these in their name
    python benchmarks/estimate.py --order                  strategies for one model on one machine
    python benchmarks/estimate.py --keep DIR               compiles only programs that DIR lacks

Constants of the estimate were fitted to half of the rows ("fit"), and are judged by the others.
Nothing is run, and no GPU or TPU is needed (`pip install '.[gpu-compiler,tpu-compiler]'`).
"""

import argparse
import gzip
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jax.sharding import AbstractMesh
from published import ORDER, ROWS, Row
from side_by_side import print_header, print_row
from training_step import lowered

import mylib
from mylib._audit import Estimate

# The TPU compiler's own, which don't communicate.
LOCAL = "GatherScatterIndicesBitpacked", "TODO(b/522284627)"


def program_of(row: Row, folder: Path | None) -> str:
    """The text of the compiled program."""
    name = re.sub(r"\W+", "_", row.name)
    kept = None if folder is None else folder / f"{name}.hlo.gz"
    if kept is not None and kept.exists():
        return gzip.decompress(kept.read_bytes()).decode()
    mesh = row.machine.mesh(**row.axes)
    step = lowered(row.size, row.work, mesh, row.machine.chip.platform)
    text = step.compile(dict(row.options)).as_text()
    if kept is not None:
        kept.write_bytes(gzip.compress(text.encode()))
    return text


def estimate(row: Row, folder: Path | None) -> Estimate:
    mesh = AbstractMesh(tuple(row.axes.values()), tuple(row.axes))
    report = mylib.audit(program_of(row, folder), mesh=mesh, local=LOCAL)
    return report.estimate(row.machine)


COLUMNS = (
    "step", "mesh", "published s", "estimated s", "ratio", "interval s", "bound by", "unknown",
    "rows",
)  # fmt: skip


def cells(row: Row, found: Estimate) -> list[str]:
    low, high = found.interval
    return [
        row.name,
        " x ".join(f"{name} {size}" for name, size in row.axes.items()),
        f"{row.seconds:.2f}",
        f"{found.seconds:.2f}",
        f"{found.seconds / row.seconds:.2f}",
        f"{low:.2f} to {high:.2f}",
        found.bound_by,
        str(found.unknown),
        ("held out" if row.held_out else "fit") if row.judged else "not judged",
    ]


def order(folder: Path | None) -> None:
    """Strategies for one model on one machine, and the terms that decide between them."""
    columns = "strategy", "machine", "estimated s", "compute", "memory", "communication", "exposed"
    print_header("seconds of strategies", columns)
    for row in ORDER:
        found = estimate(row, folder)
        sent = {k: v for k, v in found.parts.items() if k not in ("compute", "memory")}
        links = ", ".join(f"{name.removeprefix('communication over ')} {time:.2f}"
                          for name, time in sent.items() if time >= 0.005)  # fmt: skip
        times = (found.seconds, found.parts["compute"], found.parts["memory"])
        print_row([row.name, str(row.machine), *(f"{x:.2f}" for x in times), links,
                   f"{found.exposed:.2f}"])  # fmt: skip


def summary(name: str, ratios: Sequence[float]) -> None:
    if ratios:
        spread = max(ratios) / min(ratios)
        print(f"{name}: {len(ratios)} rows, geometric mean {geometric_mean(ratios):.2f}, "
              f"{min(ratios):.2f} to {max(ratios):.2f}, spread {spread:.2f}")  # fmt: skip


def table(rows: Iterable[Row], folder: Path | None) -> dict[Row, float]:
    print_header("published steps and their estimates", COLUMNS)
    ratios: dict[str, float] = {}
    for row in rows:
        found = estimate(row, folder)
        ratios[row.name] = found.seconds / row.seconds
        print_row(cells(row, found))
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[""], help="rows with one of these in their name"
    )
    parser.add_argument("--keep", type=Path, help="a folder of compiled programs")
    parser.add_argument("--order", action="store_true", help="strategies for one model instead")
    given = parser.parse_args()
    if given.order:
        order(given.keep)
        return
    rows = [row for row in ROWS if any(part in row.name for part in given.only)]
    ratios = table(rows, given.keep)
    print()
    for name, held_out in ("fit", False), ("held out", True):
        judged = [r for r in rows if r.judged and r.held_out == held_out]
        summary(name, [ratios[row.name] for row in judged])


if __name__ == "__main__":
    main()
