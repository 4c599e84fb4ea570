"""Products, convolutions and windows, also those of libraries."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from numpy import ndarray

from ..audit import Array, Instruction, factors_of, labels_of, window_of
from ..elementwise import in_total_order
from .layouts import Interpreting, Value, cannot, dtype_of


def _as_result(x: Instruction, *factors: ndarray) -> list[ndarray]:
    """Whole numbers are multiplied and added in the result's type."""
    return [v.astype(dtype_of(x.arrays[0])) for v in factors]


def _product(run: Interpreting, x: Instruction, a: ndarray, b: ndarray) -> ndarray:
    a, b = _as_result(x, a, b)
    *batch, lhs, rhs = factors_of(x)
    left = "abcdefghij"[: a.ndim - 1]
    right = list("klmnopqrst"[: b.ndim - 1])
    for i, j in [*zip(*batch, strict=True), *zip(lhs, rhs, strict=True)]:
        right[j] = left[i]
    gone = {left[i] for i in (*batch[0], *lhs)}
    rows = "".join(left[i] for i in batch[0])
    result = rows + "".join(c for c in (*left, *right) if c not in gone)
    return np.einsum(f"z{left},z{''.join(right)}->z{result}", a, b, optimize=True)


def _convolved(x: Instruction, a: ndarray, b: ndarray) -> Value:
    """Of each device's arrays, as the attributes of `x` say."""
    left, right, result = labels_of(x)
    rank = len(left) - 2
    window = window_of(x, rank)
    turned = [right.index(str(i)) for i in range(rank) if window.reversed[i]]

    def spec(labels: str, *names: str) -> tuple[int, ...]:
        return tuple(map(labels.index, (*names, *map(str, range(rank)))))

    dims = lax.ConvDimensionNumbers(
        spec(left, "b", "f"), spec(right, "o", "i"), spec(result, "b", "f")
    )
    by_feature, by_batch = (
        int(x.attributes.get(f"{kind}_group_count", 1)) for kind in ("feature", "batch")
    )

    def of_device(a: Value, b: Value) -> jax.Array:
        return lax.conv_general_dilated(
            a, lax.rev(b, turned), window.stride, window.pads, window.holes, window.dilation, dims,
            by_feature, by_batch, precision="highest",
        )  # fmt: skip

    if isinstance(a, Tracer) or isinstance(b, Tracer):
        return jnp.stack([of_device(*pair) for pair in zip(a, b, strict=True)])
    return np.stack([np.asarray(of_device(*pair)) for pair in zip(a, b, strict=True)])


def _convolution(run: Interpreting, x: Instruction, a: ndarray, b: ndarray) -> ndarray:
    return _convolved(x, *_as_result(x, a, b))


def _config(x: Instruction, name: str) -> dict[str, Any]:
    config = json.loads(x.attribute("backend_config"))
    return config.get(name, config)


def _nothing(run: Interpreting, array: Array) -> ndarray:
    return np.zeros((run.devices, *array.shape), dtype_of(array))


def _with_workspace(run: Interpreting, x: Instruction, *results: ndarray) -> Value:
    """The results, and zeros for the others that the call has."""
    results = (*results, *(_nothing(run, array) for array in x.arrays[len(results) :]))
    return results if x.type.startswith("(") else results[0]


def _gemm(run: Interpreting, x: Instruction, a: ndarray, b: ndarray, *others: ndarray) -> Value:
    config = _config(x, "gemm_backend_config")
    y, rest = float(config.get("alpha_real", 1)) * _product(run, x, a, b), list(others)
    y = y.reshape(run.devices, *x.arrays[0].shape)
    if float(config.get("beta", 0)):
        y = y + float(config["beta"]) * rest.pop(0)
    epilogue = config.get("epilogue", "DEFAULT")
    y, aux = _after(epilogue, y, rest)
    return _with_workspace(run, x, y, *aux)


