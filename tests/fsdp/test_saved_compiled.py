"""`saved=` of `fully_shard` in the programs that GPUs and TPUs run: memory, and what is sent."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float
from stacks import through

import mylib
from mylib.rules import by_axes, fsdp, replicated

DEPTH, WIDTH, HIDDEN, HEADS, TIME, GROUP = 16, 1024, 4096, 8, 1024, 4
TENSOR = by_axes({"heads": "model", "mlp": "model"}) | replicated()
KEPT = TENSOR & fsdp("data")
INPUT = GROUP * TIME * WIDTH * 2  # the bytes of a layer's input that a group of devices has


class Block(eqx.Module):
    norms: Float[Array, "two embed"]
    query: Float[Array, "embed heads"]
    key: Float[Array, "embed heads"]
    value: Float[Array, "embed heads"]
    out: Float[Array, "heads embed"]
    gate: Float[Array, "embed mlp"]
    up: Float[Array, "embed mlp"]
    down: Float[Array, "mlp embed"]

    def __call__(self, x):
        y = normalised(x) * self.norms[0]
        q, k, v = (
            (y @ w).reshape(*x.shape[:2], HEADS, -1) for w in (self.query, self.key, self.value)
        )
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / 11)
        x = x + jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ self.out
        y = normalised(x) * self.norms[1]
        return x + (jax.nn.silu(y @ self.gate) * (y @ self.up)) @ self.down


def normalised(x):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def weights(mesh, stacked):
    def array(*shape):
        return jax.ShapeDtypeStruct((DEPTH, *shape) if stacked else shape, jnp.bfloat16)

    square, wide = array(WIDTH, WIDTH), array(WIDTH, HIDDEN)
    block = Block(array(2, WIDTH), square, square, square, square, wide, wide, array(HIDDEN, WIDTH))
    return mylib.filter_shard(block if stacked else [block] * DEPTH, KEPT, mesh=mesh)


def compiled(mesh, stacked, saved):
    model = weights(mesh, stacked)
    kept = jax.tree.map(lambda x: x.sharding, model)

    def loss(model, x):
        model = mylib.fully_shard(model, Block, KEPT, TENSOR, mesh=mesh, saved=saved)
        return jnp.mean(through(model, x).astype(jnp.float32) ** 2)

    rows = NamedSharding(mesh, P("data"))
    shape = (GROUP * mesh.shape["data"], TIME, WIDTH)
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=rows)
    program = jax.jit(jax.grad(loss), out_shardings=kept).lower(model, x).compile()
    return mylib.audit(program, mesh=mesh), program.memory_analysis().temp_size_in_bytes


def check(machine, stacked):
    mesh = machine.mesh(data=-1, model=4)
    report, temporaries = compiled(mesh, stacked, P("data", "model"))
    _, without = compiled(mesh, stacked, None)
    # A device saves a quarter of each input. A few are needed whole for a while.
    assert without - temporaries > (DEPTH - 5) * INPUT * 3 / 4
    # For a layer's six all-reduces (two forward, two recomputed, two backward) Megatron has an
    # all-gather and a reduce-scatter each.
    assert report.wire_bytes(None, "model") < 1.2 * DEPTH * 6 * 2 * INPUT * 3 / 4
    assert report.count("all-to-all") == 0
    # Of inputs and cotangents only, not of weights.
    assert report.bytes("all-gather", "model") == 3 * DEPTH * INPUT


@pytest.mark.compilers
@pytest.mark.compiles_for("h100 x 16", "v5e 4x4")
def test_inputs_are_saved_in_parts_at_the_price_of_megatron(machine):
    check(machine, stacked=True)


@pytest.mark.compilers
@pytest.mark.compiles_for("h100 x 16")
def test_the_same_for_layers_in_a_list(machine):
    # On v5e a list sends the same, and needs as much memory as without.
    check(machine, stacked=False)
