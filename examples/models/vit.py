"""A vision transformer: patches by a convolution, attention of all to all, a class for each image.

python examples/models/vit.py
python examples/models/vit.py --machine "v5e 4x4" --strategy "tensor parallel"
"""

import running  # first: it simulates devices

# isort: split
from dataclasses import dataclass
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from running import Strategy, Task, report, trained

from mylib.contracts import fsdp as is_fsdp, never
from mylib.rules import fsdp, replicated, tensor_parallel


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    heads: int
    image: int
    patch: int
    classes: int
    rows: int  # of a batch


SMALL = Size(2, width=32, heads=4, image=16, patch=4, classes=8, rows=16)
LARGE = Size(12, width=1024, heads=16, image=224, patch=16, classes=1024, rows=256)


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, size: Size, key: PRNGKeyArray):
        keys, width = jax.random.split(key, 3), size.width
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(size.heads, width, key=keys[0])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[1])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[2])

    def __call__(self, x: Float[Array, "patches width"]) -> Float[Array, "patches width"]:
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        y = jax.vmap(self.up)(jax.vmap(self.norm2)(x))
        return x + jax.vmap(self.down)(jax.nn.gelu(y))


class VisionTransformer(eqx.Module):
    patches: eqx.nn.Conv2d
    positions: Float[Array, "patches width"]
    blocks: Block  # all of them, stacked
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, size: Size, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        count = (size.image // size.patch) ** 2
        self.patches = eqx.nn.Conv2d(3, size.width, size.patch, size.patch, key=keys[0])
        self.positions = jax.random.normal(keys[1], (count, size.width)) * 0.02
        each = jax.random.split(keys[2], size.layers)
        self.blocks = eqx.filter_vmap(lambda key: Block(size, key))(each)
        self.norm = eqx.nn.LayerNorm(size.width)
        self.head = eqx.nn.Linear(size.width, size.classes, key=keys[3])

    def __call__(self, image: Float[Array, "3 height width"]) -> Float[Array, "classes"]:  # noqa: F821
        x = self.patches(image).reshape(len(self.positions[0]), -1).T + self.positions
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, arrays: (eqx.combine(arrays, static)(x), None), x, arrays)
        return self.head(self.norm(jnp.mean(x, 0)))


Batch = tuple[Float[Array, "rows 3 height width"], Int[Array, "rows"]]  # noqa: F821


def loss(model: VisionTransformer, batch: Batch) -> Float[Array, ""]:
    images, classes = batch
    logits = jax.vmap(model)(images)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, classes))


def task(size: Size) -> Task:
    def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
        # Something to learn: stripes, as wide as the class says.
        rng = np.random.default_rng(number)
        classes = rng.integers(0, size.classes, size.rows, np.int32)
        waves = np.sin(np.arange(size.image) * (1 + classes[:, None]) / 4)
        images = waves[:, None, None] + 0.1 * rng.normal(size=(size.rows, 3, size.image, 1))
        return images.astype(np.float32), classes

    return Task(lambda key: VisionTransformer(size, key), loss, batch, Block)


USED = tensor_parallel("model", column=["up"], row=["down"]) | replicated()
STRATEGIES = {
    "FSDP": Strategy(
        {"data": -1},
        fsdp("data", min_size=1024),
        replicated(),
        "data",
        (is_fsdp("data", argument="model"),),
    ),
    "data parallel": Strategy(
        {"data": -1}, replicated(), replicated(), "data", (never("all-gather", "data"),)
    ),
    "tensor parallel": Strategy(
        {"data": -1, "model": 2},
        USED,
        USED,
        "data",
        (never("all-gather", "model"), never("all-to-all", "model")),
    ),
}

if __name__ == "__main__":
    running.main(STRATEGIES, trained(task(SMALL)), partial(report, task(LARGE)))
