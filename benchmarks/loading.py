"""Bytes read, and host memory, while a model is loaded onto 4 x 2 devices.

    python benchmarks/loading.py
    python benchmarks/loading.py --llama
    python benchmarks/loading.py --llama --whole
    python -m mylib.testing launch -n 2 --devices-per-process 4 benchmarks/loading.py --llama

Without `--llama`, it loads eight weights from one mapped file. With it, a Llama in bfloat16 from a
file of safetensors, by the code of docs/loading.md. The peer, `--whole`, reads each weight whole
and then places it. Each runs in a process of its own, since memory that was used once may stay
with the process. The devices are simulated, so the arrays themselves are in host memory, too: they
are subtracted. What is left is what loading needs besides, of which the pages of mapped files are
no part.
"""

import os

if "JAX_COORDINATOR_ADDRESS" not in os.environ:
    # Read when JAX starts, so they come before it is imported.
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("NPROC", "32")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import json
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import mylib
from mylib.rules import Rule, fsdp, replicated, tensor_parallel

PAGE = Path(__file__).resolve().parent.parent / "docs" / "loading.md"
WEIGHTS, SHAPE = 8, (4096, 8192)
# Of the Llama: vocabulary, width, hidden width, width of the keys, layers.
LLAMA = 32000, 2048, 5632, 256, 8
MIB = 2**20


class Stored(NamedTuple):
    """A model in a file. `read` returns the part of a leaf; the numbers of a leaf are all equal,
    and `number` returns what they are.
    """

    shapes: Any
    kept: Rule
    read: Callable[[mylib.Leaf, Any], np.ndarray]
    number: Callable[[mylib.Leaf], int]


def weights(folder: Path) -> Stored:
    path, shape = folder / "weights", (WEIGHTS, *SHAPE)
    file = np.memmap(path, np.float32, "w+", shape=shape)
    for i in range(WEIGHTS):
        file[i] = i
    file = np.memmap(path, np.float32, "r", shape=shape)

    def number(leaf: mylib.Leaf) -> int:
        return leaf.path[0].idx

    return Stored(
        [jax.ShapeDtypeStruct(SHAPE, jnp.float32) for _ in range(WEIGHTS)],
        fsdp(("data", "model")),
        lambda leaf, index: file[number(leaf)][index],
        number,
    )


def llama(folder: Path) -> Stored:
    """By the page's own classes and functions."""
    page: dict[str, Any] = {"json": json, "eqx": eqx, "jax": jax, "jnp": jnp, "np": np}
    for block in re.findall("```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        if block.startswith(("DTYPES", "class Layer", "def name_of")):
            exec(block, page)
    shapes = eqx.filter_eval_shape(page["Llama"], *LLAMA, jax.random.key(0))
    names: list[str] = []
    header, start = {}, 0
    for row in mylib.explain(shapes, replicated(), mylib.make_mesh(data=8)).rows:
        names.append(page["name_of"](row.leaf))
        end = start + row.leaf.size * row.leaf.dtype.itemsize
        about = {"dtype": "BF16", "shape": row.leaf.shape, "data_offsets": [start, end]}
        header[names[-1]], start = about, end
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for i, about in enumerate(header.values()):
            np.full(about["shape"], i, jnp.bfloat16).tofile(file)
    files = page["safetensors"](path)
    columns = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
    used = tensor_parallel("model", column=columns, row=["o_proj", "down_proj"]) | replicated()
    return Stored(
        shapes,
        used & fsdp("data"),
        lambda leaf, index: files[page["name_of"](leaf)][index],
        lambda leaf: names.index(page["name_of"](leaf)),
    )


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--llama", action="store_true", help="a Llama from safetensors")
    parser.add_argument("--whole", action="store_true", help="the peer: reads weights whole")
    options = parser.parse_args()
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        jax.distributed.initialize()
    mesh = mylib.make_mesh(data=4, model=2)
    with tempfile.TemporaryDirectory() as folder:
        stored = (llama if options.llama else weights)(Path(folder))
        rows = mylib.explain(stored.shapes, stored.kept, mesh).rows
        targets = jax.tree.leaves(mylib.resolve(stored.shapes, stored.kept, mesh=mesh))
        parts: list[int] = []

        def read(leaf: mylib.Leaf, index: Any) -> np.ndarray:
            part = stored.read(leaf, index)
            parts.append(part.nbytes)
            return part

        def in_parts() -> Any:
            return mylib.filter_load(stored.shapes, stored.kept, read, mesh=mesh)

        def whole() -> Any:
            return [
                mylib.filter_shard(np.array(read(row.leaf, ...)), target, check=False)
                for row, target in zip(rows, targets, strict=True)
            ]

        name, load = ("whole", whole) if options.whole else ("in parts", in_parts)
        loaded, more, seconds = peak_of(load)
        for row, x in zip(rows, jax.tree.leaves(loaded), strict=True):
            for shard in x.addressable_shards:
                assert np.all(np.asarray(shard.data) == stored.number(row.leaf)), row.leaf
        sizes = [row.leaf.size * row.leaf.dtype.itemsize for row in rows]
        print(
            f"process {jax.process_index()}, {name}: reads {sum(parts) / MIB:.0f} MiB of "
            f"{sum(sizes) / MIB:.0f}, needs {max(more, 0) / MIB:.0f} MiB besides the arrays (the "
            f"largest weight has {max(sizes) / MIB:.0f}, the largest part that was read "
            f"{max(parts) / MIB:.0f}), {seconds:.1f} s"
        )


if __name__ == "__main__":
    main()
