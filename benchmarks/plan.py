"""What `mylib.plan` chooses for training steps whose published strategies are known, and how its
prices compare with compiled programs.

    python benchmarks/plan.py                     published strategies, modelled: minutes
    python benchmarks/plan.py --kernels           published steps whose attention is a kernel
    python benchmarks/plan.py --only 7B           rows with this in their name
    python benchmarks/plan.py --prices            modelled bytes and memory, and compiled ones
    python benchmarks/plan.py --time              the time of pricing all strategies of a step
    python benchmarks/plan.py --compile           the time of a plan that compiles the best eight

Nothing is run, and no GPU or TPU is needed. Only `--prices` and `--compile` need compilers (`pip
install '.[gpu-compiler,tpu-compiler]'`).
"""

import argparse
import math
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from fsdp_llama import normalised
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Array, Float
from published import (
    HEADS,
    LLAMA2_7B,
    LLAMA2_70B,
    LLAMA3_8B,
    LLAMA3_70B,
    LLAMA3_405B,
    OF_500_WATTS,
    SCALED,
)
from residuals import turned
from side_by_side import print_header, print_row
from training_step import Size, on_gpu

import mylib
from mylib._core.compat import describe_cudnn
from mylib.machines import Machine, gpu

SMALL = Size(12, 768, 6, 6, 3072, vocab=50304)
QUERIES, WORDS = 128, 512


class Block(eqx.Module):
    norms: Float[Array, "two embed"]
    query: Float[Array, "embed heads"]
    keys: Float[Array, "two embed kv"]
    out: Float[Array, "heads embed"]
    # Without a gate there are two matrices, as in GPT-3.
    gate: Float[Array, "embed mlp"] | None
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]
    attend: Callable[..., jax.Array] = eqx.field(static=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = normalised(x) * self.norms[0]
        q, k, v = (
            (y @ w).reshape(*x.shape[:2], -1, HEADS)
            for w in (self.query, self.keys[0], self.keys[1])
        )
        x = x + self.attend(turned(q), turned(k), v).reshape(*x.shape[:2], -1) @ self.out
        return x + self.feed(normalised(x) * self.norms[1])

    def feed(self, y: jax.Array) -> jax.Array:
        if self.gate is None:
            return jax.nn.gelu(y @ self.up) @ self.down
        return (jax.nn.silu(y @ self.gate) * (y @ self.up)) @ self.down


class ExpertBlock(Block):
    """With a dimension of experts in front of `gate`, `up` and `down`. Each word takes two, and
    each expert at most 1.25 times its share of a sequence: the others are dropped.
    """

    choose: Float[Array, "embed experts"]

    def feed(self, y: jax.Array) -> jax.Array:
        count = self.choose.shape[1]
        room = int(1.25 * 2 * y.shape[1] / count)
        best, chosen = jax.lax.top_k((y @ self.choose).astype(jnp.float32), 2)
        takes = jax.nn.one_hot(chosen, count, dtype=jnp.float32)
        # Which of the words of its expert it is, where the best choices of all words come first.
        place = jnp.cumsum(takes, 1) + jnp.pad(jnp.sum(takes, 1, keepdims=True), _LATER)[:, :, :2]
        place = jnp.sum(takes * (place - 1), -1)
        taken = takes[..., None] * jax.nn.one_hot(place.astype(jnp.int32), room)[..., None, :]
        back = jnp.sum(taken * jax.nn.softmax(best)[..., None, None], 2).astype(y.dtype)
        x = jnp.einsum("btec,btd->becd", jnp.sum(taken, 2).astype(y.dtype), y)
        gate, up = (jnp.einsum("becd,edh->bech", x, w) for w in (self.gate, self.up))
        x = jnp.einsum("bech,ehd->becd", jax.nn.silu(gate) * up, self.down)
        return jnp.einsum("btec,becd->btd", back, x)


# The second choices count after all first ones.
_LATER = ((0, 0), (0, 0), (1, 0), (0, 0))


class Llama(eqx.Module):
    """Its layers are stacked, or in a list."""

    embed: Float[Array, "vocab embed"]
    blocks: Block | list[Block]
    unembed: Float[Array, "embed vocab"]

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The loss, in blocks of words."""
        x = self.embed[tokens]
        if isinstance(self.blocks, list):
            for block in self.blocks:
                x = block(x)
        else:
            x, _ = jax.lax.scan(lambda x, block: (block(x), None), x, self.blocks)
        x = normalised(x)

        def loss(_: jax.Array, x: jax.Array, words: jax.Array) -> jax.Array:
            logits = jax.nn.log_softmax((x @ self.unembed).astype(jnp.float32))
            return -jnp.mean(jnp.take_along_axis(logits, words[..., None], -1))

        return jnp.mean(in_blocks(loss, WORDS, x, jnp.roll(tokens, -1, 1)))


def in_blocks(f: Callable[..., jax.Array], size: int, *arrays: jax.Array) -> jax.Array:
    size = min(size, arrays[0].shape[1])

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    count = arrays[0].shape[1] // size
    run = jax.checkpoint(f)
    return jax.lax.map(lambda xs: run(*xs), (jnp.arange(count), *map(cut, arrays)))


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """In blocks of queries, of plain JAX."""
    rows, words, heads, size = q.shape
    kv = k.shape[2]

    def block(i: jax.Array, q: jax.Array) -> jax.Array:
        q = q.reshape(rows, -1, kv, heads // kv, size)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k).astype(jnp.float32) / size**0.5
        after = jnp.arange(words) > i * q.shape[1] + jnp.arange(q.shape[1])[:, None]
        weights = jax.nn.softmax(jnp.where(after, -jnp.inf, scores)).astype(q.dtype)
        return jnp.einsum("bkgts,bskd->btkgd", weights, v)

    return jnp.moveaxis(in_blocks(block, QUERIES, q), 0, 1).reshape(rows, words, heads, size)


def splashed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Splash attention, of as many rows and heads as there are."""
    time, heads = q.shape[1:3]
    blocks = splash.BlockSizes(*[min(time, 1024)] * 8)
    mask = splash.MultiHeadMask([splash.CausalMask((time, time))] * heads)
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=blocks)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q / HEADS**0.5, k, v))
    return jnp.swapaxes(jax.vmap(kernel)(q, k, v), 1, 2)


