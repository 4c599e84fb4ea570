"""Counts the products of one instruction: the pairs of numbers that are multiplied and added."""

import json
import math
import re

from ..._core.errors import AuditError
from ..._core.products import meetings, products_of_splash
from .attributes import factors_of, labels_of, window_of
from .attribution import is_of_dot
from .hlo import Instruction
from .values import Value, computed


def dtype_of(x: Instruction) -> str:
    """JAX's name of the dtype that is multiplied: that of the wider operand."""
    # A kernel may take tables of indices first.
    factors = [] if x.target == "tpu_custom_call" else x.inputs()[:2]
    arrays = [array for y in factors for array in y.arrays[:1]] or x.arrays[:1]
    return max(arrays, key=lambda array: array.bytes / max(1, array.size)).jax_dtype


def products_of_instruction(x: Instruction) -> int | None:
    """How many products an instruction computes itself, without the computations that it calls. 0
    for one that is bound by memory; None for a kernel whose work is not in the program.
    """
    return _COUNTS[x.row.count](x) if x.row.count else 0


def _multiplied(x: Instruction) -> int:
    """Compilers take products apart: those with a vector, and those that add nothing."""
    # A single number is a scale.
    return x.arrays[0].size if is_of_dot(x) and x.arrays[0].size > 1 else 0


def _gemm(x: Instruction) -> int | None:
    """Of a library, which may take one factor of a batch for all of it."""
    try:
        _, _, dims, _ = factors_of(x)
    except AuditError:
        return None
    lhs = x.operand(0).arrays[0]
    return x.arrays[0].size * math.prod(lhs.shape[i] for i in dims)


def _dot(x: Instruction) -> int:
    """Its shapes must fit: HLO leaves out the dimensions of a batch where there are none."""
    (lhs, rhs), out = (y.arrays[0] for y in x.inputs()[:2]), x.arrays[0]
    lhs_batch, _, lhs_dims, _ = factors_of(x)
    contracted = math.prod(lhs.shape[i] for i in lhs_dims)
    batch = math.prod(lhs.shape[i] for i in lhs_batch)
    if out.size * contracted**2 * batch != lhs.size * rhs.size:
        raise AuditError(f"the shapes of {x} don't fit the dimensions that it contracts")
    return out.size * contracted


def _reduced(x: Instruction) -> int:
    """The products that are added, unless they have a name and are counted themselves."""
    if not is_of_dot(x):
        return 0
    added = computed(Value(x.operand(0))).made_by
    while added.opcode == "reduce-window":  # the CPU's compiler adds in two steps
        added = computed(Value(added.operand(0))).made_by
    is_counted = added.opcode != "multiply" or is_of_dot(added)
    return 0 if is_counted else added.arrays[0].size


def _convolution(x: Instruction) -> int:
    input, kernel, result = x.operand(0), x.operand(1), x
    # Gradients by cuDNN have the window and the labels of the convolution that they belong to.
    if "BackwardInput" in x.target:
        input, result = result, input
    if "BackwardFilter" in x.target:
        kernel, result = result, kernel
    lhs, rhs, out = (
        dict(zip(text, y.arrays[0].shape, strict=True))
        for text, y in zip(labels_of(x), (input, kernel, result), strict=True)
    )
    # A channel may be split into two dimensions, the second of which is called `?`.
    size = out["b"] * math.prod(out[c] for c in out if c in "f?") * rhs["i"]
    places = sorted(filter(str.isdigit, out))
    window = window_of(x, len(places))
    for place, stride, dilation, holes, (low, _) in zip(
        places, window.stride, window.dilation, window.holes, window.pads, strict=True
    ):
        size *= meetings(out[place], stride, rhs[place], dilation, lhs[place], holes, low)
    return size


def _attention(x: Instruction) -> int | None:
    """Two products forward, and five backward: the scores are computed again."""
    try:
        config = json.loads(x.attribute("backend_config"))["cudnn_fmha_backend_config"]
        scores = math.prod(int(n) for n in config["intermediate_tensor_shape"]["dimensions"])
        is_causal = "CAUSAL" in config["mask_type"]
    except KeyError:
        return None
    size = scores * x.operand(0).arrays[0].shape[-1]
    size *= 5 if "Backward" in x.target else 2
    # Half of the scores are masked, and the kernels leave their blocks out.
    return size // 2 if is_causal else size


def _stated(x: Instruction) -> int | None:
    """What the author of a Pallas kernel has stated as its cost, or what its name tells."""
    match = re.search(r'"cost_estimate": ?\{"flops": ?"(\d+)"', x.text)
    if match:
        return int(match[1]) // 2
    arrays = [array for y in x.inputs() for array in y.arrays[:1]]
    shapes = [(tuple(y.shape), y.dtype[0] in "sup") for y in arrays]
    return products_of_splash(x.name, shapes, len(x.arrays))


# By the column `count` of the tables of opcodes and of targets.
_COUNTS = {
    "attention": _attention,
    "convolution": _convolution,
    "dot": _dot,
    "gemm": _gemm,
    "multiplied": _multiplied,
    "reduced": _reduced,
    "stated": _stated,
    "unknown": lambda x: None,
}
