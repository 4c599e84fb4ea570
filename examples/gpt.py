"""Trains a small GPT, letter by letter, on twelve of Shakespeare's sonnets.

The model is created sharded, by FSDP and tensor parallelism, and computes in bfloat16 with weights
kept in float32. Half way through it is saved. A second run, on a mesh of another shape, restores
it and goes on; a third one trains on a single device. All have the same losses, which are drawn.

The eight devices are simulated on the CPU, so this runs anywhere: `python examples/gpt.py`. The
checkpoint is written by Orbax if it is installed (`pip install orbax-checkpoint`). With XLA's
compilers for GPUs and TPUs (`pip install '.[gpu-compiler,tpu-compiler]'`), `--audit` prints what a
step of a model of 1.2 billion parameters communicates on 8 H100s, and on a TPU pod.
"""

import os

# Read when JAX starts, so they come before it is imported. NPROC is the number of threads that the
# simulated devices share: JAX 0.10 needs as many as there are devices, however few the cores.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["NPROC"] = "32"
os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

import mylib
from mylib.machines import gpu, tpu
from mylib.rules import batch, by_axes, fsdp, replicated

try:
    import orbax.checkpoint as orbax
except ImportError:
    orbax = None


@dataclasses.dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    time: int
    vocab: int = 128  # ASCII
    rows: int = 8  # of a batch


SMALL = Size(layers=2, width=64, heads=4, time=64)
LARGE = Size(layers=24, width=2048, heads=16, time=1024, rows=256)
STEPS, SAVED = 40, 20


class Block(eqx.Module):
    """One layer. The annotations name the dimensions that rules may shard."""

    attend: Float[Array, "embed three heads size"]
    mix: Float[Array, "heads size embed"]
    up: Float[Array, "embed hidden"]
    down: Float[Array, "hidden embed"]

    def __init__(self, size: Size, key: PRNGKeyArray):
        keys = iter(jax.random.split(key, 4))
        width, heads = size.width, size.heads
        self.attend = normal(next(keys), width, 3, heads, width // heads, inputs=width)
        self.mix = normal(next(keys), heads, width // heads, width, inputs=width)
        self.up = normal(next(keys), width, 4 * width, inputs=width)
        self.down = normal(next(keys), 4 * width, width, inputs=4 * width)

    def __call__(self, x: Float[Array, "time embed"]) -> Float[Array, "time embed"]:
        queries, keys, values = jnp.einsum("te,eqhs->qths", normalised(x), self.attend)
        attended = jax.nn.dot_product_attention(queries, keys, values, is_causal=True)
        x = x + jnp.einsum("ths,hse->te", attended, self.mix)
        return x + jax.nn.gelu(normalised(x) @ self.up) @ self.down


class GPT(eqx.Module):
    embed: Float[Array, "vocab embed"]
    position: Float[Array, "time embed"]
    blocks: Block  # all of them, stacked
    unembed: Float[Array, "embed vocab"]

    def __init__(self, size: Size, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        self.embed = normal(keys[0], size.vocab, size.width, inputs=1)
        self.position = normal(keys[1], size.time, size.width, inputs=1)
        self.blocks = eqx.filter_vmap(lambda key: Block(size, key))(
            jax.random.split(keys[2], size.layers)
        )
        self.unembed = normal(keys[3], size.width, size.vocab, inputs=size.width)

    def __call__(self, letters: Int[Array, "time"]) -> Float[Array, "time vocab"]:  # noqa: F821
        x = self.embed[letters] + self.position
        x, _ = jax.lax.scan(lambda x, block: (block(x), None), x, self.blocks)
        return normalised(x) @ self.unembed


def normal(key: PRNGKeyArray, *shape: int, inputs: int) -> Array:
    return jax.random.normal(key, shape) / inputs**0.5


def normalised(x: Float[Array, "... embed"]) -> Float[Array, "... embed"]:
    size = jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True)
    return (x * jax.lax.rsqrt(size + 1e-6)).astype(x.dtype)


# Tensor parallelism: attention by its heads, the hidden layer by its width. Between two steps FSDP
# shards what is left over "data", and so are gradients and the optimiser's state.
USED = by_axes({"heads": "model", "hidden": "model"}) | replicated()
KEPT = USED & fsdp("data")

OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, eps=1e-5))


def training(size: Size, mesh: Mesh) -> tuple[Callable, Callable]:
    """Two functions: one makes the model and the optimiser's state, one is a compiled step."""

    def make(key: PRNGKeyArray) -> tuple[GPT, optax.OptState]:
        model = GPT(size, key)
        return model, OPTIMISER.init(model)

    def loss_fn(model: GPT, letters: Int[Array, "rows time+1"]) -> Float[Array, ""]:
        # When a block is called, it gathers its weights over "data", in bfloat16. The backward
        # pass gathers them and computes the block again; only its input is kept in between.
        model = mylib.fully_shard(model, Block, KEPT, USED, mesh=mesh, dtype=jnp.bfloat16)
        logits = jax.vmap(model)(letters[:, :-1]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, letters[:, 1:])
        return jnp.mean(losses)

    def step(letters: Int[Array, "rows time+1"], model: GPT, state: optax.OptState) -> PyTree:
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, letters)
        updates, state = OPTIMISER.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, loss

    compiled_step = mylib.filter_jit(
        step,
        in_shardings={"letters": batch("data")},
        out_shardings=(KEPT, KEPT, P()),
        donate="all-except-first",
        mesh=mesh,
    )
    return make, compiled_step