# Each device calls it for its rows and heads, which are read from the kernel's name.
on_tpu = mylib.opaque(splashed, like=splashed)


def model_of(
    size: Size, attend: Callable[..., jax.Array] = attention, gated: bool = True, experts: int = 0
) -> Llama:
    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    depth, width, hidden = size.depth, size.width, size.hidden
    heads, keys = size.heads * HEADS, size.kv_heads * HEADS
    stack = (depth, experts) if experts else (depth,)
    cls = partial(ExpertBlock, choose=array(depth, width, experts)) if experts else Block
    blocks = cls(
        norms=array(depth, 2, width),
        query=array(depth, width, heads),
        keys=array(depth, 2, width, keys),
        out=array(depth, heads, width),
        gate=array(*stack, width, hidden) if gated else None,
        up=array(*stack, width, hidden),
        down=array(*stack, hidden, width),
        attend=attend,
    )
    return Llama(array(size.vocab, width), blocks, array(width, size.vocab))


def in_a_list(model: Llama) -> Llama:
    assert isinstance(model.blocks, Block)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), model.blocks)
    return Llama(model.embed, [one] * model.blocks.query.shape[0], model.unembed)


OPTIM = optax.adamw(1e-3)


def step(batch: jax.Array, model: Llama, state: Any) -> Any:
    value, grads = eqx.filter_value_and_grad(lambda model: model(batch))(model)
    updates, state = OPTIM.update(grads, state, model)
    return eqx.apply_updates(model, updates), state, value


class Truth(NamedTuple):
    """A step, and its published strategy as the beginning of a plan's name."""

    name: str
    machine: str
    size: Size
    sequences: float
    time: int
    published: str
    # `estimate`'s constants were fitted to this row, or its strategy isn't published exactly.
    judged: bool = True


