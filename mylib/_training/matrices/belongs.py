"""Which weight each leaf of an optimiser's state belongs to, and what its updates depend on.

Both are read from one trace of `init` and one of `update` on the whole tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from ..._core.belongs import owner_by_flow
from ..._core.compat import names as jax_names
from ..._core.jaxprs import all_equations, line_of, optimiser_of
from ..._core.tree import KeyPath
from .dependence import Bits, dependences
from .transform import Transform, Tree


@dataclass(frozen=True)
class Belonging:
    """`owner` is the number of the weight that a leaf of the state belongs to, by the leaf's path;
    None if it belongs to none, or to several. `needs_params` and `init_reads` are the weights whose
    values `update` and `init` read. `dtypes` are those of the state, and `of_updates` of updates.
    """

    tree: Any
    paths: tuple[KeyPath, ...]
    dtypes: tuple[np.dtype, ...]
    of_updates: list[np.dtype]
    owner: dict[KeyPath, int | None]
    needs_params: frozenset[int]
    init_reads: frozenset[int]


def belonging(
    transform: Transform, params: Tree, leaves: Sequence[str], matrices: Sequence[int]
) -> Belonging:
    """`leaves` are the names of the weights."""
    count = len(leaves)
    init, state = jax.make_jaxpr(transform.init, return_shape=True)(params)
    flat, tree = jtu.tree_flatten_with_path(state)
    paths = tuple(path for path, _ in flat)
    update = jax.make_jaxpr(transform.update)(params, state, params)
    _refuse_random(update)
    each = [1 << i for i in range(count)]
    mixing = _Mixing()
    of_state = at_start = dependences(init, each)
    while True:
        # Weights have bits of their own, to tell whether their values are read.
        values = [bit << count for bit in each]
        results = dependences(update, [*each, *of_state, *values], mixing)
        updates, states = results[:count], results[count:]
        grown = [a | _folded(b, count) for a, b in zip(of_state, states, strict=True)]
        if grown == of_state:
            break
        of_state = grown
    problems = [*_of_updates(updates, leaves, matrices, mixing)]
    problems += _of_state(of_state, paths, leaves, matrices) if not problems else []
    if problems:
        raise ValueError("by_matrix updates each matrix for itself, but\n" + "\n".join(problems))
    owned = zip(paths, of_state, strict=True)
    owner = {path: owner_by_flow(_numbers(bits)).only for path, bits in owned}
    needs = frozenset(_numbers(reduce(or_, results, 0) >> count))
    reads = frozenset(_numbers(reduce(or_, at_start, 0)))
    dtypes = tuple(struct.dtype for _, struct in flat)
    of_updates = [aval.dtype for aval in update.out_avals[:count]]
    return Belonging(tree, paths, dtypes, of_updates, owner, needs, reads)


def _folded(bits: Bits, count: int) -> Bits:
    return (bits | bits >> count) & ((1 << count) - 1)


def _numbers(bits: Bits) -> list[int]:
    return [i for i in range(bits.bit_length()) if bits >> i & 1]


class _Mixing:
    """Remembers where gradients of several weights first meet."""

    def __init__(self):
        self.place = ""

    def __call__(self, eqn: JaxprEqn, operands: Sequence[Bits]) -> None:
        together = reduce(or_, operands, 0)
        if not self.place and any(bits not in (0, together) for bits in operands):
            self.place = optimiser_of(eqn) or line_of(eqn)


def _of_updates(
    updates: Sequence[Bits], leaves: Sequence[str], matrices: Sequence[int], mixing: _Mixing
) -> list[str]:
    chosen = set(matrices)
    for i, bits in enumerate(updates):
        others = [k for k in _numbers(_folded(bits, len(leaves))) if k != i]
        if others and not chosen.isdisjoint([i, *others]):
            return [
                f"  the update of {leaves[i]} depends on the gradient of {leaves[others[0]]} "
                f"({mixing.place}): put that part of the optimiser outside, "
                "`optax.chain(that_part, by_matrix(...))`"
            ]
    return []


def _of_state(
    states: Sequence[Bits], paths: Sequence[KeyPath], leaves: Sequence[str], matrices: Sequence[int]
) -> list[str]:
    chosen = set(matrices)
    problems = []
    for path, bits in zip(paths, states, strict=True):
        numbers = _numbers(bits)
        if len(numbers) > 1 and chosen.intersection(numbers):
            some = ", ".join(leaves[i] for i in numbers[:3])
            problems.append(
                f"  the state's {jtu.keystr(path)} depends on several weights ({some}): put what "
                "keeps it outside of by_matrix"
            )
    return problems


def _refuse_random(program: ClosedJaxpr) -> None:
    for eqn in all_equations(program):
        if eqn.primitive.name in jax_names.RANDOM:
            raise ValueError(
                f"by_matrix: the transform draws random numbers at {line_of(eqn)}, and would draw "
                "the same ones for all matrices of a group: put that part of it outside"
            )
