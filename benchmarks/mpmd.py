"""Pipelines over meshes that share no devices.

    python benchmarks/mpmd.py --schedules    what theory says of the schedules; nothing is run
    python benchmarks/mpmd.py --transfers    arrays from one process to another

"bubble" is the fraction of the time in which meshes are idle, by the formulas of the papers and by
`Schedule.bubble`; "with transfers" the same if a result takes a tenth of a forward pass to the next
mesh. A backward pass takes as long as two forward passes, and the gradients of the inputs and of
the weights half of it each. "activations" is the most that a mesh holds, in microbatches of a stage
as large as it is with one stage on each mesh.

Of transfers, ours and the peer take turns; times are those of the receiver, until it has the array.
`jax.device_put` can send between processes to the same number of devices with the same spec only,
and needs a flag. "a socket" copies the bytes of one array through a socket of Python, and puts them
on the devices; "through NumPy" is `multihost_utils.broadcast_one_to_all`, and then the same.
"""

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any

# What is started here must not take what is meant for this process.
os.environ.pop("XLA_FLAGS", None)

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from side_by_side import Row, print_header, print_row

import mylib
from mylib import mpmd

# Meshes and microbatches.
SIZES = [(2, 8), (4, 8), (4, 32), (8, 16), (8, 64)]
SEND = 0.1


# Bytes of an array, and turns.
TRANSFERS = [(4, 40), (2**16, 40), (2**20, 20), (2**24, 10), (2**26, 6)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", action="store_true", help="what theory says of them")
    parser.add_argument("--transfers", action="store_true", help="arrays between two processes")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows:
        rows = list(transfers())
        if jax.process_index() == 1:
            options.rows.write_text(json.dumps(rows))
        return
    if options.transfers:
        print_header("two processes with 4 simulated devices each")
        for row in in_processes():
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


def in_processes() -> list[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        here = ["--processes", "2", "--devices-per-process", "4"]
        launch = [sys.executable, "-m", "mylib.testing", "launch", *here]
        command = [*launch, __file__, "--rows", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())


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
        yield versus(f"{size:,} bytes, same spec", ours, raw, "device_put", x, same, turns, 1.1)
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
    times: dict[Any, list[float]] = {ours: [], peer: []}
    for turn in range(turns + 2):
        for call in (ours, peer) if turn % 2 else (peer, ours):
            mylib.testing.barrier()
            start = time.perf_counter()
            jax.block_until_ready(call(x, spec))
            if turn >= 2:
                times[call].append(time.perf_counter() - start)
    ratio = median(a / b for a, b in zip(times[ours], times[peer], strict=True))
    mine, theirs = (f"{1e3 * median(times[call]):.2f} ms" for call in (ours, peer))
    promise = "" if limit is None else f"<= {limit}"
    kept = None if limit is None else ratio <= limit
    return Row(work, mine, f"{theirs} {name}", ratio, promise, kept).cells()


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
