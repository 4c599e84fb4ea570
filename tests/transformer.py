"""Training steps of a transformer under the usual strategies, in a list and in a scan."""

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from models import Block, Transformer

import mylib
from mylib.contracts import Contract, data_parallel, fsdp, tensor_parallel, two_d
from mylib.rules import Rule, by_axes, by_path, fsdp as divided, replicated

DEPTH, WIDTH, HIDDEN, HEADS, VOCAB = 2, 128, 512, 8, 32
ROWS, LENGTH = 4096, 8
KEPT = divided("data", min_size=1024)
# Megatron's: of a pair of products the first is divided by columns, the second by rows.
_NAMES = {Block: {"up.weight": "mlp embed", "up.bias": "mlp", "down.weight": "embed mlp"}}
MODEL = by_axes({"heads": "model", "mlp": "model"}, names=_NAMES) | replicated()


@dataclass(frozen=True)
class Strategy:
    """Where weights are kept, where a block computes with them (None: there), and what is true."""

    mesh: Mesh
    kept: Rule
    used: Rule | None
    contract: Contract
    batch: P = P("data")

    def step(self) -> Any:
        @mylib.filter_jit(
            in_shardings=(self.kept, self.batch), out_shardings=(self.kept, P()), mesh=self.mesh
        )
        def step(model: Transformer, tokens: Any) -> Any:
            def loss(model: Transformer) -> Any:
                if self.used is not None:
                    model = mylib.fully_shard(model, Block, self.kept, self.used, mesh=self.mesh)
                scores = jax.nn.log_softmax(jax.vmap(model)(tokens[:, :-1]))
                return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], -1))

            value, gradients = eqx.filter_value_and_grad(loss)(model)
            updates = jax.tree.map(lambda g: -0.1 * g, gradients)
            return eqx.apply_updates(model, updates), value

        return step

    def audit(self, stacked: bool) -> mylib.results.Report:
        return mylib.audit(self.step(), *args(stacked))


def args(stacked: bool) -> tuple[Any, Any]:
    def make(key: Any) -> Transformer:
        return Transformer(WIDTH, HIDDEN, HEADS, VOCAB, DEPTH, scanned=stacked, key=key)

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    return model, jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)


def strategies(one: Mesh, two: Mesh) -> dict[str, Strategy]:
    """`one` has the axis data, `two` data and model."""
    # Of a table that is looked up in, XLA moves the gradient about if it is divided.
    whole, both = replicated(), by_path({"embed.weight": P()}) | (MODEL & KEPT)
    return {
        "data_parallel": Strategy(one, whole, None, data_parallel("data")),
        "fsdp": Strategy(one, KEPT, whole, fsdp("data")),
        "tensor_parallel": Strategy(two, MODEL, None, tensor_parallel("model", forward=2 * DEPTH)),
        "two_d": Strategy(two, both, MODEL, two_d("data", "model")),
    }
