"""Counts the products of one instruction: the pairs of numbers that are multiplied and added."""

import json
import math
import re

from .._products import meetings
from .attribution import is_of_dot
from .hlo import Instruction
from .values import Value, computed

_NARROW = re.compile(r"f(\d)(e\w+)")
_WORDS = {"f": "float", "s": "int", "u": "uint", "c": "complex"}


def dtype_of(x: Instruction) -> str:
    """JAX's name of the dtype that is multiplied: that of the wider operand."""
    # A kernel may take tables of indices first.
    factors = [] if x.target == "tpu_custom_call" else x.inputs()[:2]
    arrays = [array for y in factors for array in y.arrays[:1]] or x.arrays[:1]
    return _named(max(arrays, key=lambda array: array.bytes / max(1, array.size)).dtype)


def _named(dtype: str) -> str:
    narrow = _NARROW.fullmatch(dtype)
    if narrow is not None:
        return f"float{narrow[1]}_{narrow[2]}"
    return "bfloat16" if dtype == "bf16" else _WORDS.get(dtype[0], dtype[0]) + dtype[1:]


def products_of(x: Instruction) -> int | None:
    """How many products an instruction computes itself, without the computations that it calls. 0
    for one that is bound by memory; None for a kernel whose work is not in the program.
    """
    match x.opcode:
        case "dot" | "scaled-dot":
            return _dot(x, x.attribute("lhs_contracting_dims"))
        case "convolution":
            return _convolution(x)
        case "cholesky":
            return _cholesky(x)
        case "triangular-solve":
            return _triangular_solve(x)
        # Compilers take products apart: those with a vector, and those that add nothing.
        case "multiply" if is_of_dot(x) and x.arrays[0].size > 1:
            return x.arrays[0].size
        case "reduce" if is_of_dot(x):
            return _reduced(x)
        case "ragged-dot":
            return None
        case "custom-call":
            return _called(x)
    return 0


def _called(x: Instruction) -> int | None:
    target = x.target
    count = next((f for pattern, f in _KERNELS if re.fullmatch(pattern, target)), None)
    if count is not None:
        return count(x)
    return 0 if _BOUND_BY_MEMORY.fullmatch(target) else None


def _dot(x: Instruction, contracted: str) -> int:
    size = x.arrays[0].size
    for dim in re.findall(r"\d+", contracted):
        size *= x.operand(0).arrays[0].shape[int(dim)]
    return size


def _reduced(x: Instruction) -> int:
    """The products that are added, unless they have a name and are counted themselves."""
    added = computed(Value(x.operand(0))).made_by
    while added.opcode == "reduce-window":  # the CPU's compiler adds in two steps
        added = computed(Value(added.operand(0))).made_by
    is_counted = added.opcode != "multiply" or is_of_dot(added)
    return 0 if is_counted else added.arrays[0].size


def _gemm(x: Instruction) -> int:
    match = re.search(r'"lhs_contracting_dimensions": ?\[([^\]]*)\]', x.attributes)
    return _dot(x, match[1] if match else "")


def _convolution(x: Instruction) -> int:
    input, kernel, result = x.operand(0), x.operand(1), x
    # Gradients by cuDNN have the window and the labels of the convolution that they belong to.
    if "BackwardInput" in x.target:
        input, result = result, input
    if "BackwardFilter" in x.target:
        kernel, result = result, kernel
    labels = re.fullmatch(r"([^_]*)_([^-]*)->(.*)", x.attribute("dim_labels"))
    assert labels is not None
    lhs, rhs, out = (
        dict(zip(text, y.arrays[0].shape, strict=True))
        for text, y in zip(labels.groups(), (input, kernel, result), strict=True)
    )
    # A channel may be split into two dimensions, the second of which is called `?`.
    size = out["b"] * math.prod(out[c] for c in out if c in "f?") * rhs["i"]
    window = dict(re.findall(r"(\w+)=([\d_x\-]+)", x.attribute("window")))
    for i in range(sum(c.isdigit() for c in out)):
        stride, dilation, holes = (
            int(window[name].split("x")[i]) if name in window else 1
            for name in ("stride", "rhs_dilate", "lhs_dilate")
        )
        low = int(window["pad"].split("x")[i].split("_")[0]) if "pad" in window else 0
        place = str(i)
        size *= meetings(out[place], stride, rhs[place], dilation, lhs[place], holes, low)
    return size


def _attention(x: Instruction) -> int | None:
    """Two products forward, and five backward: the scores are computed again."""
    config = json.loads(x.attribute("backend_config") or "{}").get("cudnn_fmha_backend_config")
    if config is None:
        return None
    scores = math.prod(int(n) for n in config["intermediate_tensor_shape"]["dimensions"])
    size = scores * x.operand(0).arrays[0].shape[-1]
    size *= 5 if "Backward" in x.target else 2
    return size // 2 if "CAUSAL" in config.get("mask_type", "") else size


def _cholesky(x: Instruction) -> int:
    array = x.operand(0).arrays[0]
    return array.size * array.shape[-1] // 6


def _triangular_solve(x: Instruction) -> int:
    a, b = (y.arrays[0] for y in x.inputs()[:2])
    return b.size * a.shape[-1] // 2


def _stated(x: Instruction) -> int | None:
    """What the author of a Pallas kernel has stated as its cost."""
    match = re.search(r'"cost_estimate": ?\{"flops": ?"(\d+)"', x.attributes)
    return int(match[1]) // 2 if match else None


_KERNELS = (
    (r"__cublas\$(lt\$)?(gemm|matmul)(\$f8|\$mx)?", _gemm),
    (r"__cudnn\$conv\w*(Forward|Backward)\w*", _convolution),
    (r"__cudnn\$fmha\w+", _attention),
    (r"Cholesky|(lapack|cusolver)_\w*potrf\w*", _cholesky),
    (r"(lapack|cublas)_\w*trsm\w*|__cublas\$triangularSolve", _triangular_solve),
    (r"tpu_custom_call", _stated),
)  # fmt: skip
# Custom calls that compute nothing, or little for what they read and write.
_BOUND_BY_MEMORY = re.compile(
    r"""AllocateBuffer|CreateBuffer|AsyncCollective(Start|Done)|ConcatBitcast|X64\w+|Sharding
    |SPMD\w+|LayoutConstraint|MoveTo(Host|Device)|annotate_device_placement|device_placement|Pin
    |Unpin|SliceToDynamic|Pad(Real)?ToStatic|DynamicGather|AssumeGatherIndicesInBound
    |GatherScatterIndicesBitpacked|GetHostDesc\w*|TopK|PartialReduce|ApproxTopK|RngBitGenerator
    |InvertDiagBlocks\w+|ResizeNearest\w*|ResizeBilinear\w*|Erf\w*|__topk\$.*|__gpu\$TopK
    |__cub\$.*|xla_(ffi_)?(partitioned_)?python_(cpu|gpu)_callback|InspectSharding""",
    re.VERBOSE,
)
