"""A training step of a model like Llama, as published steps were run: flash attention, AdamW with
clipping, weights in f32 that are sent and multiplied in bf16, and a policy of rematerialisation.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from fsdp_llama import normalised
from jax.ad_checkpoint import checkpoint_name as named
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh, PartitionSpec as P
from jaxtyping import Array, Float
from residuals import HEAD, turned

import mylib
from mylib._core.compat import cudnn_as_described
from mylib.rules import by_axes, fsdp, replicated

QUERIES = "query_proj", "key_proj", "value_proj", "out_proj"
DOTS = *QUERIES, "mlpwi_0", "mlpwi_1", "mlpwo"


class Size(NamedTuple):
    depth: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 32000


class Work(NamedTuple):
    """What a device does in a step. `saved` and `offloaded` are what is kept of a layer for the
    backward pass, beside its input.
    """

    sequences: float
    time: int
    saved: Collection[str] = ()
    offloaded: Collection[str] = ()
    scan: bool = True
    looked_up: bool = False  # the embedding; else a product with a one-hot matrix
    loss_blocks: int = 1


class Block(eqx.Module):
    norms: Float[Array, "two embed"]
    query: Float[Array, "embed heads"]
    key: Float[Array, "embed heads"]
    value: Float[Array, "embed heads"]
    out: Float[Array, "heads embed"]
    gate: Float[Array, "embed mlp"]
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]
    attention: Callable[..., jax.Array] = eqx.field(static=True)
    # With tensor parallelism, activations are split over time between its parts, and over what they
    # are multiplied by inside of them.
    split: Callable[[jax.Array], jax.Array] = eqx.field(static=True)
    whole: Callable[[jax.Array], jax.Array] = eqx.field(static=True)
    parts: Callable[[jax.Array], jax.Array] = eqx.field(static=True)

    def __call__(self, x: Float[Array, "batch time embed"]) -> jax.Array:
        x = named(x, "decoder_layer_input")
        y = normalised(x) * self.norms[0]
        q, k, v = (
            named(self.parts(y @ w), name).reshape(*x.shape[:2], -1, HEAD)
            for name, w in zip(QUERIES, (self.query, self.key, self.value), strict=False)
        )
        y = self.parts(self.attention(turned(q), turned(k), v).reshape(*x.shape[:2], -1))
        x = x + named(self.split(y @ self.out), "out_proj")
        y = self.whole(normalised(x) * self.norms[1])
        gate = named(self.parts(y @ self.gate), "mlpwi_0")
        y = jax.nn.silu(gate) * named(self.parts(y @ self.up), "mlpwi_1")
        return x + named(self.split(self.parts(y) @ self.down), "mlpwo")


class Llama(eqx.Module):
    embed: Float[Array, "vocab embed"]
    blocks: Any
    norm: Float[Array, " embed"]
    unembed: Float[Array, "embed vocab"]


def by_xla(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def on_gpu(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def on_tpu(mesh: Mesh, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    time, block = q.shape[1], min(q.shape[1], 1024)
    tensor = "tensor" if "tensor" in mesh.shape else None
    heads = q.shape[2] // mesh.shape.get("tensor", 1)
    blocks = splash.BlockSizes(*[block] * 8)
    spec = P(batch_of(mesh), None, tensor)

    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        mask = splash.MultiHeadMask([splash.CausalMask((time, time))] * heads)
        kernel = splash.make_splash_mha_single_device(
            mask, block_sizes=blocks, residual_checkpoint_name="context"
        )
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q / HEAD**0.5, k, v))
        return jnp.swapaxes(jax.vmap(kernel)(q, k, v), 1, 2)

    return attend(q, k, v)


@contextmanager
def stated_costs() -> Iterator[None]:
    """JAX's splash attention states no cost, which Pallas kernels may: two products forward, four
    for the gradient of keys and values, three for that of queries; half of each, as it is causal.
    """
    plain = pl.pallas_call

    def stated(kernel: Any, **options: Any) -> Any:
        name = options.get("name") or ""
        count = next((n for part, n in (("fwd", 2), ("dkv", 4), ("dq", 3)) if part in name), 0)

        def call(*args: Any) -> Any:
            arrays = [x for x in args if x is not None and x.ndim == 3 and x.shape[-1] == HEAD]
            heads, time = arrays[0].shape[:2]
            cost = pl.CostEstimate(
                flops=count * heads * time * arrays[1].shape[1] * HEAD,
                transcendentals=heads * time**2 // 2,
                bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
            )
            return plain(kernel, **options, cost_estimate=cost)(*args)

        return call if name.startswith("splash") else plain(kernel, **options)

    with mock.patch.object(pl, "pallas_call", stated):
        yield


def batch_of(mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name in ("data", "fsdp") if name in mesh.shape)


def loss_of(model: Llama, tokens: jax.Array, work: Work) -> jax.Array:
    vocab = model.embed.shape[0]
    x = model.embed[tokens] if work.looked_up else (
        jax.nn.one_hot(tokens, vocab, dtype=model.embed.dtype) @ model.embed
    )  # fmt: skip
    if work.scan:
        x, _ = jax.lax.scan(lambda x, block: (block(x), None), x, model.blocks)
    else:
        for block in model.blocks:
            x = block(x)
    x, words = normalised(x) * model.norm, jnp.roll(tokens, -1, 1)

    def part(of: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, words = of
        logits = (x @ model.unembed).astype(jnp.float32)
        right = jnp.take_along_axis(logits, words[..., None], -1)[..., 0]
        return jnp.sum(jax.nn.logsumexp(logits, -1) - right)

    if work.loss_blocks == 1:
        return part((x, words)) / tokens.size
    cut = [jnp.moveaxis(y.reshape(y.shape[0], work.loss_blocks, -1, *y.shape[2:]), 1, 0)
           for y in (x, words)]  # fmt: skip
    saved = jax.checkpoint_policies.dots_saveable
    return jnp.sum(jax.lax.map(jax.checkpoint(part, policy=saved), tuple(cut))) / tokens.size


def policy_of(work: Work) -> Any:
    names = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(work.saved),
        names_which_can_be_offloaded=list(work.offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def policy(primitive: Any, *args: Any, **params: Any) -> Any:
        # What cuDNN's attention returns for its gradient has no name.
        of_cudnn = primitive.name == "dot_product_attention_fwd_wrapper"
        return ("context" in work.saved and of_cudnn) or names(primitive, *args, **params)

    return policy


def model_of(size: Size, work: Work, mesh: Mesh, attention: Callable[..., jax.Array]) -> Llama:
    stack = (size.depth,) if work.scan else ()

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def placed(spec: P) -> Callable[[jax.Array], jax.Array]:
        if "tensor" not in mesh.shape:
            return lambda x: x
        return lambda x: mylib.filter_shard(x, spec, mesh=mesh)

    width, hidden, keys = size.width, size.hidden, size.kv_heads * HEAD
    block = Block(
        norms=array(*stack, 2, width),
        query=array(*stack, width, size.heads * HEAD),
        key=array(*stack, width, keys),
        value=array(*stack, width, keys),
        out=array(*stack, size.heads * HEAD, width),
        gate=array(*stack, width, hidden),
        up=array(*stack, width, hidden),
        down=array(*stack, hidden, width),
        attention=attention,
        split=placed(P(batch_of(mesh), "tensor")),
        whole=placed(P(batch_of(mesh))),
        parts=placed(P(batch_of(mesh), None, "tensor")),
    )
    blocks = block if work.scan else [block] * size.depth
    return Llama(array(size.vocab, width), blocks, array(width), array(width, size.vocab))


class Step(NamedTuple):
    """A training step, for `jax.jit` with these options, and what it takes."""

    fun: Callable[..., Any]
    arguments: tuple[Any, ...]
    out_shardings: Any


def step_of(size: Size, work: Work, mesh: Mesh, attention: Callable[..., jax.Array]) -> Step:
    batch = batch_of(mesh)
    axes = {name: "tensor" for name in ("heads", "mlp", "vocab") if "tensor" in mesh.shape}
    used = by_axes(axes) | replicated() if axes else replicated()
    rule = fsdp("fsdp", min_size=2**14) if "fsdp" in mesh.shape else replicated()
    kept = by_axes(axes) & rule if axes else rule
    optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    options = {"mesh": mesh, "dtype": jnp.bfloat16, "policy": policy_of(work)}
    options["saved"] = P(batch, "tensor") if axes else None

    def step(model: Llama, state: Any, tokens: jax.Array) -> Any:
        def loss(model: Llama) -> jax.Array:
            return loss_of(mylib.fully_shard(model, Block, kept, used, **options), tokens, work)

        value, grads = jax.value_and_grad(loss)(model)
        updates, state = optimiser.update(grads, state, model)
        return optax.apply_updates(model, updates), state, value

    model = model_of(size, work, mesh, attention)
    given = mylib.filter_shard((model, jax.eval_shape(optimiser.init, model)), kept, mesh=mesh)
    count = round(mesh.size * work.sequences)
    tokens = jax.ShapeDtypeStruct((count, work.time), jnp.int32)
    tokens = mylib.filter_shard(tokens, P(batch), mesh=mesh)
    out = (*jax.tree.map(lambda x: x.sharding, given), None)
    return Step(step, (*given, tokens), out)


def lowered(size: Size, work: Work, mesh: Mesh, platform: str) -> Any:
    """The training step, for `jax.stages.Lowered.compile`."""
    attention = on_gpu if platform == "gpu" else partial(on_tpu, mesh)
    step = step_of(size, work, mesh, attention)
    jitted = jax.jit(step.fun, out_shardings=step.out_shardings, donate_argnums=(0, 1))
    # As `mylib.filter_jit` lowers: `jax.jit` would ask for the cuDNN that is here.
    with stated_costs(), cudnn_as_described():
        return jitted.lower(*step.arguments)
