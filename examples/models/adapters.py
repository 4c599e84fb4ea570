"""Low-rank adapters (LoRA) on a frozen Llama that is sharded.

    python examples/models/adapters.py
    python examples/models/adapters.py --machine "h100 x 16"

Only the adapters have gradients and an optimiser state. They are small, so each device has all of
them; the frozen weights are gathered layer by layer, and nothing of them is ever summed.
"""

import running  # first: it simulates devices

# isort: split
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import llama
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray
from running import Strategy, Task, report, trained

from mylib.contracts import never
from mylib.rules import by_path, fsdp, replicated

RANK = 4


class Adapted(eqx.Module):
    """A frozen layer, to which a product of two narrow matrices is added."""

    frozen: eqx.nn.Linear
    narrow: Float[Array, "rank in"]
    widen: Float[Array, "out rank"]

    def __init__(self, layer: eqx.nn.Linear, key: PRNGKeyArray):
        outputs, inputs = layer.weight.shape
        self.frozen = layer
        self.narrow = jax.random.normal(key, (RANK, inputs), layer.weight.dtype) / inputs**0.5
        self.widen = jnp.zeros((outputs, RANK), layer.weight.dtype)

    def __call__(self, x: Float[Array, "in"]) -> Float[Array, "out"]:  # noqa: F821
        return self.frozen(x) + self.widen @ (self.narrow @ x)


def adapted(model: llama.Llama, key: PRNGKeyArray) -> llama.Llama:
    """Adapters for the queries and values of all blocks, which are stacked."""

    def add(layer: eqx.nn.Linear, key: PRNGKeyArray) -> Adapted:
        return eqx.filter_vmap(Adapted)(layer, jax.random.split(key, len(layer.weight)))

    layers = model.blocks.query, model.blocks.value
    keys = jax.random.split(key)
    added = tuple(add(layer, key) for layer, key in zip(layers, keys, strict=True))
    return eqx.tree_at(lambda model: (model.blocks.query, model.blocks.value), model, added)


def is_trained(model: llama.Llama) -> Any:
    """Which leaves are trained: those of the adapters."""

    def of_adapter(path: Any, x: Any) -> bool:
        return eqx.is_array(x) and path[-1].name in ("narrow", "widen")

    return jax.tree_util.tree_map_with_path(of_adapter, model)


def task(size: llama.Size) -> Task:
    def make(key: PRNGKeyArray) -> llama.Llama:
        return adapted(llama.Llama(size, key), jax.random.key(1))

    return llama.task(size)._replace(make=make, trained=is_trained)


ADAPTERS = {"narrow": P(), "widen": P()}


STRATEGIES = {
    "frozen FSDP": Strategy(
        {"data": -1},
        by_path(ADAPTERS) | fsdp("data"),
        replicated(),
        "data",
        (never("reduce-scatter", "data"), never("all-to-all", "data")),
    ),
    "frozen replicated": Strategy(
        {"data": -1}, replicated(), replicated(), "data", (never("all-gather", "data"),)
    ),
}

if __name__ == "__main__":
    running.main(STRATEGIES, trained(task(llama.SMALL)), partial(report, task(llama.LARGE)))