TRUTHS = (
    Truth("16B", "v5e 16x16", SCALED["16B"], 6, 2048, "FSDP 256", False),
    Truth("32B", "v5e 16x16", SCALED["32B"], 4, 2048, "FSDP 256"),
    Truth("64B", "v5e 16x16", SCALED["64B"], 2, 2048, "FSDP 256", False),
    Truth("128B", "v5e 16x16", SCALED["128B"], 1, 2048, "FSDP 16 x TP 16"),
    Truth("32B", "v5p 4x4x4", SCALED["32B"], 6, 2048, "FSDP 16 x TP 4", False),
    Truth("64B", "v5p 4x4x4", SCALED["64B"], 3, 2048, "FSDP 16 x TP 4"),
    Truth("128B", "v5p 4x4x8", SCALED["128B"], 1, 2048, "FSDP 16 x TP 8", False),
    Truth("70B, 512 a chip", "v5p 16x16x24", LLAMA3_70B, 1, 512, "FSDP 1536 x TP 4"),
    Truth("70B, 4096 a chip", "v5p 16x16x24", LLAMA3_70B, 1, 4096, "FSDP 6144"),
    *(
        Truth("7B", f"h100 x {8 * hosts}", LLAMA2_7B, 4, 4096,
              f"FSDP 8 x DP {hosts}" if hosts > 1 else "FSDP 8", hosts in (2, 8))
        for hosts in (1, 2, 8, 16)
    ),
    Truth("8B", "h100 x 8", LLAMA3_8B, 2, 8192, "FSDP 8", False),
    Truth("8B", "h100 x 128", LLAMA3_8B, 2, 8192, "FSDP 128"),
    Truth("70B", "h100 x 256", LLAMA3_70B, 1, 8192, "FSDP 32 x TP 8"),
    Truth("125M", "h100 x 8", SMALL, 16, 1024, "DP 8"),
    Truth("125M", "v5e 4x4", SMALL, 16, 1024, "DP 16"),
)  # fmt: skip


def arguments(truth: Truth, in_list: bool = False) -> tuple[Any, Llama, Any]:
    """With the layers stacked, or in a list."""
    machine = mylib.machines.Machine.of(truth.machine)
    batch = jax.ShapeDtypeStruct((int(truth.sequences * machine.count), truth.time), jnp.int32)
    model = model_of(truth.size)
    model = in_a_list(model) if in_list else model
    return batch, model, eqx.filter_eval_shape(OPTIM.init, model)


def planned(truth: Truth, *args: Any, **options: Any) -> mylib.Plan:
    given = {"machine": truth.machine, "layers": Block, "dtype": jnp.bfloat16, "compile": 0}
    return mylib.plan(step, *(args or arguments(truth)), **{**given, **options})


def truths(only: list[str]) -> None:
    columns = "step", "machine", "tokens a device", "chosen", "s", "GiB", "published", "its place"
    print_header("modelled plans and published strategies", (*columns, "times as long", "row"))
    for truth in TRUTHS:
        if not any(part in f"{truth.name} {truth.machine}" for part in only):
            continue
        start = time.monotonic()
        try:
            plan = planned(truth)
        except mylib.errors.PlanError as error:
            print_row([truth.name, truth.machine, str(error)])
            continue
        print_row([*cells(truth, plan), "judged" if truth.judged else "not judged",
                   f"{time.monotonic() - start:.1f} s"])  # fmt: skip


def cells(truth: Truth, plan: mylib.Plan) -> list[str]:
    ranked = [plan.chosen, *plan.others]
    shapes = [x.name.partition(",")[0] for x in ranked]
    if truth.published not in shapes:
        place, ratio = "-", plan.why_not(truth.published)
    else:
        i = shapes.index(truth.published)
        place = str(len(dict.fromkeys(shapes[: i + 1])))
        ratio = f"{ranked[i].seconds / ranked[0].seconds:.2f}"
    return [
        truth.name, truth.machine, str(int(truth.sequences * truth.time)), plan.chosen.name,
        f"{plan.chosen.seconds:.2f}", f"{plan.memory / 2**30:.1f}", truth.published, place, ratio,
    ]  # fmt: skip


