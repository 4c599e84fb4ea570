"""What a real GPU does, beside what is said of it where there is none.

    python benchmarks/gpu.py                  each step, on the GPU that is here
    python benchmarks/gpu.py --only llama     steps with this in their name
    python benchmarks/gpu.py --pieces         the link to the host, weights in 8 bits, kernels

Each step is compiled here, where XLA's autotuner measures kernels, and in a process that has no
GPU; is saved, loaded and run. Each runs in a process of its own, so that the most memory it had in
use is known. One device: nothing is communicated.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

# What is imported below would else choose the CPU.
os.environ.setdefault("JAX_PLATFORMS", "cuda")

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from side_by_side import print_header, print_row
from training_step import Size, Work, by_xla, on_gpu, step_of

import mylib
from mylib._training.fsdp.quantised import Scales, quantised, restored

GIB = 2**30
STEPS = 20
OPTIM = optax.adamw(1e-4)


class Program(NamedTuple):
    """A step, jitted, and the abstract arrays that it takes."""

    jitted: Any
    arguments: tuple[Any, ...]


def llama(attention: Callable[..., jax.Array]) -> Callable[[Mesh], Program]:
    """630 million parameters."""
    size, work = Size(8, width=2048, heads=16, kv_heads=8, hidden=8192), Work(4, 2048)

    def program(mesh: Mesh) -> Program:
        step = step_of(size, work, mesh, attention)
        return Program(mylib.filter_jit(step.fun, donate=("model", "state")), step.arguments)

    return program


def of_model(make: Callable[[jax.Array], Any], *batch: int) -> Callable[[Mesh], Program]:
    """A step of a model in bfloat16, its weights in float32."""

    def step(model: Any, state: Any, x: jax.Array) -> Any:
        def loss(model: Any) -> jax.Array:
            half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), eqx.filter(model, eqx.is_array))
            called = eqx.combine(half, eqx.filter(model, eqx.is_array, inverse=True))
            return jnp.mean(jnp.square(jax.vmap(called)(x).astype(jnp.float32)))

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = OPTIM.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    def program(mesh: Mesh) -> Program:
        model = eqx.filter_eval_shape(make, jax.random.key(0))
        state = eqx.filter_eval_shape(lambda x: OPTIM.init(eqx.filter(x, eqx.is_array)), model)
        x = jax.ShapeDtypeStruct(batch, jnp.bfloat16)
        arguments = mylib.filter_shard((model, state, x), P(), mesh=mesh)
        return Program(mylib.filter_jit(step, donate=("model", "state")), arguments)

    return program


def convolutions(key: jax.Array) -> Any:
    keys = jax.random.split(key, 6)
    layers = [eqx.nn.Conv2d(256, 256, 3, padding=1, key=key) for key in keys]
    return eqx.nn.Sequential([y for x in layers for y in (x, eqx.nn.Lambda(jax.nn.relu))])


PROGRAMS = {
    "llama, cuDNN's attention": llama(on_gpu),
    "llama, attention by XLA": llama(by_xla),
    "MLP 4096 x 16384": of_model(lambda key: eqx.nn.MLP(4096, 4096, 16384, 3, key=key), 8192, 4096),
    "convolutions": of_model(convolutions, 256, 256, 32, 32),
}

Measures = dict[str, float]


def compile_elsewhere(name: str, chip: str, path: str, options: dict[str, Any]) -> Measures:
    """In a process without GPUs."""
    machine = mylib.machines.gpu(chip, devices_per_host=1)
    jitted, arguments = PROGRAMS[name](machine.mesh(data=-1))
    compiled = jitted.lower(*arguments).compile(options)
    estimate = compiled.audit().estimate(machine)
    with suppress(mylib.errors.SavedProgramError):  # it would fail on the GPU, or be slow
        compiled.save(path)
    low, high = estimate.interval
    memory = compiled.memory.peak
    return {"seconds": estimate.seconds, "low": low, "high": high, "memory": memory}


def run(name: str, path: str | None, save: str | None) -> Measures:
    """With a path, the program that is saved there; else it is compiled here."""
    jitted, arguments = PROGRAMS[name](mylib.machines.here().mesh(data=-1))
    if path is None:
        compiled = jitted.lower(*arguments).compile()
    else:
        compiled = mylib.load_compiled(path, jitted, *arguments)
    if save is not None:
        compiled.save(save)
    *kept, batch = filled(arguments)
    times, value = [], jnp.zeros(())
    for _ in range(STEPS):
        began = time.perf_counter()
        *kept, value = compiled(*kept, batch)
        jax.block_until_ready(value)
        times.append(time.perf_counter() - began)
    statistics = jax.local_devices()[0].memory_stats() or {}
    memory = statistics.get("peak_bytes_in_use", 0)
    return {"seconds": median(times[3:]), "memory": memory, "value": float(value)}


def filled(tree: Any) -> Any:
    """Numbers in place of abstract arrays."""

    def fill(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        number = 0.01 if jnp.issubdtype(x.dtype, jnp.floating) else 1
        return mylib.filter_shard(jnp.full(x.shape, number, x.dtype), x.sharding)

    return mylib.filter_jit(lambda: jax.tree.map(fill, tree))()


def in_process(*options: str, **variables: str) -> Measures | None:
    """None if it fails, or takes longer than a minute."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        command = [sys.executable, __file__, *options, "--write", file.name]
        ended = subprocess.run(
            ["timeout", "60", *command], env=os.environ | variables, capture_output=True, text=True
        )
        if ended.returncode:
            print("\n".join(ended.stderr.splitlines()[-3:]), file=sys.stderr)
            return None
        return json.load(file)


