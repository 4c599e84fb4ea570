"""Optimisers of whole matrices under FSDP: `mylib.by_matrix` beside Optax's Muon as it is.

    python benchmarks/matrices.py            all rows
    python benchmarks/matrices.py h100       the step of 16 layers only for 8 of these

Bytes are those that a device sends, over those that it must send: its part of each gradient to the
owner of the matrix, and its part of the update back. FLOPs are those of a device, over an eighth of
one device's alone (on HSDP of those that share a copy). Nothing of the step is run, but `estimate`
gives seconds.
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
import numpy as np
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
    """`most` is what a device may send, over what it must, and `work` what it may compute."""

    name: str
    shapes: Shapes
    kept: Any
    most: float
    work: float
    over: tuple[str, ...] | None = None
    tensor: int = 1


CASES = [
    Case("8 in a list", [WIDE] * 8, ROWS, 1.01, 1.01),
    Case("16 in 3 shapes", [WIDE] * 8 + [(256, 512)] * 8 + [(512, 256)] * 8, ROWS, 1.01, 1.01),
    Case("a stack of 8", [(8, *WIDE)], P(None, "data"), 1.01, 1.01),
    Case("8 experts, columns", [(8, *WIDE)], P(None, None, "data"), 1.01, 1.01),
    Case("10 on 8", [WIDE] * 10, ROWS, 1.61, 1.61),
    Case("3 on 8", [WIDE] * 3, ROWS, 2.68, 2.68),
    Case("HSDP 4 x 2, over data", [WIDE] * 8, ROWS, 1.01, 2.02, None, 2),
    Case("HSDP 4 x 2, over both", [WIDE] * 8, ROWS, 1.33, 1.01, ("data", "model"), 2),
    Case("FSDP 4 x TP 2", [WIDE] * 8, P("data", "model"), 1.05, 1.01, None, 2),
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


def update_of(optim: Any, case: Case, mesh: Mesh) -> mylib.results.Report:
    """The report of an update of weights kept as the case says."""
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in case.shapes]
    params = mylib.filter_shard(params, case.kept, mesh=mesh)
    state = state_of(optim, params, mesh)
    out = jax.tree.map(lambda x: x.sharding, (params, state))
    update = jax.jit(lambda g, s: optim.update(g, s), out_shardings=out)
    return mylib.audit(update, params, state)


def sent_over_must(report: mylib.results.Report, case: Case) -> float:
    parts = 4 if case.tensor == 2 else 8
    parts *= 2 if case.kept == P("data", "model") else 1
    own = sum(4 * math.prod(shape) for shape in case.shapes) / parts
    return report.wire_bytes() / (2 * own * (parts - 1) / parts)


def work_over_must(report: mylib.results.Report, case: Case) -> float:
    """The FLOPs of matrix products of a device, over an eighth of those of all matrices."""
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in case.shapes]
    state = jax.eval_shape(muon().init, params)
    alone = mylib.audit(jax.jit(lambda g, s: muon().update(g, s)), params, state)
    return 8 * sum(report.work.flops.values()) / sum(alone.work.flops.values())


def differences() -> tuple[float, float]:
    """How far ten steps in float64 are from those of Optax on one device, and of SOAP's like."""
    mesh = mylib.make_mesh(data=8)
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(0), 13)
        shapes = [(64, 32)] * 8 + [(32, 64)] * 5
        params = [jax.random.normal(k, x, jnp.float64) for k, x in zip(keys, shapes, strict=True)]
        return tuple(_apart(make(), params, mesh) for make in (muon, statistics))  # pyright: ignore


def _apart(transform: Any, params: Any, mesh: Mesh) -> float:
    placed = mylib.filter_shard(params, fsdp("data", min_size=1), mesh=mesh)
    ours = mylib.by_matrix(transform, fsdp("data", min_size=1), mesh=mesh)
    results = []
    for optim, x in ((ours, placed), (transform, params)):
        state, update = optim.init(x), jax.jit(optim.update)
        for _ in range(10):
            updates, state = update(jax.tree.map(jnp.sin, x), state, x)
            x = optax.apply_updates(x, jax.tree.map(lambda u: 0.1 * u, updates))
        results.append(x)
    pairs = zip(*results, strict=True)
    return max(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))) for a, b in pairs)