class WithKernel(NamedTuple):
    """A step with attention by a kernel, its published seconds and a part of the name of its
    published strategy.
    """

    name: str
    machine: Machine
    size: Size
    sequences: float
    time: int
    seconds: float
    published: str
    gated: bool = True
    experts: int = 0

    def plan(self, **options: Any) -> mylib.Plan:
        is_tpu = self.machine.chip.platform == "tpu"
        if not is_tpu:
            describe_cudnn(91000, (9, 0))  # whose traces need a GPU otherwise
        model = model_of(self.size, on_tpu if is_tpu else on_gpu, self.gated, self.experts)
        batch = jax.ShapeDtypeStruct(
            (int(self.sequences * self.machine.count), self.time), jnp.int32
        )
        policies = ("full", "dots", "all") + ("offload_inputs", "offload") * is_tpu
        given = {"machine": self.machine, "dtype": jnp.bfloat16, "compile": 0, "policies": policies}
        return mylib.plan(
            step, batch, model, eqx.filter_eval_shape(OPTIM.init, model), layers=type(model.blocks),
            **{**given, **options},
        )  # fmt: skip


GPT3_175B = Size(96, 12288, 96, 96, 49152, vocab=50304)
MIXTRAL_8X7B = Size(32, 4096, 32, 8, 14336)
_V6E, _H100 = Machine.of("v6e 16x16"), partial(gpu, OF_500_WATTS)
# By AI-Hypercomputer/tpu-recipes and maxtext (maxtext_trillium_model_configs.py), which all use
# FSDP over 256, and TorchTitan. How 70B is split on 64 wasn't published with fewer rows than GPUs.
WITH_KERNELS = (
    WithKernel("Llama 2 70B", _V6E, LLAMA2_70B, 2, 4096, 9.05, "FSDP 256"),
    WithKernel("Mixtral 8x7B", _V6E, MIXTRAL_8X7B, 12, 4096, 13.48, "FSDP 256", experts=8),
    WithKernel("GPT-3 175B", _V6E, GPT3_175B, 3, 2048, 17.18, "FSDP 256", gated=False),
    WithKernel("405B", _H100(hosts=16), LLAMA3_405B, 0.25, 8192, 18.79, "FSDP 16 x TP 8"),
    WithKernel("70B, few rows", gpu("h100", hosts=8), LLAMA3_70B, 0.25, 65536, 0, "splits saved"),
)


def with_kernels(only: list[str]) -> None:
    columns = "step", "machine", "chosen", "s", "published s", "GiB", "of GiB", "published"
    print_header("modelled plans of steps with kernels", (*columns, "its s", "row"))
    for row in WITH_KERNELS:
        if not any(part in f"{row.name} {row.machine}" for part in only):
            continue
        start = time.monotonic()
        plan = row.plan()
        ranked = [plan.chosen, *plan.others]
        same = next((x for x in ranked if row.published in x.name), None)
        place = "-" if same is None else f"{same.seconds:.2f} ({ranked.index(same) + 1}. of all)"
        print_row([
            row.name, str(row.machine), plan.chosen.name, f"{plan.chosen.seconds:.2f}",
            f"{row.seconds:.2f}" if row.seconds else "-", f"{plan.memory / 2**30:.1f}",
            f"{(row.machine.memory or 0) / 2**30:.1f}", row.published, place,
            f"{time.monotonic() - start:.1f} s",
        ])  # fmt: skip


class Priced(NamedTuple):
    """A step, and the strategy whose price is compared."""

    step: Truth
    in_list: bool = False


def _few(machine: str, sequences: float, time: int, strategy: str) -> Truth:
    return Truth("7B, 4 layers", machine, LLAMA2_7B._replace(depth=4), sequences, time, strategy)


PRICED = (
    Priced(Truth("7B", "h100 x 64", LLAMA2_7B, 4, 4096, "FSDP 64")),
    Priced(Truth("7B", "h100 x 64", LLAMA2_7B, 4, 4096, "FSDP 8 x DP 8")),
    Priced(_few("h100 x 64", 4, 4096, "FSDP 32 x TP 2")),
    Priced(_few("h100 x 16", 1, 4096, "FSDP 16"), in_list=True),
    Priced(Truth("8B", "h100 x 8", LLAMA3_8B, 1, 8192, "FSDP 8")),
    Priced(Truth("70B", "h100 x 256", LLAMA3_70B, 1, 8192, "FSDP 32 x TP 8, splits saved")),
    Priced(Truth("125M", "v5e 4x4", SMALL, 16, 1024, "DP 16")),
    Priced(_few("v5e 4x4", 1, 2048, "FSDP 16")),
    Priced(_few("v5e 4x4", 1, 2048, "FSDP 16"), in_list=True),
    Priced(_few("v5e 4x4", 1, 2048, "FSDP 8 x TP 2")),
)