def _after(epilogue: str, y: ndarray, rest: list[ndarray]) -> tuple[ndarray, tuple[ndarray, ...]]:
    """What cuBLAS does with a product, and what it keeps of it."""
    left = epilogue
    if "BIAS" in left:
        bias = rest.pop(0)
        y = y + bias.reshape((len(y),) + (1,) * (y.ndim - bias.ndim) + bias.shape[1:])
    aux = (y,) if "AUX" in left else ()
    for word in ("BIAS", "AUX", "DEFAULT", "_"):
        left = left.replace(word, "")
    if left not in ("", "RELU", "GELU"):
        raise cannot(f"the epilogue {epilogue}")
    y = np.maximum(y, 0) if left == "RELU" else y
    return (np.asarray(jax.nn.gelu(y)) if left == "GELU" else y), aux


def _cudnn(run: Interpreting, x: Instruction, a: ndarray, b: ndarray, *rest: ndarray) -> Value:
    config = _config(x, "cudnn_conv_backend_config")
    kind, scale = x.target.removeprefix("__cudnn$conv"), float(config.get("conv_result_scale", 1))
    if kind in ("BackwardInput", "BackwardFilter"):
        # The transposes of the convolution whose labels and window these calls have.
        is_input = kind == "BackwardInput"
        forward = (lambda v: _convolved(x, v, b)) if is_input else (lambda v: _convolved(x, a, v))
        shape = jax.ShapeDtypeStruct((run.devices, *x.arrays[0].shape), np.float64)
        (y,) = jax.linear_transpose(forward, shape)(a if is_input else b)
        return _with_workspace(run, x, scale * np.asarray(y))
    y = scale * _convolved(x, a, b)
    if kind == "BiasActivationForward":
        bias, *side = rest
        result = labels_of(x)[2]
        y = y + bias.reshape(len(y), *(bias.shape[1] if c == "f" else 1 for c in result))
        y = y + float(config.get("side_input_scale", 1)) * side[0] if side else y
        mode = config.get("activation_mode", "kNone")
        if mode not in ("kNone", "kRelu"):
            raise cannot(f"the activation {mode}")
        y = np.maximum(y, 0) if mode == "kRelu" else y
    elif kind != "Forward":
        raise cannot(f"the custom call {x.target}")
    return _with_workspace(run, x, y)


def _cholesky(run: Interpreting, x: Instruction, a: ndarray) -> ndarray:
    lower = x.attributes.get("lower") == "true"
    return np.linalg.cholesky(a) if lower else np.linalg.cholesky(a, upper=True)


def _top_k(run: Interpreting, x: Instruction, a: ndarray) -> Value:
    n, k = a.shape[-1], x.arrays[0].shape[-1]
    descending = [c.result.attributes.get("direction") == "GT" for c in x.calls]
    if x.attributes.get("largest", "true") != "true" or not all(descending):
        raise cannot("the least numbers by top_k")
    # Of equal ones the first.
    order = n - 1 - np.argsort(in_total_order(a)[..., ::-1], -1, kind="stable")[..., : -k - 1 : -1]
    return _with_workspace(run, x, np.take_along_axis(a, order, -1), order.astype(np.int32))


def first(run: Interpreting, x: Instruction, a: ndarray, *rest: ndarray) -> ndarray:
    return a


def room(run: Interpreting, x: Instruction, *operands: ndarray) -> ndarray:
    return _nothing(run, x.arrays[0])


# Of custom calls by their targets.
RULES = {
    "dot": _product, "convolution": _convolution, "cholesky": _cholesky,
    **dict.fromkeys(("topk", "TopK", "__gpu$TopK"), _top_k),
    **dict.fromkeys(("__cublas$gemm", "__cublas$lt$matmul"), _gemm),
    **{
        f"__cudnn$conv{kind}": _cudnn
        for kind in ("Forward", "BiasActivationForward", "BackwardInput", "BackwardFilter")
    },
    **dict.fromkeys(
        # The last one tells how indices may be kept; tests/interpreter shows that it changes none.
        (
            "SPMDFullToShardShape", "SPMDShardToFullShape", "LayoutConstraint",
            "GatherScatterIndicesBitpacked",
        ),
        first,
    ),
}  # fmt: skip
