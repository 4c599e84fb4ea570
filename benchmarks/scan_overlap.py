"""What options of XLA and `unroll=2` change for `mylib.fully_shard` of layers in a scan: temporary
memory, and the time that communication takes while nothing is computed.

    python benchmarks/scan_overlap.py h100
    python benchmarks/scan_overlap.py v5e --model transformer

The models of fsdp.py in a scan, kept in float32 and sent in bfloat16, compiled for 16 devices and
not run: the times are estimates from the schedule and the data sheet, `exposed` of
`mylib.audit(...).estimate()`.
"""

import argparse
from typing import Any

import fsdp
import jax
from side_by_side import print_header, print_row

import mylib

LIMIT = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}
PIPELINED = {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"}
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "default": (1, {}),
    "unroll=2": (2, {}),
    "up to 4 collectives at a time": (1, LIMIT),
    "gathers pipelined": (1, PIPELINED),
    "both": (1, LIMIT | PIPELINED),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", choices=fsdp.MACHINES)
    parser.add_argument("--model", choices=["mlp", "transformer"], default="mlp")
    given = parser.parse_args()
    machine = fsdp.MACHINES[given.machine]()
    mesh = machine.mesh(data=-1)
    case = fsdp.case_of(given.model, "scan", 2048, mesh.size, jax.numpy.float32)
    where = fsdp.kept(case, mesh, "rule")
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), case.model, where
    )
    print_header(
        f"{given.model} in a scan on {machine}", ["variant", "temporary MiB", "exposed ms"]
    )
    for name, (unroll, options) in VARIANTS.items():
        if options and given.machine != "h100":
            continue
        step = jax.jit(
            jax.value_and_grad(fsdp.ours(case, mesh, where)), out_shardings=(None, where)
        )
        fsdp.UNROLL = unroll
        program = step.lower(params, fsdp.data_of(case, mesh)).compile(options or None)
        estimate = mylib.audit(program, mesh=mesh, local=fsdp.LOCAL).estimate(machine)
        temporary = program.memory_analysis().temp_size_in_bytes / fsdp.MIB
        print_row([name, f"{temporary:.0f}", f"{estimate.exposed * 1e3:.1f}"])


if __name__ == "__main__":
    main()
