"""A Pallas kernel with a custom derivative, in a model that is sharded over two mesh axes.

JAX can't see into a kernel, so inside `shard_map` it does not know how the result varies between
the devices. The usual workaround is `check_vma=False`; then the gradient is summed over every axis
that a spec doesn't name, needed or not. `mylib.opaque` supplies the missing information: the result
varies over the same axes as the arguments. Then only the necessary sums are communicated.

The kernel normalises rows and scales them. It runs on simulated devices on the CPU, in the mode in
which Pallas simulates a TPU (`InterpretParams`); `interpret=True` does not keep JAX's types.
"""

import os

# JAX reads these when it starts, so they come before its import. NPROC is the number of threads
# that the simulated devices share: JAX 0.10 needs one per device, however few cores there are.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["NPROC"] = "32"
os.environ["JAX_PLATFORMS"] = "cpu"

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

import mylib

MESH = mylib.make_mesh(data=4, model=2)

Rows = Float[Array, "rows width"]
Width = Float[Array, " width"]


def like(x: Array) -> jax.ShapeDtypeStruct:
    """The type of a result: inside `mylib.opaque` it varies over the same axes as all arguments."""
    varies = jax.typeof(x).manual_axis_type
    return jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=varies)


def call(kernel: Any, *args: Array, shape: jax.ShapeDtypeStruct) -> Array:
    return pl.pallas_call(kernel, out_shape=shape, interpret=pltpu.InterpretParams())(*args)


def kernel(x: Any, scale: Any, y: Any) -> None:
    size = jnp.sqrt(jnp.mean(x[...] ** 2, axis=-1, keepdims=True) + 1e-6)
    y[...] = x[...] / size * scale[...]


def kernel_of_gradient(x: Any, scale: Any, dy: Any, dx: Any) -> None:
    size = jnp.sqrt(jnp.mean(x[...] ** 2, axis=-1, keepdims=True) + 1e-6)
    unit, g = x[...] / size, dy[...] * scale[...]
    dx[...] = (g - unit * jnp.mean(g * unit, axis=-1, keepdims=True)) / size


def forward(x: Rows, scale: Width) -> tuple[Rows, tuple[Rows, Width]]:
    return normalised(x, scale), (x, scale)


def backward(kept: tuple[Rows, Width], dy: Rows) -> tuple[Rows, Width]:
    x, scale = kept
    dx = call(kernel_of_gradient, x, scale, dy, shape=like(x))
    unit = call(kernel, x, jnp.ones_like(scale), shape=like(x))
    return dx, jnp.sum(dy * unit, axis=0)


@mylib.opaque(fwd=forward, bwd=backward)
def normalised(x: Rows, scale: Width) -> Rows:
    return call(kernel, x, scale, shape=like(x))


def reference(x: Rows, scale: Width) -> Rows:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def main() -> None:
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    scale = jnp.linspace(0.5, 1.5, 32)

    def gradient(f: Any, x: Rows, scale: Width) -> Any:
        return jax.grad(lambda x, scale: jnp.sum(jnp.sin(f(x, scale))), (0, 1))(x, scale)

    wanted = gradient(reference, jnp.asarray(x), scale)
    print("all-reduces in the gradient of 64 rows, split over 'data', on a mesh with 'model', too")
    for checked in (False, True):
        mapped = mylib.filter_shard_map(
            normalised,
            mesh=MESH,
            in_specs=(P("data", None), P()),
            out_specs=P("data", None),
            check_vma=checked,
        )
        compiled = mylib.filter_jit(functools.partial(gradient, mapped))
        for ours, theirs in zip(compiled(x, scale), wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)
        text = compiled.lower(x, scale).compile().as_text()
        count = text.count(" all-reduce(") + text.count(" all-reduce-start(")
        assert count == (1 if checked else 2)
        print(f"  check_vma={checked}: {count}")
    print("The one that is left sums the gradient of the scale over 'data'.")


if __name__ == "__main__":
    main()
