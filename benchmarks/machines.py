"""What it costs to compile a training step for machines that are not here, beside the CPU's
compiler with as many simulated devices.

    python benchmarks/machines.py            every row, about half an hour
    python benchmarks/machines.py --quick    4 layers in a scan, at most 64 devices
    python benchmarks/machines.py --machines "h100 x 1024" --only "4 layers"

Nothing is run, and no GPU or TPU is needed (`pip install '.[gpu-compiler,tpu-compiler]'`).
Times are of a process's own CPU, all threads together: the machine may do other work. Each machine
has a process of its own, which has compiled something small before.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import fsdp
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec as P
from side_by_side import print_header, print_row

import mylib
from mylib import machines

TOKENS = 4 * fsdp.TIME  # a device
MACHINES = ["h100 x 8", "h100 x 64", "h100 x 1024", "v5e 4x4", "v5e 16x16"]
QUICK = MACHINES[:2] + MACHINES[3:4]


class Model(NamedTuple):
    depth: int
    layers: str  # "list" or "scan"

    def __str__(self) -> str:
        return f"{self.depth} layers in a {self.layers}"


MODELS = [Model(depth, layers) for layers in ("scan", "list") for depth in (4, 48)]


def step_of(model: Model, mesh: Mesh) -> tuple[Any, tuple[Any, ...]]:
    """A training step of a transformer with AdamW under `fully_shard`, and its arguments."""
    case = fsdp.case_of("transformer", model.layers, TOKENS, mesh.size, depth=model.depth)
    where = fsdp.kept(case, mesh, "rule")
    loss = fsdp.ours(case, mesh, where)
    optimiser = optax.adamw(1e-3)

    def step(params: Any, state: Any, data: jax.Array) -> tuple[Any, Any]:
        gradients = jax.grad(loss)(params, data)
        updates, state = optimiser.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params = mylib.filter_shard(case.model, where)
    state = eqx.filter_eval_shape(optimiser.init, params)
    rule = mylib.rules.fsdp("data", min_size=2 * fsdp.SIZES["transformer"].width + 1)
    state = mylib.filter_shard(state, rule, mesh=mesh)
    jitted = mylib.filter_jit(
        step, donate="all", out_shardings=(where, mylib.resolve(state, rule, mesh=mesh))
    )
    return jitted, (params, state, fsdp.data_of(case, mesh))


def seconds(model: Model, mesh: Mesh) -> tuple[float, float]:
    """What tracing and lowering take, and what the compiler takes."""
    step, args = step_of(model, mesh)
    jax.clear_caches()
    start = time.process_time()
    lowered = step.lower(*args)
    between = time.process_time()
    lowered.compile()
    return between - start, time.process_time() - between


def mesh_of(name: str) -> Mesh:
    if name.startswith("cpu"):
        return mylib.make_mesh(data=-1)
    return machines.Machine.of(name).mesh(data=-1)


def compile_all(name: str, models: list[Model]) -> None:
    """What the process of one machine does: a line for each model."""
    mesh = mesh_of(name)
    x = mylib.filter_shard(jax.ShapeDtypeStruct((mesh.size, 8), jnp.float32), P("data"), mesh=mesh)
    mylib.filter_jit(lambda x: x.sum()).lower(x).compile()
    for model in models:
        print(json.dumps(seconds(model, mesh)), flush=True)


def measure(name: str, count: int, models: list[Model]) -> Iterator[tuple[float, float] | None]:
    """The times of each model, from a new process; None from where the process ended."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(count)}
    if not name.startswith("cpu"):
        del environment["JAX_NUM_CPU_DEVICES"]
    command = [sys.executable, __file__, "--one", name, json.dumps(models)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        for _ in models:
            line = next(lines, "")
            yield tuple(json.loads(line)) if line else None


def table(names: list[str], models: list[Model]) -> dict[tuple[str, Model], float]:
    columns = ["machine", "model", "lower, s", "compile, s", "CPU's compiler, s", "ratio"]
    print_header("seconds of CPU time, and the compilers' ratio", columns)
    took: dict[tuple[str, Model], float] = {}
    for name in names:
        count = machines.Machine.of(name).count
        # One process after the other.
        ours = list(measure(name, count, models))
        cpus = list(measure(f"cpu x {count}", count, models))
        for model, there, here in zip(models, ours, cpus, strict=True):
            if there is not None:
                took[name, model] = there[1]
            ratio = f"{there[1] / here[1]:.2f}" if there and here else "-"
            lower, compiling = (f"{x:.1f}" for x in there) if there else ("-", "-")
            print_row(
                [name, str(model), lower, compiling, f"{here[1]:.1f}" if here else "-", ratio]
            )
    return took


def growth(took: dict[tuple[str, Model], float], names: list[str], models: list[Model]) -> None:
    """How the time grows with the devices of one kind, and with the layers."""
    print()
    print_row(["growth", "model or machine", "ratio", "must be", "ok"])
    print_row(["---"] * 5)
    for first, last in [("h100 x 8", n) for n in names if n.startswith("h100") and n != names[0]]:
        for model in models:
            if (first, model) in took and (last, model) in took:
                ratio = took[last, model] / took[first, model]
                print_row(
                    [f"{first} to {last}", str(model), f"{ratio:.2f}", "< 2", said(ratio < 2)]
                )
    for name in names:
        for layers in ("scan", "list"):
            pair = [took.get((name, Model(depth, layers))) for depth in (4, 48)]
            if pair[0] and pair[1]:
                print_row(
                    [f"4 to 48 layers in a {layers}", name, f"{pair[1] / pair[0]:.2f}", "", ""]
                )


def said(kept: bool) -> str:
    return "ok" if kept else "MISSED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="4 layers in a scan, at most 64 devices"
    )
    parser.add_argument("--machines", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--only", default="", help="models with this in their name")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        compile_all(given.one[0], [Model(*x) for x in json.loads(given.one[1])])
        return
    names = given.machines or (QUICK if given.quick else MACHINES)
    only = "4 layers in a scan" if given.quick else given.only
    models = [x for x in MODELS if only in str(x)]
    growth(table(names, models), names, models)


if __name__ == "__main__":
    main()
