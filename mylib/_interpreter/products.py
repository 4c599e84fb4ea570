"""Products, convolutions and windows, also those of libraries."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from .._audit import Array, Instruction
from .layouts import cannot, dtype_of
from .moves import numbers, operation


def _product(a: Any, b: Any, contracted: Any, batch: Any) -> Any:
    """`contracted` and `batch` are pairs of lists of dimensions."""
    left = "abcdefghij"[: a.ndim - 1]
    right = list("klmnopqrst"[: b.ndim - 1])
    pairs = [pair for of in (contracted, batch) for pair in zip(*of, strict=True)]
    for i, j in pairs:
        right[j] = left[i]
    gone = {left[i] for i in (*contracted[0], *batch[0])}
    rows = "".join(left[i] for i in batch[0])
    result = rows + "".join(c for c in (*left, *right) if c not in gone)
    return np.einsum(f"z{left},z{''.join(right)}->z{result}", a, b, optimize=True)


def _dot(run: Any, x: Instruction, a: Any, b: Any) -> Any:
    names = ("lhs_contracting_dims", "rhs_contracting_dims", "lhs_batch_dims", "rhs_batch_dims")
    dims = [numbers(x.attributes.get(name)) for name in names]
    return _product(a, b, dims[:2], dims[2:])


class _Sliding:
    def __init__(self, text: str | None, rank: int):
        fields = dict(part.split("=") for part in (text or "{}")[1:-1].split())

        def each(name: str, default: int) -> Any:
            return numbers(fields[name].replace("x", " ")) if name in fields else [default] * rank

        self.size, self.stride = each("size", 1), each("stride", 1)
        self.inside, self.dilation = each("lhs_dilate", 1), each("rhs_dilate", 1)
        self.reversed = each("rhs_reversal", 0)
        pads = fields["pad"].split("x") if "pad" in fields else ["0_0"] * rank
        self.pads: list[Any] = [tuple(map(int, pad.split("_"))) for pad in pads]


def _convolved(x: Instruction, a: Any, b: Any) -> Any:
    """Of each device's arrays, as the attributes of `x` say."""
    left, _, rest = x.attribute("dim_labels").partition("_")
    right, _, result = rest.partition("->")
    rank = len(left) - 2
    window = _Sliding(x.attributes.get("window"), rank)
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
            a, lax.rev(b, turned), window.stride, window.pads, window.inside, window.dilation, dims,
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
    w = _Sliding(x.attributes.get("window"), a.ndim - 1)
    # The devices are a dimension with windows of one.
    result = lax.reduce_window(
        jnp.asarray(a), rest[0][0].astype(a.dtype), _WINDOWS[opcode], (1, *w.size), (1, *w.stride),
        ((0, 0), *w.pads), (1, *w.inside), (1, *w.dilation),
    )  # fmt: skip
    return np.asarray(result)


def _select_and_scatter(run: Any, x: Instruction, a: Any, source: Any, init: Any) -> Any:
    select, scatter = map(operation, x.calls)
    is_max = select.opcode == "compare" and select.attribute("direction") == "GE"
    if not is_max or scatter.opcode != "add" or init.any():
        raise cannot("select-and-scatter that isn't the gradient of a largest number")
    w = _Sliding(x.attributes.get("window"), a.ndim - 1)
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
    contracting, batch = (
        [
            [int(d) for d in config["dot_dimension_numbers"].get(f"{side}_{kind}_dimensions", [])]
            for side in ("lhs", "rhs")
        ]
        for kind in ("contracting", "batch")
    )
    y, rest = float(config.get("alpha_real", 1)) * _product(a, b, contracting, batch), list(others)
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
        result = x.attribute("dim_labels").partition("->")[2]
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


def _first(run: Any, x: Instruction, a: Any, *rest: Any) -> Any:
    return a


def _room(run: Any, x: Instruction, *operands: Any) -> Any:
    return _nothing(run, x.arrays[0])


RULES = {
    "dot": _dot, "convolution": _convolution, "reduce-window": _reduce_window,
    "select-and-scatter": _select_and_scatter, "cholesky": _cholesky, "topk": _top_k,
}  # fmt: skip
TARGETS = {
    "__cublas$gemm": _gemm, "__cublas$lt$matmul": _gemm, "TopK": _top_k, "__gpu$TopK": _top_k,
    **dict.fromkeys(
        ("Forward", "BiasActivationForward", "BackwardInput", "BackwardFilter"), _cudnn
    ),
    **dict.fromkeys(("AllocateBuffer", "CreateBuffer"), _room),
    **dict.fromkeys(
        # The last one tells how indices may be kept; tests/interpreter shows that it changes none.
        """Sharding SPMDFullToShardShape SPMDShardToFullShape annotate_device_placement MoveToHost
        MoveToDevice LayoutConstraint AssumeGatherIndicesInBound
        GatherScatterIndicesBitpacked""".split(),
        _first,
    ),
}  # fmt: skip
TARGETS |= {f"__cudnn$conv{kind}": TARGETS.pop(kind) for kind in [*TARGETS] if "ward" in kind}