def batches(first: int) -> Iterator[Int[np.ndarray, "rows time+1"]]:
    """The batches of all steps from `first` on: a batch depends on the number of its step."""
    text = (Path(__file__).parent / "sonnets.txt").read_text(encoding="ascii")
    letters = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(letters, SMALL.time + 1)
    for number in range(first, STEPS):
        yield windows[np.random.default_rng(number).integers(len(windows), size=SMALL.rows)]


def train(name: str, mesh: Mesh, folder: Path, resume: bool = False) -> list[float]:
    """The losses of the steps: of all, or of those after the checkpoint in `folder`."""
    make, step = training(SMALL, mesh)
    first = SAVED if resume else 0
    if resume:
        shapes = eqx.filter_eval_shape(make, jax.random.key(0))
        model, state = restore(folder, mylib.filter_shard(shapes, KEPT, mesh=mesh))
    else:
        # Created where it is kept: each device creates its own part. To optimise a program that
        # runs once would take longer than to run it.
        options = {"xla_backend_optimization_level": 0}
        create = mylib.filter_jit(make, out_shardings=KEPT, mesh=mesh, compiler_options=options)
        model, state = create(jax.random.key(0))
    losses = []
    with mylib.data.prefetch(batches(first), batch("data"), mesh=mesh) as letters:
        for number, rows in enumerate(letters, first + 1):
            model, state, loss = step(rows, model, state)
            losses.append(float(loss))
            report_progress(name, number, losses[-1])
            if number == SAVED and not resume:
                save(folder, (model, state))
    return losses


def report_progress(name: str, number: int, loss: float) -> None:
    last = number == STEPS
    if last or sys.stdout.isatty():  # a file gets only the last line
        bar = "=" * number + " " * (STEPS - number)
        line = f"{name:<25} [{bar}] {number}/{STEPS}  loss {loss:.3f}"
        print(line, end="\n" if last else "\r", flush=True)


def save(folder: Path, tree: PyTree) -> None:
    if orbax is None:
        eqx.tree_serialise_leaves(folder / "checkpoint.eqx", tree)
        return
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", tree, force=True)


def restore(folder: Path, shapes: PyTree) -> PyTree:
    """Onto the shardings of `shapes`, which may be on another mesh than what was saved."""
    if orbax is None:
        return eqx.tree_deserialise_leaves(
            folder / "checkpoint.eqx",
            shapes,
            filter_spec=lambda file, x: mylib.filter_shard(np.load(file), x.sharding),
        )
    with orbax.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder / "checkpoint", shapes)


def curve(losses: list[float], marks: str, height: int = 12) -> str:
    """The losses as a drawing of one column for each step, which has the step's mark."""
    low, high = min(losses), max(losses)
    rows = [round((height - 1) * (high - loss) / (high - low)) for loss in losses]
    lines = [
        "".join(m if r == row else " " for r, m in zip(rows, marks, strict=True))
        for row in range(height)
    ]
    heads = [f"{high - row * (high - low) / (height - 1):6.2f} |" for row in range(height)]
    axis = " " * 7 + "+" + "-" * len(losses)
    return "\n".join([*(head + line for head, line in zip(heads, lines, strict=True)), axis])


def communication(size: Size, mesh: Mesh) -> mylib.results.Report:
    """What a step communicates. It is compiled from shapes: nothing is moved or run."""
    make, step = training(size, mesh)
    model, state = mylib.filter_shard(
        eqx.filter_eval_shape(make, jax.random.key(0)), KEPT, mesh=mesh
    )
    letters = jax.ShapeDtypeStruct((size.rows, size.time + 1), jnp.int32)
    letters = mylib.filter_shard(letters, batch("data"), mesh=mesh)
    return mylib.audit(step.lower(letters, model, state).compile())


def main() -> None:
    one = mylib.make_mesh(data=1, model=1, devices=jax.devices()[:1])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        losses = train("4 x 2 devices", mylib.make_mesh(data=4, model=2), folder)
        resumed = train("resumed on 2 x 4 devices", mylib.make_mesh(data=2, model=4), folder, True)
        reference = train("one device", one, folder)
    print(f"\n{curve(losses[:SAVED] + resumed, 'o' * SAVED + 'x' * (STEPS - SAVED))}")
    print("        loss of each step: o on 4 x 2 devices, x resumed on 2 x 4\n\nlargest difference")
    for what, run, other in [
        ("of the resumed run from that which went on", resumed, losses[SAVED:]),
        ("of eight devices from one", losses, reference),
    ]:
        np.testing.assert_allclose(run, other, rtol=0.02)
        print(f"  {what:<45} {np.max(np.abs(np.divide(run, other) - 1)):.2%}")
    if "--audit" in sys.argv:
        for machine, model in [(gpu("h100"), 2), (tpu("v5e", (16, 16)), 4)]:
            report = communication(LARGE, machine.mesh(data=-1, model=model))
            print(f"\n{machine}: {report.memory.fits(machine)}\n{report}")


if __name__ == "__main__":
    main()