def pieces(chip: str) -> None:
    """Rates of the link to the host, and times of `send_dtype`, of `opaque` and of offloading."""
    mesh = mylib.machines.here().mesh(data=-1)
    sheet = mylib.machines.CHIPS[chip].host_bandwidth or 0.0
    here, host = (NamedSharding(mesh, P(), memory_kind=x) for x in ("device", "pinned_host"))
    x = jax.device_put(jnp.ones(2**28), here)
    for name, given, to in ("to the host", x, host), ("back", jax.device_put(x, host), here):
        rate = x.nbytes / seconds_of(jax.jit(lambda x: x, out_shardings=to), given)
        print(f"{name}: {rate / 1e9:.1f} GB/s, {rate / sheet:.2f} of the data sheet's")
    scales = Scales((4096, 4096), (1,), here, here)
    weights = jax.random.normal(jax.random.key(0), (48, 4096, 4096), jnp.bfloat16)
    for dtype in map(jnp.dtype, (jnp.float8_e4m3fn, jnp.int8)):
        send = jax.jit(jax.vmap(lambda w, dtype=dtype: quantised(w, scales, dtype)))
        use = jax.jit(jax.vmap(lambda x, scale: restored(x, scale, scales, jnp.bfloat16)))
        times = [seconds_of(send, weights), seconds_of(use, *send(weights))]
        both = [f"{1e6 * x / len(weights):.1f}" for x in times]
        print(f"4096 x 4096 bfloat16 as {dtype}: {both[0]} us to send, {both[1]} us to use")
    q = jax.random.normal(jax.random.key(0), (8, 1024, 16, 64), jnp.bfloat16)
    told = mylib.opaque(on_gpu, like=by_xla)
    for name, f in [("cuDNN's attention", on_gpu), ("the same in opaque", told)] * 2:
        gradient = jax.grad(lambda *qkv, f=f: jnp.sum(f(*qkv).astype(jnp.float32)), (0, 1, 2))
        both = [f"{1e6 * seconds_of(jax.jit(g), q, q, q):.0f}" for g in (f, gradient)]
        print(f"{name}, {q.shape}: {both[0]} us, with its gradient {both[1]} us")
    offloading()