def prices(only: list[str]) -> None:
    """Modelled bytes and memory of one strategy, and those of the compiled program."""
    from mylib._planning.plan.candidates import priced
    from mylib._planning.plan.plan import plan_of
    from mylib._planning.plan.trace import PlannedStep, trace

    columns = "step", "machine", "strategy", "all-gather GiB", "compiled", "sums GiB", "compiled"
    print_header("modelled and compiled", (*columns, "memory GiB", "compiled", "compiled in s"))
    for truth, in_list in PRICED:
        title = f"{truth.name}, in a list" if in_list else truth.name
        if not any(part in f"{title} {truth.machine}" for part in only):
            continue
        args, machine = arguments(truth, in_list), mylib.machines.Machine.of(truth.machine)
        traced = trace(PlannedStep.of(step, args), "full", (Block,), jnp.bfloat16)
        found = priced(traced, machine, float("inf"))
        one = next(x for x in found if x.name == truth.published)
        plan = plan_of([one], [], machine, math.inf, False, jnp.bfloat16)
        start = time.monotonic()
        compiled = plan.jit(step).lower(*args).compile()
        took = time.monotonic() - start
        report = compiled.audit(mesh=plan.mesh)
        sums = "reduce-scatter", "all-reduce"
        modelled = [sum(n for k, n in one.price.sent.items() if k.startswith(kinds))
                    for kinds in ("all-gather", sums)]  # fmt: skip
        real = report.bytes("all-gather"), sum(map(report.bytes, sums))
        print_row([title, truth.machine, truth.published,
                   *(f"{n / 2**30:.2f}" for pair in zip(modelled, real, strict=True) for n in pair),
                   f"{one.price.memory / 2**30:.2f}", f"{report.memory.peak / 2**30:.2f}",
                   f"{took:.0f}"])  # fmt: skip


def by_title() -> dict[str, Truth]:
    return {f"{one.name}, {one.machine}": one for one in TRUTHS}


def times(only: list[str]) -> None:
    columns = "step", "machine", "strategies", "CPU seconds"
    print_header("planning, without compiling", columns)
    rows = by_title()
    for title, where in ("7B, h100 x 64", "scan"), ("70B, h100 x 256", "list"):
        if not any(part in f"{title}, {where}" for part in only):
            continue
        args = arguments(rows[title], in_list=where == "list")
        start = time.process_time()
        plan = planned(rows[title], *args)
        took = time.process_time() - start
        count = 1 + len(plan.others) + len(plan.rejected)
        print_row([f"{title}, {where}", str(plan.machine), str(count), f"{took:.1f}"])


def compiling(only: list[str]) -> None:
    columns = "step", "machine", "chosen", "compiled", "s", "CPU seconds"
    print_header("planning, with up to eight compiled in up to ten minutes", columns)
    rows = by_title()
    for title in "7B, h100 x 64", "16B, v5e 16x16":
        if not any(part in title for part in only):
            continue
        start, cpu = time.monotonic(), time.process_time()
        plan = planned(rows[title], compile=8)
        took = time.monotonic() - start, time.process_time() - cpu
        count = sum(x.compiled for x in (plan.chosen, *plan.others, *plan.rejected))
        print_row([rows[title].name, str(plan.machine), plan.chosen.name, str(count),
                   *(f"{x:.0f}" for x in took)])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="rows with one of these")
    parser.add_argument("--kernels", action="store_true", help="whose attention is a kernel")
    parser.add_argument("--prices", action="store_true", help="against compiled programs")
    parser.add_argument("--time", action="store_true", help="how long planning takes")
    parser.add_argument("--compile", action="store_true", help="how long it takes with compiling")
    given = parser.parse_args()
    chosen = [(given.time, times), (given.prices, prices), (given.compile, compiling),
              (given.kernels, with_kernels)]  # fmt: skip
    next((run for asked, run in chosen if asked), truths)(given.only)


if __name__ == "__main__":
    main()
