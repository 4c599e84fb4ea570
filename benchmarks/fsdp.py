"""What FSDP costs on the programs that GPUs and TPUs run: temporary memory, and what a device
receives in a step, for `mylib.fully_shard` and for what others write.

    python benchmarks/fsdp.py h100                 an MLP in a scan and in a list
    python benchmarks/fsdp.py v5e --model transformer --layers scan
    python benchmarks/fsdp.py h100 --only mylib --rows 128
    python benchmarks/fsdp.py h100 --only mylib --grid       4 x 4, with tensor parallelism
    python benchmarks/fsdp.py h100 --only mylib --dtype f32  kept in f32, sent in bf16
    python benchmarks/fsdp.py h100 --only mylib --dtype f32 --reduce    gradients summed in f32
    python benchmarks/fsdp.py h100 --only mylib --send float8_e4m3fn    weights sent in float8
    python benchmarks/fsdp.py h100 --only mylib --model deep --layers list    48 layers of 1 GiB

Peers (flax, haliax, scalax) are in the table of the MLP where they are installed. Nothing is run,
and no GPU or TPU is needed: each gradient is compiled for 16 devices by XLA's own compiler for them
(`pip install '.[gpu-compiler,tpu-compiler]'`). Memory and bytes are exact, for one version of
the compiler.
"""

import argparse
import math
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import equinox as eqx
import jax
import jax.numpy as jnp
from fsdp_peers import PEERS
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float
from side_by_side import print_header, print_row

import mylib
from mylib import machines

UNROLL = 1  # iterations of a scan; scan_overlap.py has 2, too
HEADS, VOCAB, TIME = 16, 32768, 512
DTYPE = jnp.bfloat16
# The TPU compiler's own, for the indices of an embedding: on each device by itself.
LOCAL = ("GatherScatterIndicesBitpacked",)
MIB = 2**20
MACHINES = {
    "h100": partial(machines.gpu, "h100", hosts=2),
    "v5e": partial(machines.tpu, "v5e", (4, 4)),
}


class Size(NamedTuple):
    depth: int
    width: int
    hidden: int


SIZES = {
    "mlp": Size(16, 2048, 8192),
    "transformer": Size(16, 2048, 8192),
    "deep": Size(48, 8192, 32768),
}


class Dense(eqx.Module):
    """A layer of the MLP."""

    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ self.up) @ self.down


class Block(eqx.Module):
    """A layer of the transformer."""

    norms: Float[Array, "two embed"]
    query: Float[Array, "embed heads"]
    key: Float[Array, "embed heads"]
    value: Float[Array, "embed heads"]
    out: Float[Array, "heads embed"]
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]

    def __call__(self, x: jax.Array) -> jax.Array:
        y = normalised(x) * self.norms[0]
        q, k, v = [
            (y @ w).reshape(*x.shape[:2], HEADS, -1) for w in (self.query, self.key, self.value)
        ]
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
        x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ self.out
        y = normalised(x) * self.norms[1]
        return x + jax.nn.gelu(y @ self.up) @ self.down


def normalised(x: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


class MLP(eqx.Module):
    layers: list[Dense] | Dense


class Transformer(eqx.Module):
    embed: Float[Array, "vocab embed"]
    layers: list[Block] | Block
    unembed: Float[Array, "embed vocab"]


Each = Callable[[Any, jax.Array], jax.Array]


class Case(NamedTuple):
    """A model of abstract arrays, its data, and how to compute its loss."""

    layer: type
    model: Any
    data: jax.ShapeDtypeStruct
    loss: Callable[[Any, jax.Array, Each], jax.Array]


def through(layers: Any, x: jax.Array, each: Each) -> jax.Array:
    if isinstance(layers, list):
        for layer in layers:
            x = each(layer, x)
        return x
    return jax.lax.scan(lambda x, layer: (each(layer, x), None), x, layers, unroll=UNROLL)[0]


def mlp_loss(model: MLP, x: jax.Array, each: Each) -> jax.Array:
    return jnp.mean(through(model.layers, x, each).astype(jnp.float32) ** 2)


def transformer_loss(model: Transformer, tokens: jax.Array, each: Each) -> jax.Array:
    x = through(model.layers, model.embed[tokens], each)
    logits = jax.nn.log_softmax((normalised(x) @ model.unembed).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1))