def statistics(every: int = 3) -> optax.GradientTransformation:
    """Like SOAP: a branch renews a basis at every third step."""

    trees = jax.tree.map

    def init(params: Any) -> Any:
        sides = trees(lambda x: jnp.eye(x.shape[0], dtype=x.dtype), params)
        return jnp.zeros((), jnp.int32), sides, sides

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        count, left, basis = state
        left = trees(lambda s, g: 0.9 * s + g @ g.T, left, grads)
        renewed = lambda: trees(lambda s, q: jnp.linalg.qr(s @ q)[0], left, basis)  # noqa: E731
        basis = jax.lax.cond(count % every == 0, renewed, lambda: basis)
        updates = trees(lambda q, g: q @ jnp.tanh(q.T @ g), basis, grads)
        return updates, (count + 1, left, basis)

    return optax.GradientTransformation(init, update)


def branches() -> tuple[int, int]:
    """The branches of such an update that are left, and those that must be."""
    mesh, kept = mylib.make_mesh(data=8), fsdp("data", min_size=1)
    params = mylib.filter_shard([jnp.ones(WIDE)] * 8, kept, mesh=mesh)
    optim = mylib.by_matrix(statistics(), kept, mesh=mesh)
    text = jax.jit(optim.update).lower(params, optim.init(params)).compile().as_text() or ""
    return sum(" conditional(" in line for line in text.splitlines()), 1


class Layer(eqx.Module):
    weight: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(x @ self.weight.astype(x.dtype))


def step_of(make: Callable[[Any], Any], kept: Any, mesh: Mesh) -> mylib.results.Report:
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
    parser.add_argument("machines", nargs="*", choices=list(MACHINES), default=list(MACHINES))
    chosen = parser.parse_args().machines
    columns = ["work", "by_matrix", "Optax as it is", "ratio", "must reach", "ok"]
    print_header("bytes sent over bytes that must be sent, 8 devices", columns)
    work = []
    for case in CASES:
        mesh = mylib.make_mesh(data=-1, **({"model": 2} if case.tensor == 2 else {}))
        optim = mylib.by_matrix(muon(), case.kept, case.over, mesh=mesh, matrices=by_dimensions)
        reports = [update_of(x, case, mesh) for x in (optim, muon())]
        print_case(case.name, *(sent_over_must(x, case) for x in reports), case.most)
        work.append((case, [work_over_must(x, case) for x in reports]))
    print("\nFLOPs over an eighth of those of one device\n")
    print_row(columns)
    print_row(["---"] * len(columns))
    for case, numbers in work:
        print_case(case.name, *numbers, case.work)
    print()
    for name, apart in zip(("Muon", "like SOAP"), differences(), strict=True):
        print_bar(f"ten steps in float64, {name}: {apart:.0e}, at most 1e-12", apart <= 1e-12)
    found, expected = branches()
    print_bar(f"branches of an update like SOAP's: {found}, must be {expected}", found == expected)
    print("\nA step of 16 x 2048 x 2048, compiled for 8 devices, in ms by `estimate`\n")
    print_row(columns)
    print_row(["---"] * len(columns))
    for name in chosen:
        print_step(name)


def print_bar(text: str, holds: bool) -> None:
    print(f"{text}: {'ok' if holds else 'MISSED'}", flush=True)


def print_case(name: str, ours: float, peer: float, most: float) -> None:
    row = [name, f"{ours:.2f}", f"{peer:.1f}", f"{ours / peer:.2g}" if peer else "-"]
    print_row([*row, f"at most {most}", "ok" if ours <= most else "MISSED"])


MACHINES = {
    "h100": lambda: machines.gpu("h100", hosts=1, devices_per_host=8),
    "v5e": lambda: machines.tpu("v5e", (2, 4)),
}


def print_step(name: str) -> None:
    machine = MACHINES[name]()
    mesh, kept = machine.mesh(data=8), fsdp("data")
    made = {
        "by_matrix": lambda kept: mylib.by_matrix(muon(), kept, mesh=mesh),
        "Optax as it is": lambda kept: muon(),
        "Adam": lambda kept: optax.scale_by_adam(),
    }
    reports = {optim: step_of(make, kept, mesh) for optim, make in made.items()}
    times = {optim: 1e3 * report.estimate(machine).seconds for optim, report in reports.items()}
    ours, peer, adam = times.values()
    ratio = ours / peer
    row = [f"{name} (Adam: {adam:.1f})", f"{ours:.1f}", f"{peer:.1f}", f"{ratio:.2f}"]
    # Only for H100s there is a limit: the compiler for TPUs gathers less of what Optax does.
    bar = ("at most 0.45", "ok" if ratio <= 0.45 else "MISSED") if name == "h100" else ("", "")
    print_row([*row, *bar])
    sent = {optim: f"{report.wire_bytes() / 2**20:.0f}" for optim, report in reports.items()}
    ours, peer, adam = sent.values()
    row = [f"{name}, MiB sent (Adam: {adam})", ours, peer, f"{int(ours) / int(peer):.2f}"]
    print_row([*row, "", ""])


if __name__ == "__main__":
    main()
