"""Products, convolutions and windows, also those of libraries."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from .._audit import Array, Instruction, factors_of, labels_of, window_of
from .layouts import cannot, dtype_of
from .moves import operation


def _product(x: Instruction, a: Any, b: Any) -> Any:
    *batch, lhs, rhs = factors_of(x)
    left = "abcdefghij"[: a.ndim - 1]
    right = list("klmnopqrst"[: b.ndim - 1])
    for i, j in [*zip(*batch, strict=True), *zip(lhs, rhs, strict=True)]:
        right[j] = left[i]
    gone = {left[i] for i in (*batch[0], *lhs)}
    rows = "".join(left[i] for i in batch[0])
    result = rows + "".join(c for c in (*left, *right) if c not in gone)
    return np.einsum(f"z{left},z{''.join(right)}->z{result}", a, b, optimize=True)


def _dot(run: Any, x: Instruction, a: Any, b: Any) -> Any:
    return _product(x, a, b)


def _convolved(x: Instruction, a: Any, b: Any) -> Any:
    """Of each device's arrays, as the attributes of `x` say."""
    left, right, result = labels_of(x)
    rank = len(left) - 2
    window = window_of(x, rank)
    turned = [right.index(str(i)) for i in range(rank) if window.reversed[i]]

    def spec(labels: str, *names: str) -> Any:
        return tuple(map(labels.index, (*names, *map(str, range(rank)))))

    dims = lax.ConvDimensionNumbers(
        spec(left, "b", "f"), spec(right, "o", "i"), spec(result, "b", "f")
    )
    by_feature, by_batch = (
        int(x.attributes.get(f"{kind}_group_count", 1)) for kind in ("feature", "batch")
    )

    def of_device(a: Any, b: Any) -> Any:
        return lax.conv_general_dilated(
            a, lax.rev(b, turned), window.stride, window.pads, window.holes, window.dilation, dims,
            by_feature, by_batch, precision="highest",
        )  # fmt: skip

    if isinstance(a, Tracer) or isinstance(b, Tracer):
        return jnp.stack([of_device(*pair) for pair in zip(a, b, strict=True)])
    return np.stack([np.asarray(of_device(*pair)) for pair in zip(a, b, strict=True)])


def _convolution(run: Any, x: Instruction, a: Any, b: Any) -> Any:
    return _convolved(x, a, b)


_WINDOWS = {"add": lax.add, "maximum": lax.max, "minimum": lax.min, "multiply": lax.mul}


def _reduce_window(run: Any, x: Instruction, a: Any, *rest: Any) -> Any:
    opcode = operation(x.called).opcode
    if len(rest) != 1 or opcode not in _WINDOWS:
        raise cannot(f"reduce-window of several arrays, or by {opcode}")
    w = window_of(x, a.ndim - 1)
    # The devices are a dimension with windows of one.
    result = lax.reduce_window(
        jnp.asarray(a), rest[0][0].astype(a.dtype), _WINDOWS[opcode], (1, *w.size), (1, *w.stride),
        ((0, 0), *w.pads), (1, *w.holes), (1, *w.dilation),
    )  # fmt: skip
    return np.asarray(result)


def _select_and_scatter(run: Any, x: Instruction, a: Any, source: Any, init: Any) -> Any:
    select, scatter = map(operation, x.calls)
    is_max = select.opcode == "compare" and select.attribute("direction") == "GE"
    if not is_max or scatter.opcode != "add" or init.any():
        raise cannot("select-and-scatter that isn't the gradient of a largest number")
    w = window_of(x, a.ndim - 1)
    window = (1, *w.size), (1, *w.stride), ((0, 0), *w.pads)
    largest = lambda a: lax.reduce_window(a, -np.inf, lax.max, *window)  # noqa: E731
    return np.asarray(jax.vjp(largest, jnp.asarray(a))[1](jnp.asarray(source))[0])


def _config(x: Instruction, name: str) -> Any:
    config = json.loads(x.attribute("backend_config"))
    return config.get(name, config)


def _nothing(run: Any, array: Array) -> Any:
    return np.zeros((run.devices, *array.shape), dtype_of(array))


def _with_workspace(run: Any, x: Instruction, *results: Any) -> Any:
    """The results, and zeros for the others that the call has."""
    results = (*results, *(_nothing(run, array) for array in x.arrays[len(results) :]))
    return results if x.type.startswith("(") else results[0]


def _gemm(run: Any, x: Instruction, a: Any, b: Any, *others: Any) -> Any:
    config = _config(x, "gemm_backend_config")
    y, rest = float(config.get("alpha_real", 1)) * _product(x, a, b), list(others)
    y = y.reshape(run.devices, *x.arrays[0].shape)
    if float(config.get("beta", 0)):
        y = y + float(config["beta"]) * rest.pop(0)
    epilogue = config.get("epilogue", "DEFAULT")
    y, aux = _after(epilogue, y, rest)
    return _with_workspace(run, x, y, *aux)


def _after(epilogue: str, y: Any, rest: Any) -> Any:
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


def _cudnn(run: Any, x: Instruction, a: Any, b: Any, *rest: Any) -> Any:
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


def _cholesky(run: Any, x: Instruction, a: Any) -> Any:
    lower = x.attributes.get("lower") == "true"
    return np.linalg.cholesky(a) if lower else np.linalg.cholesky(a, upper=True)


def _top_k(run: Any, x: Instruction, a: Any) -> Any:
    k = x.arrays[0].shape[-1]
    order = np.argsort(-a, -1, kind="stable")[..., :k]
    return _with_workspace(run, x, np.take_along_axis(a, order, -1), order.astype(np.int32))


def first(run: Any, x: Instruction, a: Any, *rest: Any) -> Any:
    return a


def room(run: Any, x: Instruction, *operands: Any) -> Any:
    return _nothing(run, x.arrays[0])


# Of custom calls by their targets.
RULES = {
    "dot": _dot, "convolution": _convolution, "reduce-window": _reduce_window,
    "select-and-scatter": _select_and_scatter, "cholesky": _cholesky,
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