def case_of(
    model: str,
    layers: str,
    rows: int,
    devices: int,
    dtype: Any = DTYPE,
    depth: int | None = None,
) -> Case:
    usual, width, hidden = SIZES[model]
    depth = usual if depth is None else depth

    def stack(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((depth, *shape) if layers == "scan" else shape, dtype)

    def repeated(layer: Any) -> Any:
        return layer if layers == "scan" else [layer] * depth

    up, down, square = stack(width, hidden), stack(hidden, width), stack(width, width)
    if model != "transformer":
        data = jax.ShapeDtypeStruct((rows * devices, width), DTYPE)
        return Case(Dense, MLP(repeated(Dense(up, down))), data, mlp_loss)
    block = Block(stack(2, width), *[square] * 4, up, down)
    table = jax.ShapeDtypeStruct((VOCAB, width), dtype)
    out = jax.ShapeDtypeStruct((width, VOCAB), dtype)
    data = jax.ShapeDtypeStruct((rows * devices // TIME, TIME), jnp.int32)
    return Case(Block, Transformer(table, repeated(block), out), data, transformer_loss)


SMALL = 2**13  # weights of fewer elements are copied: the norms


def spec(shape: tuple[int, ...], which: str) -> P:
    """The spec of one layer's weight: its first dimension split, its largest, or "embed"."""
    if math.prod(shape) < SMALL:
        return P()
    dim = {"first": 0, "largest": shape.index(max(shape)), "embed": shape.index(min(shape))}[which]
    return P(*[None] * dim, "data")


TENSOR = mylib.rules.by_axes({"mlp": "model"}) | mylib.rules.replicated()


def kept(case: Case, mesh: Mesh, which: str) -> Any:
    if "model" in mesh.shape:
        rule = TENSOR & mylib.rules.fsdp("data", min_size=SMALL)
        return mylib.resolve(case.model, rule, mesh=mesh)
    if which == "rule":
        return mylib.resolve(case.model, mylib.rules.fsdp("data", min_size=SMALL), mesh=mesh)

    def place(path: Any, x: Any) -> NamedSharding:
        stacked = ".layers" in jax.tree_util.keystr(path) and not isinstance(
            case.model.layers, list
        )
        one = spec(x.shape[stacked:], which)
        return NamedSharding(mesh, P(*[None] * stacked, *one))

    return jax.tree_util.tree_map_with_path(place, case.model)


# What each formulation makes of a case: a loss of a model and data.
Loss = Callable[[Any, jax.Array], jax.Array]


def call(layer: Any, x: jax.Array) -> jax.Array:
    return layer(x)


def rematerialised(case: Case) -> Each:
    return jax.checkpoint(call, prevent_cse=isinstance(case.model.layers, list))


def raw(case: Case, mesh: Mesh, where: Any) -> Loss:
    """Shardings of what goes in and comes out, and nothing else."""
    return lambda model, x: case.loss(narrow(model), x, rematerialised(case))


def narrow(model: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(DTYPE), model)


def activations(case: Case, mesh: Mesh, where: Any) -> Loss:
    """As MaxText does: activations are constrained, weights never."""
    rows = NamedSharding(mesh, P("data"))

    def each(layer: Any, x: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, rows)
        return jax.lax.with_sharding_constraint(layer(x), rows)

    step = jax.checkpoint(each, prevent_cse=isinstance(case.model.layers, list))
    return lambda model, x: case.loss(model, x, step)


def weights(case: Case, mesh: Mesh, where: Any) -> Loss:
    """Weights are constrained to be whole in each layer."""
    whole = NamedSharding(mesh, P())

    def each(layer: Any, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(layer, whole)(x)

    step = jax.checkpoint(each, prevent_cse=isinstance(case.model.layers, list))
    return lambda model, x: case.loss(model, x, step)


def before(case: Case, mesh: Mesh, where: Any) -> Loss:
    """What this library's guide said before: the model is gathered at the top of the loss."""
    rule = mylib.rules.replicated()
    return lambda model, x: case.loss(
        mylib.filter_shard(model, rule, mesh=mesh), x, rematerialised(case)
    )


def ours(case: Case, mesh: Mesh, where: Any, **options: Any) -> Loss:
    """`fully_shard`, and nothing else."""
    used = options.pop("used", TENSOR if "model" in mesh.shape else mylib.rules.replicated())
    if jax.tree.leaves(case.model)[0].dtype != DTYPE:
        options["dtype"] = DTYPE

    def loss(model: Any, x: jax.Array) -> jax.Array:
        model = mylib.fully_shard(model, case.layer, where, used, mesh=mesh, **options)
        return case.loss(model, x, call)

    return loss


FORMULATIONS: dict[str, tuple[Callable[..., Loss], str]] = {
    "mylib.fully_shard": (ours, "rule"),
    "mylib.fully_shard, used=None": (partial(ours, used=None), "rule"),
    "mylib.fully_shard, in_turn=False": (partial(ours, in_turn=False), "rule"),
    "mylib.fully_shard, prefetch=1": (partial(ours, prefetch=1), "rule"),
    "mylib.fully_shard, prefetch=2": (partial(ours, prefetch=2), "rule"),
    "mylib.fully_shard, first dimension": (ours, "first"),
    "mylib.fully_shard, dimension of the residual stream": (ours, "embed"),
    "jax.jit, rematerialised, embed": (raw, "embed"),
    "jax.jit, rematerialised, largest": (raw, "largest"),
    "jax.jit, rematerialised, first": (raw, "first"),
    "the same, activations constrained (MaxText's way)": (activations, "embed"),
    "the same, weights constrained in the layer": (weights, "first"),
    "the model gathered at the top, rematerialised": (before, "largest"),
}


def compiled(loss: Loss, params: Any, data: Any, where: Any) -> jax.stages.Compiled:
    step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, where))
    return step.lower(params, data).compile()


def data_of(case: Case, mesh: Mesh) -> jax.ShapeDtypeStruct:
    rows = NamedSharding(mesh, P("data"))
    return jax.ShapeDtypeStruct(case.data.shape, case.data.dtype, sharding=rows)


def programs(
    case: Case, mesh: Mesh, only: str, peers: bool, **options: Any
) -> Iterator[tuple[str, jax.stages.Compiled | str]]:
    listed = isinstance(case.model.layers, list)
    for name, (formulation, which) in FORMULATIONS.items():
        # `fully_shard` refuses to prefetch layers in a scan.
        if only in name and (listed or "prefetch" not in name):
            if name.startswith("mylib"):
                formulation = partial(formulation, **options)
            where = kept(case, mesh, which)
            params = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), case.model, where
            )
            loss = formulation(case, mesh, where)
            yield name, compiled(loss, params, data_of(case, mesh), where)
    for name, peer in PEERS.items() if peers else ():
        if only in name:
            try:
                loss, params, where = peer(mesh, *SIZES["mlp"], not listed)
                there = jax.tree.leaves(where)[0].mesh
                with jax.set_mesh(there):
                    program = compiled(loss, params, data_of(case, there), where)
            # The second: it uses what this version of JAX has no more.
            except (ImportError, AttributeError) as error:
                program = f"left out: {str(error).splitlines()[0]}"
            yield name, program


