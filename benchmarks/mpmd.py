"""Pipelines over meshes that share no devices.

    python benchmarks/mpmd.py --schedules    what theory says of the schedules; nothing is run
    python benchmarks/mpmd.py --transfers    arrays from one process to another
    python benchmarks/mpmd.py --pipelines    the bubble of each schedule, in two and four processes

"bubble" is the fraction of the time in which meshes are idle, by the formulas of the papers and by
`Schedule.bubble`; "with transfers" the same if a result takes a tenth of a forward pass to the next
mesh. A backward pass takes as long as two forward passes, and the gradients of the inputs and of
the weights half of it each. "activations" is the most that a mesh holds, in microbatches of a stage
as large as it is with one stage on each mesh.

Of transfers, ours and the peer take turns; times are those of the receiver, until it has the array,
in its fastest turn: on a busy machine the others measure what else it does. So is their ratio.
`jax.device_put` can send between processes to the same number of devices with the same spec only,
and needs a flag. "a socket" copies the bytes of one array through a socket of Python, and puts them
on the devices; "through NumPy" is `multihost_utils.broadcast_one_to_all`, and then the same.

Of pipelines, every process has one device and one stage, which sleeps for 50 ms in each part of a
pass instead of computing: so it needs no core, and the time is the schedule's. What is measured is
the time of a step and its idle part, where a sleep takes what it takes in a process alone, all
processes at once; theory is that of the schedule, without transfers.
"""

import argparse
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

# What is started here must not take what is meant for this process.
os.environ.pop("XLA_FLAGS", None)

import equinox as eqx
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from side_by_side import Row, in_processes, print_header, print_row

import mylib
from mylib import mpmd

# Meshes and microbatches.
SIZES = [(2, 8), (4, 8), (4, 32), (8, 16), (8, 64)]
SEND = 0.1


