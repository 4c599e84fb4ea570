"""What a step costs in a team of `mylib.elastic`, beside the same step without.

    python benchmarks/elastic.py            about two minutes on two cores
    python benchmarks/elastic.py --quick    fewer turns, for a rough look

Two processes of two simulated devices. In each turn every loop makes ten steps, in the same
processes, and a ratio is the median over the turns of a loop's time by that of the loop without a
team. In brackets: between which ratios the median is, with 95 % confidence; other work on the
machine makes this range wide, and the CPU time of a process tells more then. All loops wait for
each step, as one does that reads its loss, and read the same rows.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import mylib

# The size of the weights, and the rows of a batch: a step takes some 50 ms on two cores.
SIZE, ROWS = 512, 512
# Of each loop in a turn. With every=10 the state is kept once.
STEPS = 10
PROMISED = 1.03


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def loss_of(w: jax.Array) -> jax.Array:
        y = x
        for _ in range(4):
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    loss, slope = jax.value_and_grad(loss_of)(w)
    return w - 0.1 * slope, loss


def loops(steps: int) -> dict[str, Iterator[float]]:
    """The loops by name. Each takes its next step when it is asked for the next loss."""
    team = mylib.elastic.Team(data=2)
    data = np.random.default_rng(0).normal(size=(ROWS, SIZE)).astype(np.float32)
    weights = np.random.default_rng(1).normal(size=(SIZE, SIZE)).astype(np.float32) / SIZE
    first = mylib.filter_shard(weights, P("data"), mesh=team.mesh)
    compiled = mylib.filter_jit(step, out_shardings=(P("data"), P()))
    place = NamedSharding(team.mesh, P(("replica", "data")))

    def without() -> Iterator[float]:
        w = first
        for _ in range(steps):
            with jax.set_mesh(team.mesh):
                x = jax.make_array_from_callback(data.shape, place, lambda index: data[index])
                w, loss = compiled(w, x)
            yield float(loss)

    def inside(every: int) -> Iterator[float]:
        made = team.steps(
            compiled, first, lambda n, rows: data[rows], rows=ROWS, stop=steps, every=every
        )
        return (float(loss) for _, _, loss in made)

    return {"without a team": without(), "every=1": inside(1), "every=10": inside(10)}


def middle(ratios: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the bounds of its 95 % confidence interval."""
    ordered, n = sorted(ratios), len(ratios)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return statistics.median(ordered), ordered[low], ordered[n - 1 - low]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    options = parser.parse_args()
    if "SLURM_NTASKS" not in os.environ:
        launch = [sys.executable, "-m", "mylib.testing", "launch", "-n", "2"]
        launch += ["--devices-per-process", "2", *sys.argv]
        done = subprocess.run(launch, stdout=subprocess.PIPE, text=True)
        _, _, table = done.stdout.partition("[0] | a step")  # libraries print lines of their own
        print("| a step" + table.replace("[0] ", "").rstrip())
        sys.exit(done.returncode)
    mylib.elastic.initialize()
    turns = 8 if options.quick else 60
    running = loops(STEPS * (turns + 1))
    wall: dict[str, list[float]] = {name: [] for name in running}
    cpu: dict[str, list[float]] = {name: [] for name in running}
    for turn in range(turns + 1):
        # Each loop follows each other one equally often.
        names = list(running) if turn % 2 else [*reversed(running)]
        for name in names:
            begun, used = time.perf_counter(), time.process_time()
            for _ in range(STEPS):
                next(running[name])
            if turn:  # the first one compiles
                wall[name].append((time.perf_counter() - begun) / STEPS)
                cpu[name].append((time.process_time() - used) / STEPS)
    if jax.process_index() == 0:
        show(wall, cpu)


def show(wall: dict[str, list[float]], cpu: dict[str, list[float]]) -> None:
    print("| a step | time | ratio | CPU time of a process | ratio |\n|---|---|---|---|---|")
    plain = next(iter(wall))
    for name in wall:
        cells = [name]
        for times in (wall, cpu):
            cells.append(f"{1000 * statistics.median(times[name]):.2f} ms")
            ratios = [a / b for a, b in zip(times[name], times[plain], strict=True)]
            ratio, low, high = middle(ratios)
            cells.append("" if name == plain else f"{ratio:.3f} ({low:.3f} to {high:.3f})")
        print(f"| {' | '.join(cells)} |")
    ratios = [a / b for a, b in zip(wall["every=10"], wall[plain], strict=True)]
    ratio, low, high = middle(ratios)
    verdict = "kept" if ratio <= PROMISED else "MISSED"
    unsure = "" if high <= PROMISED or low > PROMISED else ", but chance may have decided"
    print(f"\nPromised with every=10: {PROMISED} times. {verdict}{unsure}.")


if __name__ == "__main__":
    main()