def row(layers: str, name: str, program: jax.stages.Compiled | str, mesh: Mesh) -> list[str]:
    if isinstance(program, str):
        return [layers, name, program, "", "", "", "", ""]
    report = mylib.audit(program, mesh=mesh, local=LOCAL)
    temporary = program.memory_analysis().temp_size_in_bytes / MIB
    gathers = [c for c in report.collectives if c.kind == "all-gather" and c.bytes >= MIB]
    hidden = sum(c.overlapped for c in gathers)
    summed = [c for c in report.collectives if c.kind == "all-reduce" and c.bytes >= MIB]
    kinds = sorted({c.kind for c in report.collectives})
    return [
        layers,
        name,
        f"{temporary:.0f}",
        f"{report.wire_bytes() / MIB:.0f}",
        f"{report.wire_bytes('all-gather') / MIB:.0f}",
        f"{sum(c.bytes * (c.times or 1) for c in summed) / MIB:.0f}",
        f"{hidden} of {len(gathers)}",
        ", ".join(kinds),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", choices=MACHINES)
    parser.add_argument("--model", choices=SIZES, default="mlp")
    parser.add_argument("--layers", choices=["scan", "list"], nargs="+", default=["scan", "list"])
    parser.add_argument("--rows", type=int, default=2048, help="rows, or tokens, a device")
    parser.add_argument("--dtype", choices=["bf16", "f32"], default="bf16", help="of what is kept")
    parser.add_argument("--reduce", action="store_true", help="sum gradients of ours in f32")
    parser.add_argument("--send", help="what weights of ours are sent in: float8_e4m3fn, int8")
    parser.add_argument("--grid", action="store_true", help="4 x 4 devices, data x model")
    parser.add_argument("--only", default="", help="formulations with this in their name")
    given = parser.parse_args()
    machine = MACHINES[given.machine]()
    mesh = machine.mesh(data=4, model=4) if given.grid else machine.mesh(data=-1)
    columns = ["layers", "formulation", "temporary MiB", "received MiB", "gathered MiB"]
    columns += ["all-reduced MiB", "gathers under way during other work", "collectives"]
    where = f"{given.model} of {SIZES[given.model].depth} layers on {machine}"
    print_header(f"{where}, {dict(mesh.shape)}, {given.rows} rows a device", columns)
    dtype = {"bf16": jnp.bfloat16, "f32": jnp.float32}[given.dtype]
    options: dict[str, Any] = {"reduce_dtype": jnp.float32} if given.reduce else {}
    options |= {"send_dtype": given.send} if given.send else {}
    peers = given.model == "mlp" and given.dtype == "bf16" and not given.grid
    for layers in given.layers:
        case = case_of(given.model, layers, given.rows, mesh.shape["data"], dtype)
        for name, program in programs(case, mesh, given.only, peers, **options):
            print_row(row(layers, name, program, mesh))


if __name__ == "__main__":
    main()
