"""Small programs of one device, with what they compute and move by theory."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

BF16 = "bfloat16"
MIB = 2**20


class Program(NamedTuple):
    """`flops` counts multiplications and additions; `bytes` what must be read and written once."""

    fun: Callable[..., Any]
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    flops: int
    dtype: str = BF16
    bytes: int | None = None
    donated: tuple[int, ...] = ()

    def as_float32(self):
        """XLA's older CPU compiler multiplies bfloat16 as float32, in copies that it writes."""
        shapes = tuple((shape, dtype.replace(BF16, "float32")) for shape, dtype in self.shapes)
        size = self.bytes
        if size is not None and shapes != self.shapes:
            size *= 2
        dtype = self.dtype.replace(BF16, "float32")
        return self._replace(shapes=shapes, dtype=dtype, bytes=size)

    def compiled(self, mesh, options=None):
        whole = NamedSharding(mesh, P())
        args = [jax.ShapeDtypeStruct(*shape, sharding=whole) for shape in self.shapes]
        jitted = jax.jit(self.fun, donate_argnums=self.donated)
        return jitted.lower(*args).compile(options)


def _dot(out):
    return lambda a, b: jnp.dot(a, b, preferred_element_type=out)


def _conv(x, w, strides=(1, 1), groups=1):
    return lax.conv_general_dilated(
        x,
        w,
        strides,
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def _gradients(fun, *args):
    def loss(*args):
        return (fun(*args).astype("float32") ** 2).sum()

    return jax.grad(loss, argnums=(0, 1))(*args)


def _layers(w, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def _branches(i, x, w):
    one, three = lambda x, w: x @ w, lambda x, w: x @ w @ w @ w
    return lax.switch(i, [one, three, lambda x, w: x], x, w)


_PRODUCT = 2 * 512 * 1024 * 256
_IMAGE = ((8, 32, 32, 64), BF16)
# Taps that meet a pixel: of 32 rows the first and the last meet 2 of 3, with stride 2 (which pads
# only at the end) the last of 16.
_TAPS, _STRIDED = 3 * 32 - 2, 3 * 16 - 1
_CONV = 2 * 8 * _TAPS**2 * 64 * 128

PROGRAMS = {
    "product": Program(
        _dot(None),
        (((512, 1024), BF16), ((1024, 256), BF16)),
        _PRODUCT,
        bytes=2 * (512 * 1024 + 1024 * 256 + 512 * 256),
    ),
    "float32 result": Program(
        _dot("float32"), (((512, 1024), BF16), ((1024, 256), BF16)), _PRODUCT
    ),
    "int8": Program(
        _dot("int32"), (((512, 1024), "int8"), ((1024, 256), "int8")), _PRODUCT, "int8"
    ),
    "float8": Program(
        _dot("float32"),
        (((512, 1024), "float8_e4m3fn"), ((1024, 256), "float8_e4m3fn")),
        _PRODUCT,
        "float8_e4m3fn",
    ),
    "batched": Program(
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
        (((384, 128, 128), BF16), ((384, 128, 128), BF16)),
        2 * 384 * 128**3,
        bytes=3 * 2 * 384 * 128**2,
    ),
    "matrix times vector": Program(
        lambda a, b: a @ b,
        (((512, 1024), "float32"), ((1024,), "float32")),
        2 * 512 * 1024,
        "float32",
        4 * (512 * 1024 + 512 + 1024),
    ),
    "scan": Program(_layers, (((50, 256, 256), BF16), ((256, 256), BF16)), 50 * 2 * 256**3),
    "switch": Program(
        _branches, (((), "int32"), ((256, 256), BF16), ((256, 256), BF16)), 3 * 2 * 256**3
    ),
    "cache": Program(
        lambda cache, x, i: lax.dynamic_update_slice(cache, x, (0, i, 0)),
        (((8, 8192, 128), BF16), ((8, 8, 128), BF16), ((), "int32")),
        0,
        bytes=2 * 2 * 8 * 8 * 128,
        donated=(0,),
    ),
    "convolution": Program(_conv, (_IMAGE, ((3, 3, 64, 128), BF16)), _CONV),
    "convolution's gradients": Program(
        functools.partial(_gradients, _conv), (_IMAGE, ((3, 3, 64, 128), BF16)), 3 * _CONV
    ),
    "strided": Program(
        functools.partial(_gradients, functools.partial(_conv, strides=(2, 2))),
        (_IMAGE, ((3, 3, 64, 128), BF16)),
        3 * 2 * 8 * _STRIDED**2 * 64 * 128,
    ),
    "depthwise": Program(
        functools.partial(_gradients, functools.partial(_conv, groups=64)),
        (_IMAGE, ((3, 3, 1, 64), BF16)),
        3 * 2 * 8 * _TAPS**2 * 64,
    ),
}
