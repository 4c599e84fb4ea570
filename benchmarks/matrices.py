"""Optimisers of whole matrices under FSDP: `mylib.by_matrix` beside Optax's Muon as it is.

    python benchmarks/matrices.py            bytes of updates, by the compiler for the CPU
    python benchmarks/matrices.py h100       also the step of 16 layers, by the compiler for 8 H100s

Bytes are those that a device sends, over those that it must send: its part of each gradient to the
owner of the matrix, and its part of the update back. Nothing is run, but `estimate` gives seconds.
"""

import argparse
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("NPROC", "32")

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from side_by_side import print_header, print_row

import mylib
from mylib import machines
from mylib.rules import fsdp

WIDE = (256, 256)
ROWS = P("data")
Shapes = list[tuple[int, ...]]


class Case(NamedTuple):
    """`most` is what a device may send, over what it must."""

    name: str
    shapes: Shapes
    kept: Any
    most: float
    over: tuple[str, ...] | None = None
    tensor: int = 1


CASES = [
    Case("8 in a list", [WIDE] * 8, ROWS, 1.01),
    Case("16 in 3 shapes", [WIDE] * 8 + [(256, 512)] * 8 + [(512, 256)] * 8, ROWS, 1.01),
    Case("a stack of 8", [(8, *WIDE)], P(None, "data"), 1.01),
    Case("8 experts, columns", [(8, *WIDE)], P(None, None, "data"), 1.01),
    Case("10 on 8", [WIDE] * 10, ROWS, 1.61),
    Case("3 on 8", [WIDE] * 3, ROWS, 2.68),
    Case("HSDP 4 x 2, over data", [WIDE] * 8, ROWS, 1.01, None, 2),
    Case("HSDP 4 x 2, over both", [WIDE] * 8, ROWS, 1.33, ("data", "model"), 2),
    Case("FSDP 4 x TP 2", [WIDE] * 8, P("data", "model"), 1.05, None, 2),
]


def muon() -> optax.GradientTransformation:
    def numbers(tree: Any) -> Any:
        # Of a stack the first dimension is that of the layers.
        last = lambda x: MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)  # noqa: E731
        return jax.tree.map(last, tree)

    return optax.contrib.scale_by_muon(weight_dimension_numbers=numbers)


def by_dimensions(leaf: mylib.Leaf) -> Any:
    return tuple(range(leaf.ndim - 2)), leaf.ndim - 2, leaf.ndim - 1


def state_of(optim: Any, params: Any, mesh: Mesh) -> Any:
    """The state as `by_matrix` creates it, or else sharded like the weights."""
    made, whole = jax.eval_shape(optim.init, params), NamedSharding(mesh, P())
    if not any(_is_ours(x) for x in jax.tree.leaves(made, is_leaf=_is_ours)):
        like = mylib.rules.like(params) | mylib.rules.replicated()
        return mylib.filter_shard(made, like, mesh=mesh)
    shardings = jax.jit(optim.init).lower(params).compile().output_shardings
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=s if isinstance(s, NamedSharding) else whole
        ),
        made,
        shardings,
    )


def _is_ours(node: Any) -> bool:
    return hasattr(node, "layout")


def update_of(optim: Any, case: Case, mesh: Mesh) -> mylib.Report:
    """The report of an update of weights kept as the case says."""
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in case.shapes]
    params = mylib.filter_shard(params, case.kept, mesh=mesh)
    state = state_of(optim, params, mesh)
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    update = jax.jit(lambda g, s: optim.update(g, s), out_shardings=out)
    return mylib.audit(update, params, state)


def sent_over_must(report: mylib.Report, case: Case) -> float:
    parts = 4 if case.tensor == 2 else 8
    parts *= 2 if case.kept == P("data", "model") else 1
    own = sum(4 * math.prod(shape) for shape in case.shapes) / parts
    return report.wire_bytes() / (2 * own * (parts - 1) / parts)


class Layer(eqx.Module):
    weight: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ self.weight.astype(x.dtype))


def step_of(make: Callable[[Any], Any], kept: Any, mesh: Mesh) -> mylib.Report:
    """A training step of 16 layers of 2048 x 2048 with FSDP, each device with 2048 rows."""
    model = [Layer(jax.ShapeDtypeStruct((2048, 2048), jnp.float32)) for _ in range(16)]
    model = mylib.filter_shard(model, kept, mesh=mesh)
    optim = optax.chain(make(kept), optax.scale(-1e-3))
    x = jax.ShapeDtypeStruct((2048 * mesh.size, 2048), jnp.bfloat16)
    x = mylib.filter_shard(x, P("data"), mesh=mesh)
    state = state_of(optim, model, mesh)

    def step(x: Any, model: Any, state: Any) -> Any:
        def loss(model: Any) -> Any:
            y = x
            for layer in mylib.fully_shard(model, Layer, kept, mesh=mesh, dtype=jnp.bfloat16):
                y = layer(y)
            return jnp.mean(y.astype(jnp.float32) ** 2)

        grads = jax.grad(loss)(model)
        updates, state = optim.update(grads, state, model)
        return eqx.apply_updates(model, updates), state

    places = None, *(jax.tree.map(lambda x: x.sharding, y) for y in (model, state))
    step = jax.jit(step, out_shardings=places[1:], donate_argnums=(1, 2))
    return mylib.audit(step, x, model, state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", nargs="?", choices=["h100"])
    machine = parser.parse_args().machine
    columns = ["work", "by_matrix", "Optax as it is", "ratio", "must reach", "ok"]
    print_header("bytes sent over bytes that must be sent, 8 devices", columns)
    for case in CASES:
        mesh = mylib.make_mesh(data=-1, **({"model": 2} if case.tensor == 2 else {}))
        optim = mylib.by_matrix(muon(), case.kept, case.over, mesh=mesh, matrices=by_dimensions)
        ours = sent_over_must(update_of(optim, case, mesh), case)
        peer = sent_over_must(update_of(muon(), case, mesh), case)
        row = [case.name, f"{ours:.2f}", f"{peer:.1f}", f"{ours / peer:.2g}" if peer else "-"]
        print_row([*row, f"at most {case.most}", "ok" if ours <= case.most else "MISSED"])
    if machine:
        print_h100()


def print_h100() -> None:
    machine = machines.gpu("h100", hosts=1, devices_per_host=8)
    mesh, kept = machine.mesh(data=8), fsdp("data")
    seconds = {}
    for name, make in {
        "by_matrix": lambda kept: mylib.by_matrix(muon(), kept, mesh=mesh),
        "Optax as it is": lambda kept: muon(),
        "Adam": lambda kept: optax.scale_by_adam(),
    }.items():
        seconds[name] = step_of(make, kept, mesh).estimate(machine).seconds
    print("\nA step of 16 x 2048 x 2048 on 8 H100s, by `estimate`:")
    for name, time in seconds.items():
        print(f"  {name}: {1e3 * time:.1f} ms")
    ratio = seconds["by_matrix"] / seconds["Optax as it is"]
    print(f"  by_matrix / Optax as it is: {ratio:.2f}, must reach at most 0.45", end=": ")
    print("ok" if ratio <= 0.45 else "MISSED")


if __name__ == "__main__":
    main()