def offloading() -> None:
    """A scan of 16 layers whose products are saved on the host, on the device, or not at all."""
    policies = jax.checkpoint_policies
    weights = jax.random.normal(jax.random.key(0), (16, 4096, 4096), jnp.bfloat16) / 64
    x = jax.random.normal(jax.random.key(1), (16384, 4096), jnp.bfloat16)
    for where, policy in {
        "on the host": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
        "on the device": policies.dots_with_no_batch_dims_saveable,
        "nowhere": None,
    }.items():

        @mylib.filter_checkpoint(policy=policy, prevent_cse=False)
        def layer(x: jax.Array, w: jax.Array) -> jax.Array:
            return x + jnp.sin(x @ w)

        def loss(weights: jax.Array, layer: Any = layer) -> jax.Array:
            y, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        compiled = jax.jit(jax.grad(loss)).lower(weights).compile()
        memory = compiled.memory_analysis()
        sizes = memory.temp_size_in_bytes / GIB, memory.host_temp_size_in_bytes / GIB
        print(
            f"products saved {where}: {1e3 * seconds_of(compiled, weights):.1f} ms, {sizes[0]:.2f} "
            f"GiB of temporaries, {sizes[1]:.2f} GiB on the host, "
            f"gradient {jnp.sum(compiled(weights)):.6g}"
        )


def seconds_of(call: Callable[..., Any], *arguments: Any) -> float:
    result, times = jax.block_until_ready(call(*arguments)), []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(STEPS):
            result = call(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - began) / STEPS)
    return median(times)


COLUMNS = (
    "step", "estimated s", "its interval", "measured s", "measured / estimated", "memory said GiB",
    "in use GiB", "saved by a process with a GPU", "without", "without, cuBLAS",
)  # fmt: skip


def table(only: list[str], chip: str) -> None:
    print_header(f"{chip} x 1; the last three are times as long as compiled here", COLUMNS)
    for name in (x for x in PROGRAMS if any(part in x for part in only)):
        with tempfile.TemporaryDirectory() as folder:
            print_row(row(name, chip, folder))


def row(name: str, chip: str, folder: str) -> list[str]:
    here, plain, cublas = (str(Path(folder, x)) for x in ("here", "plain", "cublas"))
    program = "--program", name
    elsewhere = {"JAX_PLATFORMS": "cpu"}
    said = in_process(*program, "--chip", chip, "--compile", plain, **elsewhere)
    in_process(*program, "--chip", chip, "--compile", cublas, "--cublas", **elsewhere)
    tuned = in_process(*program, "--save", here)
    assert said is not None and tuned is not None
    return [
        name,
        f"{said['seconds']:.4f}",
        f"{said['low']:.4f} to {said['high']:.4f}",
        f"{tuned['seconds']:.4f}",
        f"{tuned['seconds'] / said['seconds']:.2f}",
        f"{said['memory'] / GIB:.2f}",
        f"{tuned['memory'] / GIB:.2f}",
        *(loaded(name, path, tuned["seconds"]) for path in (here, plain, cublas)),
    ]


def loaded(name: str, path: str, seconds: float) -> str:
    """How many times as long as `seconds` a step of a saved program takes."""
    if not Path(path).exists():
        return "refused"
    found = in_process("--program", name, "--load", path)
    return "fails" if found is None else f"{found['seconds'] / seconds:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="steps with one of these")
    parser.add_argument("--chip", default="h100", help="the GPU that is here")
    parser.add_argument("--pieces", action="store_true", help="no steps")
    for name in "program", "compile", "load", "save":
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--cublas", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.pieces:
        return pieces(given.chip)
    if given.program is None:
        return table(given.only, given.chip)
    if given.compile is not None:
        options = {"xla_gpu_enable_triton_gemm": False} if given.cublas else {}
        found = compile_elsewhere(given.program, given.chip, given.compile, options)
    else:
        found = run(given.program, given.load, given.save)
    given.write.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
