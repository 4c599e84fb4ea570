"""Bytes read, and host memory, while a model is loaded onto 4 x 2 devices.

    python benchmarks/loading.py
    python benchmarks/loading.py --whole
    python -m mylib.testing launch -n 2 --devices-per-process 4 benchmarks/loading.py

Its peer, `--whole`, reads each weight whole and then places it. Each runs in a process of its own,
since memory that was used once may stay with the process. The
devices are simulated, so the arrays themselves are in host memory, too: they are subtracted. What
is left is what loading needs besides, of which the pages of mapped files are no part.
"""

import os

if "JAX_COORDINATOR_ADDRESS" not in os.environ:
    # Read when JAX starts, so they come before it is imported.
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("NPROC", "32")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mylib
from mylib.rules import fsdp

WEIGHTS, SHAPE = 8, (4096, 8192)
MIB = 2**20


def memory() -> int:
    """The memory of this process that is not of files, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def peak_of(load: Callable[[], Any]) -> tuple[Any, int, float]:
    """What `load` returns, the memory that it needed besides, and its seconds."""
    before, highest, over = memory(), [0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            highest[0] = max(highest[0], memory())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    loaded = jax.block_until_ready(load())
    seconds = time.perf_counter() - start
    over.set()
    watcher.join()
    here = sum(s.data.nbytes for x in jax.tree.leaves(loaded) for s in x.addressable_shards)
    return loaded, highest[0] - before - here, seconds


def main() -> None:
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        jax.distributed.initialize()
    mesh = mylib.make_mesh(data=4, model=2)
    rule, read_bytes = fsdp(("data", "model")), [0]
    shapes = [jax.ShapeDtypeStruct(SHAPE, jnp.float32) for _ in range(WEIGHTS)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights"
        np.memmap(path, np.float32, "w+", shape=(WEIGHTS, *SHAPE))[:, ::512] = 1
        file = np.memmap(path, np.float32, "r", shape=(WEIGHTS, *SHAPE))

        def read(leaf: mylib.Leaf, index: tuple[slice, ...]) -> np.ndarray:
            part = file[leaf.path[0].idx][index]
            read_bytes[0] += part.nbytes
            return part

        def in_parts() -> Any:
            read_bytes[0] = 0
            return mylib.filter_load(shapes, rule, read, mesh=mesh)

        def whole() -> Any:
            read_bytes[0] = file.nbytes
            return [mylib.filter_shard(np.array(x), rule, mesh=mesh, check=False) for x in file]

        name, load = ("whole", whole) if "--whole" in sys.argv else ("in parts", in_parts)
        loaded, more, seconds = peak_of(load)
        assert float(loaded[0].addressable_shards[0].data[0, 0]) == 1
        print(
            f"process {jax.process_index()}, {name}: reads {read_bytes[0] / MIB:.0f} MiB of "
            f"{file.nbytes / MIB:.0f}, needs {max(more, 0) / MIB:.0f} MiB besides the arrays "
            f"(a weight has {file.nbytes / WEIGHTS / MIB:.0f}), {seconds:.1f} s"
        )


if __name__ == "__main__":
    main()
