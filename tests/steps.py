"""Real training steps under the usual strategies, in a list of layers and in a scan."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

LAYERS, WIDTH, HIDDEN = 3, 64, 256


def _pair(h: Any, w: Any) -> Any:
    return h + jnp.tanh(h @ w["up"]) @ w["down"]


def gather(w: Any, mesh: Mesh, kept: P, used: P) -> Any:
    """A weight as it is used; its gradient as it is kept."""

    @jax.custom_vjp
    def used_as(w: Any) -> Any:
        return lax.with_sharding_constraint(w, NamedSharding(mesh, used))

    used_as.defvjp(
        lambda w: (lax.with_sharding_constraint(w, NamedSharding(mesh, used)), None),
        lambda _, g: (lax.with_sharding_constraint(g, NamedSharding(mesh, kept)),),
    )
    return used_as(w)


class Strategy:
    """Where the weights of a pair are kept and used, and the batch is."""

    def __init__(self, mesh: Mesh, kept: dict[str, P], used: dict[str, P], batch: P, rows: int):
        self.mesh, self.kept, self.used, self.batch, self.rows = mesh, kept, used, batch, rows

    def step(self, stacked: bool) -> Any:
        def layer(h: Any, w: Any) -> Any:
            h = lax.with_sharding_constraint(h, NamedSharding(self.mesh, self.batch))
            if self.kept != self.used:
                w = {k: gather(x, self.mesh, self.kept[k], self.used[k]) for k, x in w.items()}
            return _pair(h, w)

        layer = jax.checkpoint(layer) if self.kept != self.used else layer

        def loss(model: Any, x: Any) -> Any:
            if stacked:
                h, _ = lax.scan(lambda h, w: (layer(h, w), None), x, model)
            else:
                h = x
                for w in model:
                    h = layer(h, w)
            return jnp.mean(h**2)

        def step(model: Any, x: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(model, x)
            return jax.tree.map(lambda w, g: w - 0.1 * g, model, gradients), value

        out = jax.tree.map(lambda w: w.sharding, self.model(stacked))
        return jax.jit(step, out_shardings=(out, NamedSharding(self.mesh, P())))

    def model(self, stacked: bool) -> Any:
        shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}

        def weight(name: str, *stack: int) -> Any:
            spec = P(*[None] * len(stack), *self.kept[name])
            sharding = NamedSharding(self.mesh, spec)
            return jax.ShapeDtypeStruct((*stack, *shapes[name]), jnp.float32, sharding=sharding)

        if stacked:
            return {name: weight(name, LAYERS) for name in shapes}
        return [{name: weight(name) for name in shapes} for _ in range(LAYERS)]

    def args(self, stacked: bool) -> tuple[Any, Any]:
        sharding = NamedSharding(self.mesh, self.batch)
        batch = jax.ShapeDtypeStruct((self.rows, WIDTH), jnp.float32, sharding=sharding)
        return self.model(stacked), batch


def strategies(one: Mesh, two: Mesh) -> dict[str, Strategy]:
    """`one` has the axis data, `two` data and model."""
    whole = {"up": P(), "down": P()}
    rows = {"up": P("data"), "down": P("data")}
    columns = {"up": P(None, "model"), "down": P("model")}
    both = {"up": P("data", "model"), "down": P("model", "data")}
    return {
        "data_parallel": Strategy(one, whole, whole, P("data"), 4096),
        "fsdp": Strategy(one, rows, whole, P("data"), 4096),
        "tensor_parallel": Strategy(two, columns, columns, P("data"), 4096),
        "two_d": Strategy(two, both, columns, P("data"), 4096),
    }
