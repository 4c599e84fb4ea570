"""Kernels of which it is known which of their dimensions are split alike."""

import re
from collections.abc import Collection, Iterable, Sequence
from string import ascii_lowercase
from typing import Any

import jax.numpy as jnp

from ..compat import names
from ..jaxprs import KERNEL, kernel_of, shape_of
from ..products import flops_of_kernel
from .applied import Applied, Rules


def _kernel(op: Applied) -> None:
    """A call that `mylib.opaque` was told how to split."""
    call, splits = kernel_of(op.eqn.source)
    op.program.kernels.append((call.name, [x.nodes for x in op.ins]))
    work = call.work(op.in_avals)
    if work is None:
        op.program.unpriced.append(op.line)
    first = _by_letters(op, (*splits.operands, *splits.results), splits.parts, work or 0.0)
    for letter, node in first.items():
        op.dims.limit(node, splits.parts[letter])


def _by_letters(
    op: Applied, letters: Iterable[Sequence[str]], split: Collection[str], flops: float
) -> dict[str, int]:
    """Operands and results whose dimensions have letters: those in `split` are split alike, and all
    others are whole. Returns a dimension of each of these letters.
    """
    alike: dict[str, list[int]] = {}
    whole: list[int] = []
    for x, names_of in zip((*op.ins, *op.outs), letters, strict=True):
        for node, letter in zip(x.nodes, names_of, strict=True):
            if letter in split:
                alike.setdefault(letter, []).append(node)
            else:
                whole.append(node)
    for nodes in alike.values():
        op.tie(*nodes)
    op.needs_whole(whole)
    avals = (*op.in_avals, *op.out_avals)
    floats = [x.dtype for x in avals if jnp.issubdtype(x.dtype, jnp.floating)]
    dtype = max(floats, key=lambda x: x.itemsize, default="float32")
    first = {letter: nodes[0] for letter, nodes in alike.items()}
    op.computes(flops, tuple(first.values()), dtype)
    return first


def _attended(op: Applied) -> None:
    """Attention of cuDNN, whose rows and heads are independent."""
    order = ("b", "t", "n", "h") if op.param(names.PARAM_LAYOUT) == 0 else ("b", "n", "t", "h")
    avals = (*op.in_avals, *op.out_avals)
    of_rank = {4: order, 3: "bnt"}
    letters = [of_rank.get(len(shape_of(x)), "-" * len(shape_of(x))) for x in avals]
    (b, n, t, h), s = (op.shape(0)[order.index(x)] for x in "bnth"), op.shape(1)
    # Two products forward, and five backward.
    count = 2 if op.eqn.name == names.CUDNN_FORWARD else 5
    _by_letters(op, letters, "bn", 2.0 * count * b * n * t * h * s[order.index("t")])


def _pallas(op: Applied) -> None:
    """A kernel of splash attention, known by its name, whose rows and heads are independent: all
    but the last two dimensions of what isn't a mask. All other kernels are unknown.
    """
    name = op.eqn.params.get(names.PARAM_NAME) or ""
    if not re.search(names.KERNEL_SPLASH, name):
        op.unknown()
        return
    op.program.alone.setdefault(name, op.line)

    def letters(aval: Any) -> str:
        rank = len(shape_of(aval))
        is_mask = not jnp.issubdtype(aval.dtype, jnp.floating)
        return "-" * rank if is_mask else ascii_lowercase[: rank - 2] + "--"

    flops = flops_of_kernel(op.eqn.source)
    each = map(letters, (*op.in_avals, *op.out_avals))
    _by_letters(op, each, ascii_lowercase, flops or 0.0)


RULES: Rules = {
    KERNEL: _kernel,
    names.CUDNN_BACKWARD: _attended,
    names.CUDNN_FORWARD: _attended,
    names.PALLAS: _pallas,
}
