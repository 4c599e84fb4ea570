"""Pipelines over meshes that share no devices.

    python benchmarks/mpmd.py --schedules    what theory says of the schedules; nothing is run

"bubble" is the fraction of the time in which meshes are idle, by the formulas of the papers and by
`Schedule.bubble`; "with transfers" the same if a result takes a tenth of a forward pass to the next
mesh. A backward pass takes as long as two forward passes, and the gradients of the inputs and of
the weights half of it each. "activations" is the most that a mesh holds, in microbatches of a stage
as large as it is with one stage on each mesh.
"""

import argparse
import math
from collections.abc import Iterator
from fractions import Fraction

from side_by_side import print_header, print_row

from mylib import mpmd

# Meshes and microbatches.
SIZES = [(2, 8), (4, 8), (4, 32), (8, 16), (8, 64)]
SEND = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", action="store_true", required=True)
    parser.parse_args()
    columns = ("schedule", "bubble in theory", "simulated", "with transfers", "activations", "ok")
    print_header("simulated pipelines", columns)
    for row in schedules():
        print_row(row)


def schedules() -> Iterator[list[str]]:
    for meshes, microbatches in SIZES:
        p, m = meshes, microbatches
        fill = Fraction(p - 1, m + p - 1)
        yield row_of(mpmd.gpipe(p, m), fill)
        yield row_of(mpmd.one_f_one_b(p, m), fill)
        for v in (2, 4):
            yield row_of(mpmd.interleaved(p, m, v), Fraction(p - 1, v * m + p - 1))
        # Idle for (p - 1) * (F + B - W) beside m * (F + B + W), each of them 1.
        yield row_of(mpmd.zero_bubble(p, m), Fraction(p - 1, 3 * m + p - 1))


def row_of(schedule: mpmd.Schedule, theory: Fraction) -> list[str]:
    chunks = schedule.stages // schedule.meshes
    times = {"forward": 1 / chunks, "backward": (1 if schedule.splits_backward else 2) / chunks}
    simulated, sent = schedule.bubble(**times), schedule.bubble(**times, send=SEND)
    return [
        str(schedule).partition("\n")[0],
        f"{float(theory):.1%}",
        f"{simulated:.1%}",
        f"{sent:.1%}",
        f"{max(schedule.live()) / chunks:g}",
        "ok" if math.isclose(theory, simulated) else "MISSED",
    ]


if __name__ == "__main__":
    main()