# Bytes of an array, and turns.
TRANSFERS = [(4, 100), (2**16, 100), (2**20, 80), (2**24, 30), (2**26, 12)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", action="store_true", help="what theory says of them")
    parser.add_argument("--transfers", action="store_true", help="arrays between two processes")
    parser.add_argument("--pipelines", action="store_true", help="bubbles, measured")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows:
        rows = list(transfers() if options.transfers else pipelines())
        if jax.process_index() == 0:
            options.rows.write_text(json.dumps(rows))
        return
    if options.transfers:
        print_header("two processes with 4 simulated devices each")
        for row in in_processes(__file__, 2, 4, "--transfers"):
            print_row(row)
    if options.pipelines:
        columns = ("schedule", "step", "in theory", "bubble", "in theory", "must reach", "ok")
        print_header(f"a process for each mesh, {MICROBATCHES} microbatches", columns)
        for meshes in (2, 4):
            for row in in_processes(__file__, meshes, 1, "--pipelines"):
                print_row(row)
    if options.schedules:
        columns = (
            "schedule",
            "bubble in theory",
            "simulated",
            "with transfers",
            "activations",
            "ok",
        )
        print_header("simulated pipelines", columns)
        for row in schedules():
            print_row(row)


def transfers() -> Iterator[list[str]]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    # Read by `jax.device_put`; ours needs no flag.
    jax.config.update("jax_cross_host_transfer_socket_address", f"127.0.0.1:{port}")
    jax.distributed.initialize()
    wire = connected()
    first, second = (
        Mesh(
            np.array(jax.devices()).reshape(2, 2, 2)[i], ("a", "b"), axis_types=(AxisType.Auto,) * 2
        )
        for i in range(2)
    )
    here = NamedSharding(first, P("a", "b"))

    def raw(x: jax.Array, spec: P) -> jax.Array:
        return jax.device_put(x, NamedSharding(second, spec))

    def ours(x: jax.Array, spec: P) -> jax.Array:
        return mpmd.transfer(x, spec, mesh=second)

    def by_socket(x: jax.Array, spec: P) -> jax.Array | None:
        if jax.process_index() == 0:
            wire.sendall(np.asarray(x).data.cast("B"))
            return None
        memory = bytearray(x.nbytes)
        view, got = memoryview(memory), 0
        while got < len(memory):
            got += wire.recv_into(view[got:])
        return jax.device_put(np.frombuffer(memory, x.dtype).reshape(x.shape), _second(spec))

    def by_numpy(x: jax.Array, spec: P) -> jax.Array | None:
        value = np.asarray(x) if jax.process_index() == 0 else np.zeros(x.shape, x.dtype)
        value = multihost_utils.broadcast_one_to_all(value)
        return jax.device_put(value, _second(spec)) if jax.process_index() == 1 else None

    def _second(spec: P) -> NamedSharding:
        return NamedSharding(second, spec)

    for size, turns in TRANSFERS:
        rows = 1 if size == 4 else 4
        value = np.ones((rows, size // 4 // rows), np.float32)
        where = here if size > 4 else NamedSharding(first, P())
        x = mylib.filter_device_put(value, where)
        same, other = (P("a", "b"), P("b", "a")) if size > 4 else (P(), P())
        limit = 1.2 if size >= 2**20 else None
        yield versus(f"{size:,} bytes, same spec", ours, raw, "device_put", x, same, turns, limit)
        yield versus(f"{size:,} bytes, same spec", ours, by_socket, "a socket", x, same, turns)
        if size > 4:
            yield versus(
                f"{size:,} bytes, other spec", ours, by_numpy, "NumPy", x, other, turns, 0.5
            )


def versus(
    work: str,
    ours: Callable[..., Any],
    peer: Callable[..., Any],
    name: str,
    x: jax.Array,
    spec: P,
    turns: int,
    limit: float | None = None,
) -> list[str]:
    # The receiver's.
    times: dict[Any, list[float]] = {ours: [], peer: []}
    for turn in range(turns + 2):
        for call in (ours, peer) if turn % 2 else (peer, ours):
            mylib.testing.barrier()
            start = time.perf_counter()
            jax.block_until_ready(call(x, spec))
            if turn >= 2:
                times[call].append(mylib.testing.gather(time.perf_counter() - start)[1])
    ratio = min(times[ours]) / min(times[peer])
    mine, theirs = (f"{1e3 * min(times[call]):.2f} ms" for call in (ours, peer))
    promise = "" if limit is None else f"<= {limit}"
    kept = None if limit is None else ratio <= limit
    return Row(work, mine, f"{theirs} {name}", ratio, promise, kept).cells()


SLEEP, MICROBATCHES = 0.05, 8


def pipelines() -> Iterator[list[str]]:
    jax.distributed.initialize()
    p, m = jax.process_count(), MICROBATCHES
    # A pipeline of one stage is never idle, and has three sleeps a microbatch. What a sleep takes
    # there beyond 50 ms is the cost of a callback, and no idle time.
    alone = step_time(mpmd.gpipe(1, m), [Mesh(jax.local_devices(), ("data",))])
    a_sleep = float(np.mean(mylib.testing.gather(alone))) / (3 * m)
    meshes = mpmd.split(mylib.make_mesh(stage=p, data=1), "stage")
    for schedule in (
        mpmd.gpipe(p, m),
        mpmd.one_f_one_b(p, m),
        mpmd.interleaved(p, m, 2),
        mpmd.zero_bubble(p, m),
    ):
        yield pipeline(schedule, meshes, a_sleep)


def pipeline(schedule: mpmd.Schedule, meshes: Sequence[Mesh], a_sleep: float) -> list[str]:
    step = step_time(schedule, meshes)
    theory = a_sleep * max(end for row in schedule.timeline() for _, end, _ in row)
    busy = theory * (1 - schedule.bubble())
    bubble, limit = 1 - busy / step, 1.1 * schedule.bubble()
    return [
        f"{schedule.name}, {schedule.meshes} processes",
        f"{step:.2f} s",
        f"{theory:.2f} s",
        f"{bubble:.1%}",
        f"{schedule.bubble():.1%}",
        f"<= {limit:.1%}",
        "ok" if bubble <= limit else "MISSED",
    ]


def step_time(schedule: mpmd.Schedule, meshes: Sequence[Mesh]) -> float:
    count = schedule.meshes
    places = [NamedSharding(mesh, P()) for mesh in meshes]
    one = np.float32(1)
    stages = [
        Sleeper(mylib.filter_device_put(one, places[s % count])) for s in range(schedule.stages)
    ]
    first, last = (
        mylib.filter_device_put(np.ones((2 * MICROBATCHES, 8), np.float32), places[i])
        for i in (0, (schedule.stages - 1) % count)
    )
    pipe = mpmd.pipeline(stages, lambda x, y: ((x - y) ** 2).mean(), schedule=schedule)
    times = []
    for _ in range(6):
        mylib.testing.barrier()
        start = time.perf_counter()
        jax.block_until_ready(pipe(stages, first, last))
        mylib.testing.barrier()
        times.append(time.perf_counter() - start)
    return median(times[1:])


class Sleeper(eqx.Module):
    """A stage that sleeps once in a forward pass, and twice in a backward pass: for the gradient of
    its input, and for that of its weight.
    """

    weight: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return slow_product(x, self.weight)


@jax.custom_vjp
def slow_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return asleep(x) * weight


def _forward(x: jax.Array, weight: jax.Array) -> Any:
    return slow_product(x, weight), (x, weight)


def _backward(kept: tuple[jax.Array, jax.Array], ct: jax.Array) -> Any:
    x, weight = kept
    # The second follows from the first: two that are independent could sleep at the same time.
    ct = asleep(ct)
    return ct * weight, asleep(ct * x).sum()


slow_product.defvjp(_forward, _backward)


def asleep(x: jax.Array) -> jax.Array:
    def on_host(x: Any) -> Any:
        time.sleep(SLEEP)
        return x

    return jax.pure_callback(on_host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def connected() -> socket.socket:
    """A socket between the two processes."""
    if jax.process_index() == 0:
        server = socket.create_server(("127.0.0.1", 0))
        mylib.testing.gather(server.getsockname()[1])
        return server.accept()[0]
    port = mylib.testing.gather(0)[0]
    return socket.create_connection(("127.0.0.1", port))


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
