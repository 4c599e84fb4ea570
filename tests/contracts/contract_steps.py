"""Random training steps, each right or sabotaged in one place, and what a contract says of them.

The model, its container, the names of the batch, the optimiser and the way in which each gradient
reaches its weight are chosen by a seed. Of a sabotaged step one weight's gradient is not sent, or
not added.
    python contract_steps.py FIRST LAST
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
import known  # noqa: E402
from handwritten import (  # noqa: E402
    exchanged,
    gathered,
    hierarchical,
    in_bytes,
    own_part,
    psum,
    scattered,
    sent,
)

# isort: split
import re  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from typing import Any  # noqa: E402

import equinox as eqx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec as P  # noqa: E402

import mylib  # noqa: E402
from mylib import contracts  # noqa: E402

N, LENGTH, VOCAB, DEVICES = 16, 4, 32, 8


def _ring(g: Any) -> Any:
    total = g
    for _ in range(DEVICES - 1):
        total = sent(total) + g
    return total


def _looped_ring(g: Any) -> Any:
    return lax.fori_loop(0, DEVICES - 1, lambda _, total: sent(total) + g, g)


def _passed_on(g: Any) -> Any:
    def one(_: Any, carry: Any) -> Any:
        total, passed = carry
        passed = sent(passed)
        return total + passed, passed

    return lax.fori_loop(0, DEVICES - 1, one, (g, g))[0]


def _all(g: Any) -> Any:
    return lax.all_gather(g, "data", tiled=True)


Way = Callable[[Any], Any]
SUMS: dict[str, Way] = {
    "psum": psum,
    "pmean": lambda g: lax.pmean(g, "data"),
    "bfloat16": lambda g: psum(g.astype(jnp.bfloat16)).astype(g.dtype),
    "scatter and gather": lambda g: _all(scattered(g)),
    "gather and sum": lambda g: lax.all_gather(g, "data").sum(0),
    "gather along the last and sum": lambda g: lax.all_gather(g, "data", axis=g.ndim).sum(-1),
    "gather and einsum": lambda g: jnp.einsum("i...->...", lax.all_gather(g, "data")),
    "exchange and sum": lambda g: _all(exchanged(g).sum(0)),
    "ring": _ring,
    "looped ring": _looped_ring,
    "passed on": _passed_on,
    "hierarchical": hierarchical,
    "8 bits": in_bytes,
}
# Wrong ones that are sent otherwise are tests/verify/test_wrong_sums.py's.
NO_SUMS: dict[str, Way] = {
    "nothing": lambda g: g,
    "pmax": lambda g: lax.pmax(g, "data"),
    "pmin": lambda g: lax.pmin(g, "data"),
}
SCATTERS: dict[str, Way] = {
    "psum_scatter": scattered,
    "psum and slice": lambda g: own_part(psum(g)),
    "exchange and sum": lambda g: exchanged(g).sum(0),
}
NO_SCATTERS: dict[str, Way] = {
    "own part": own_part,
    "pmax and slice": lambda g: own_part(lax.pmax(g, "data")),
}


# --- models: their weights by names, and a loss of one example ------------------------------------

_PAIR = {"up": (N, 2 * N), "down": (2 * N, N)}


def _mlp(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)


def _stacked(w: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    return jnp.mean(lax.scan(layer, x, (w["up"], w["down"]))[0] ** 2)


def _tied(w: Any, tokens: Any) -> Any:
    h = w["table"][tokens[:-1]]
    q, k = h @ w["query"], h @ w["key"]
    h = h + jax.nn.softmax(q @ k.T) @ h
    h = h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6) * w["scale"]
    scores = jax.nn.log_softmax(h @ w["table"].T)
    return -jnp.mean(jnp.take_along_axis(scores, tokens[1:, None], -1))


def _conv(w: Any, x: Any) -> Any:
    h = lax.conv(x[None], w["kernel"], (1, 1), "SAME")[0]
    return jnp.mean((jax.nn.relu(h).mean((1, 2)) @ w["head"]) ** 2)


def _adapters(w: Any, x: Any) -> Any:
    up = lax.stop_gradient(w["up"])
    return jnp.mean((jnp.tanh(x @ up + x @ w["first"] @ w["second"]) @ w["down"]) ** 2)


def _rnn(w: Any, x: Any) -> Any:
    def turn(h: Any, x: Any) -> Any:
        return jnp.tanh(x @ w["up"] + h @ w["again"] + w["bias"]), None

    return jnp.mean((lax.scan(turn, jnp.zeros(2 * N), x)[0] @ w["down"]) ** 2)


@dataclass(frozen=True)
class Kind:
    loss: Callable[[Any, Any], Any]
    shapes: dict[str, tuple[int, ...]]
    example: tuple[int, ...]
    dtype: Any = jnp.float32
    frozen: tuple[str, ...] = ()


KINDS = {
    "mlp": Kind(_mlp, _PAIR, (N,)),
    "stacked": Kind(_stacked, {"up": (8, N, 2 * N), "down": (8, 2 * N, N)}, (N,)),
    "tied": Kind(
        _tied,
        {"table": (VOCAB, N), "query": (N, N), "key": (N, N), "scale": (N,)},
        (LENGTH + 1,),
        jnp.int32,
    ),
    "conv": Kind(_conv, {"kernel": (N, 8, 3, 3), "head": (N, N)}, (8, 4, 4)),
    "adapters": Kind(
        _adapters, {**_PAIR, "first": (N, 8), "second": (8, 2 * N)}, (N,), frozen=("up",)
    ),
    "rnn": Kind(_rnn, {**_PAIR, "again": (2 * N, 2 * N), "bias": (2 * N,)}, (LENGTH, N)),
}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(1e-3),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "muon": lambda: optax.contrib.muon(1e-3),
}


class Named(eqx.Module):
    """Up to four weights, as attributes."""

    a: Any = None
    b: Any = None
    c: Any = None
    d: Any = None


CONTAINERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dict": dict,
    "list": lambda w: [*w.values()],
    "attributes": lambda w: Named(*w.values()),
    "nested": lambda w: {"layers": [{"weight": x} for x in w.values()]},
}


@dataclass(frozen=True)
class Step:
    """A step of `kind`, whose weights get their gradients in these `ways`."""

    kind: str
    sharded: bool
    container: str
    optimizer: str
    batch: str
    ways: dict[str, str]
    wrong: str

    @classmethod
    def random(cls, seed: int) -> "Step":
        rng = np.random.default_rng(seed)

        def one(of: Any) -> str:
            return str(rng.choice([*of]))

        sharded = bool(rng.random() < 0.4)
        # Gathered by hand, more weights would be held until the backward pass.
        kind = one(("mlp", "conv") if sharded else KINDS)
        # The optimiser of a part of a matrix is no Muon.
        optimizer = one([*OPTIMIZERS][:3] if sharded else OPTIMIZERS)
        made = KINDS[kind]
        trained = [name for name in made.shapes if name not in made.frozen]
        ways = {name: one(SCATTERS if sharded else SUMS) for name in trained}
        wrong = one(trained) if rng.random() < 0.6 else ""
        if wrong:
            ways[wrong] = one(NO_SCATTERS if sharded else NO_SUMS)
        batch = one([*made.shapes, "x", "weight", "mu"])
        return cls(kind, sharded, one(CONTAINERS), optimizer, batch, ways, wrong)

    def faults(self) -> list[str]:
        return self.contract(self.report())

    @property
    def contract(self) -> contracts.Contract:
        if self.sharded:
            return contracts.fsdp("data")
        return contracts.data_parallel("data", activations="1 KiB")

    def report(self) -> mylib.results.Report:
        made = KINDS[self.kind]
        mesh = known.mesh_of(jax.devices(), (DEVICES,), ("data",))
        spec = P("data") if self.sharded else P()
        pack = CONTAINERS[self.container]
        names = jax.tree.leaves(pack({name: name for name in made.shapes}))
        optimizer = OPTIMIZERS[self.optimizer]()

        def abstract(x: Any) -> Any:
            used = spec if x.ndim else P()
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, used))

        def step(model: Any, state: Any, batch: Any) -> Any:
            x = batch[self.batch]
            whole = gathered(model) if self.sharded else model

            def loss(model: Any) -> Any:
                weights = dict(zip(names, jax.tree.leaves(model), strict=True))
                return jnp.mean(jax.vmap(lambda x: made.loss(weights, x))(x))

            gradients = dict(zip(names, jax.tree.leaves(jax.grad(loss)(whole)), strict=True))
            gradients = {
                name: self._way(name)(g) if name in self.ways else self._zero(g)
                for name, g in gradients.items()
            }
            updates, state = optimizer.update(pack(gradients), state, model)
            return optax.apply_updates(model, updates), state

        model = pack(
            {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in made.shapes.items()}
        )
        state = jax.eval_shape(optimizer.init, model)
        model, state = jax.tree.map(abstract, (model, state))
        x = known.abstract(mesh, P("data"), (64, *made.example), made.dtype)
        specs = jax.tree.map(lambda x: x.sharding.spec, (model, state))
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=specs, check_vma=False
        )
        return mylib.audit(jax.jit(mapped), model, state, {self.batch: x})

    def _way(self, name: str) -> Way:
        ways = [SCATTERS, NO_SCATTERS] if self.sharded else [SUMS, NO_SUMS]
        return ways[name == self.wrong][self.ways[name]]

    def _zero(self, g: Any) -> Any:
        return jnp.zeros_like(own_part(g) if self.sharded else g)

    def path(self, name: str) -> str:
        made = KINDS[self.kind]
        tree = CONTAINERS[self.container]({name: name for name in made.shapes})
        paths = {leaf: path for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
        return f"model{jax.tree_util.keystr(paths[name])}"


def told(seed: int) -> str:
    """What is wrong with the contract's answer, or nothing."""
    step = Step.random(seed)
    found = step.faults()
    if not step.wrong:
        return f"{seed} {step}: right, and {found}" if found else ""
    path = step.path(step.wrong)
    leaves = [
        fault.split(": ")[0]
        for fault in found
        if re.search("not sent|same part|being added", fault)
    ]
    return "" if any(map(_names, leaves, [path] * len(leaves))) else f"{seed} {step}: {found}"


def _names(leaves: str, path: str) -> bool:
    """Whether folded names, `model[0..2]`, have this one. If some aren't told, it may be of them:
    where gradients are clipped, one that isn't sent spoils the others.
    """
    ranges = re.compile(r"\[(\d+)\.\.(\d+)\]")
    names = leaves.split(", ")
    for folded in filter(ranges.search, leaves.split(", ")):
        first, last = map(int, ranges.search(folded).groups())
        names += [ranges.sub(f"[{i}]", folded) for i in range(first, last + 1)]
    return path in names or " more" in leaves


if __name__ == "__main__":
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        if text := told(seed):
            print(text, flush=True)
    print(f"{sys.argv[1]}..{sys.argv[2]} done", flush=True)
