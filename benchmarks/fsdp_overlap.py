"""How much of the gathers of `mylib.fully_shard(prefetch=...)` is hidden, for layers in a list.

    python benchmarks/fsdp_overlap.py h100
    python benchmarks/fsdp_overlap.py h100 --at-once 4      up to four collectives at a time
    python benchmarks/fsdp_overlap.py v5e --models mlp --prefetch 0 1

The programs are those of fsdp.py: compiled for 16 devices, not run. A gather is hidden if other
work is scheduled while it runs. The last column counts bytes during a product only: of an MLP or a
transformer everything else is short.
"""

import argparse
import math
import re
from collections.abc import Iterator

import fsdp
import jax
from side_by_side import print_header, print_row

import mylib

_ARRAY = re.compile(r"\w+\[([\d,]+)\]")
_PRODUCT = re.compile(r"gemm|dot|cublas|convolution")
_CALLED = re.compile(r"calls=%?([\w.\-]+)")


def size_of(type_: str) -> int:
    return max((math.prod(map(int, dims.split(","))) for dims in _ARRAY.findall(type_)), default=0)


def gathers(text: str) -> Iterator[tuple[int, bool]]:
    """The elements of each gather, and whether it runs while a product is computed."""
    bodies = {}
    for part in re.split(r"\n(?=%|ENTRY)", text):
        named = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(", part)
        if named:
            bodies[named[1]] = part
    # XLA for TPUs repeats a gather in each fusion that runs in the meantime.
    repeated: dict[str, tuple[int, bool]] = {}
    for name, body in bodies.items():
        running: dict[str, tuple[int, bool]] = {}
        for line in body.splitlines():
            code = line.split("metadata=")[0]
            found = re.search(
                r"%?([\w.\-]+) = (.*?) (all-gather(?:-start|-done)?)\(%?([\w.\-]+)", code
            )
            if not found:
                if re.search(
                    r" (?:fusion|dot|custom-call|convolution)\(", code
                ) and _PRODUCT.search(code):
                    running = {key: (size, True) for key, (size, _) in running.items()}
            elif found[3] == "all-gather-start":
                running[found[1]] = size_of(found[2]), False
            elif found[3] == "all-gather-done":
                size, during = running.pop(found[4])
                yield size, during and '"is_sync":true' not in line
            else:
                channel = re.search(r"channel_id=(\d+)", code)
                key = channel[1] if channel else found[1]
                during = "async_collective_fusion" in name and multiplies(bodies, name)
                before = repeated.get(key, (0, False))[1]
                repeated[key] = size_of(found[2]), before or during
    yield from repeated.values()


def multiplies(bodies: dict[str, str], name: str) -> bool:
    body = bodies.get(name, "")
    return " convolution(" in body or any(multiplies(bodies, x) for x in _CALLED.findall(body))


def row(model: str, prefetch: int, machine: str, at_once: int) -> list[str]:
    mesh = fsdp.MACHINES[machine]().mesh(data=-1)
    case = fsdp.case_of(model, "list", 2048, mesh.size)
    where = fsdp.kept(case, mesh, "rule")
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), case.model, where
    )
    loss = fsdp.ours(case, mesh, where, prefetch=prefetch)
    step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, where))
    options = {"xla_gpu_experimental_parallel_collective_overlap_limit": at_once}
    lowered = step.lower(params, fsdp.data_of(case, mesh))
    program = lowered.compile(options if machine == "h100" else None)
    report = mylib.audit(program, mesh=mesh, local=fsdp.LOCAL)
    large = [c for c in report.collectives if c.kind == "all-gather" and c.bytes >= fsdp.MIB]
    found = list(gathers(program.as_text()))
    share = sum(size for size, during in found if during) / sum(size for size, _ in found)
    return [
        model,
        str(prefetch),
        f"{program.memory_analysis().temp_size_in_bytes / fsdp.MIB:.0f}",
        f"{report.wire_bytes() / fsdp.MIB:.0f}",
        f"{sum(c.overlapped for c in large)} of {len(large)}",
        f"{share:.0%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", choices=fsdp.MACHINES)
    parser.add_argument("--models", choices=fsdp.SIZES, nargs="+", default=["mlp", "transformer"])
    parser.add_argument("--prefetch", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=1, help="collectives at a time, on GPUs")
    given = parser.parse_args()
    columns = ["model", "prefetch", "temporary MiB", "received MiB", "gathers hidden"]
    columns += ["of all gathered bytes, hidden by products"]
    print_header(f"layers in a list on {given.machine}, {given.at_once} at a time", columns)
    for model in given.models:
        for prefetch in given.prefetch:
            print_row(row(model, prefetch, given.machine, given.at_once))


if __name__ == "__main__":
    main()
