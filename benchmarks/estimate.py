"""Published training steps, compiled by the compilers of their machines, and estimated.

    python benchmarks/estimate.py                          every row that was compiled before
    python benchmarks/estimate.py --only "8 H100" "v5e"    rows with one of these in their name
    python benchmarks/estimate.py --order                  strategies for one model on one machine
    python benchmarks/estimate.py --compile                compiles all of them: hours on two cores
    python benchmarks/estimate.py --store                  and stores what estimates read of them
    python benchmarks/estimate.py --store --keep DIR       compiles only programs that DIR lacks

Constants of the estimate were fitted to half of the rows ("fit"), and are judged by the others.
What is stored is in `published.json.gz`. Nothing is run, and no GPU or TPU is needed; compiling
needs their compilers (`pip install '.[gpu-compiler,tpu-compiler]'`).
"""

import argparse
import gzip
import os
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import stored
from jax.sharding import AbstractMesh
from published import ORDER, ROWS, Row
from side_by_side import print_header, print_row
from training_step import lowered

import mylib
from mylib._programs.audit import Estimate
from mylib._programs.audit.roofline import estimate as estimate_of

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


def inputs_of(row: Row, folder: Path | None) -> stored.Inputs:
    """What an estimate reads of a row's program, which is compiled."""
    mesh = AbstractMesh(tuple(row.axes.values()), tuple(row.axes))
    return stored.inputs_of(mylib.audit(program_of(row, folder), mesh=mesh, local=LOCAL))


def estimate(row: Row, inputs: stored.Inputs) -> Estimate:
    return estimate_of(*inputs, row.axes, row.machine)


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


def order(rows: Sequence[tuple[Row, stored.Inputs]]) -> None:
    """Strategies for one model on one machine, and the terms that decide between them."""
    columns = "strategy", "machine", "estimated s", "compute", "memory", "communication", "exposed"
    print_header("seconds of strategies", columns)
    for row, inputs in rows:
        found = estimate(row, inputs)
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


def table(rows: Sequence[tuple[Row, stored.Inputs]]) -> None:
    print_header("published steps and their estimates", COLUMNS)
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for row, inputs in rows:
        found = estimate(row, inputs)
        if row.judged:
            ratios[row.held_out].append(found.seconds / row.seconds)
        print_row(cells(row, found))
    print()
    summary("fit", ratios[False])
    summary("held out", ratios[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[""], help="rows with one of these in their name"
    )
    parser.add_argument("--order", action="store_true", help="strategies for one model instead")
    parser.add_argument("--compile", action="store_true", help="compiles the programs")
    parser.add_argument("--store", action="store_true", help="and stores what is read of them")
    parser.add_argument("--keep", type=Path, help="a folder of programs that were compiled")
    given = parser.parse_args()
    every = ORDER if given.order else ROWS
    rows = [row for row in every if any(part in row.name for part in given.only)]
    kept = stored.load()
    if given.compile or given.store:
        known = [(row, inputs_of(row, given.keep)) for row in rows]
    else:
        found = ((row, stored.read(row, kept)) for row in rows)
        known = [(row, inputs) for row, inputs in found if inputs is not None]
    if given.store:
        stored.write(known)
    (order if given.order else table)(known)
    if len(known) < len(rows):
        print(f"{len(rows) - len(known)} rows are not stored: --compile compiles them")


if __name__ == "__main__":
    main()
