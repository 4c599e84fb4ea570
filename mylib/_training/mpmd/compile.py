"""The compiled programs of a stage: its forward pass, its backward pass, and the part of the
backward pass that computes the gradients of its weights.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Var

from ..._core.compat import jit
from ..._core.tree import Arrays
from ..._moving.transfer import filter_shard
from .actions import Pass
from .backward import Atom, Piece, flattened, pieces
from .stage import Stage, Struct, chosen, merged, parted

T = TypeVar("T")


class Arguments(NamedTuple, Generic[T]):
    """The arguments of a stage's programs: their types, or the variables for them."""

    module: list[T]
    received: list[T]
    targets: list[T]
    microbatch: list[T]
    cotangents: list[T]


@dataclass(frozen=True, eq=False)
class PieceProgram:
    """A compiled piece. The first of its results are `sent` to other stages, others are added to
    `totals`, whose memory is reused. Later pieces of the same microbatch may need all but the
    totals.
    """

    takes: tuple[Var, ...]
    makes: tuple[Atom, ...]
    sent: int
    # None if there is nothing to compute.
    compiled: jax.stages.Compiled | None

    def __call__(
        self, value_of: Callable[[Var], jax.Array], totals: Arrays
    ) -> tuple[Arrays, Arrays, dict[Atom, jax.Array]]:
        if self.compiled is None:
            return [], totals, {}
        results, totals = self.compiled(totals, [value_of(x) for x in self.takes])
        return results[: self.sent], totals, dict(zip(self.makes, results, strict=True))


@dataclass(frozen=True, eq=False)
class Programs:
    """The programs of a stage, and the variables that stand for their arguments.

    `zeros` makes the totals, by pass: of the loss (none but in the last stage) in the forward pass,
    and of the gradients in the last one.
    """

    variables: Arguments[Var]
    zeros: jax.stages.Compiled
    by_pass: dict[Pass, PieceProgram]

    @cached_property
    def needed_after(self) -> dict[Pass, frozenset[Var]]:
        """The values of a microbatch that are held after each pass, for later passes."""
        after: dict[Pass, frozenset[Var]] = {}
        needed = frozenset[Var]()
        for kind in reversed(self.by_pass):
            after[kind] = needed
            needed = needed.union(self.by_pass[kind].takes)
        return after


def compile_stage(stage: Stage, *, splits: bool, checkpoint: bool) -> Programs:
    """Compiles the passes of a stage. If `splits`, the gradients of the weights have a program of
    their own. If `checkpoint`, the backward pass computes the forward pass again.
    """
    after = stage.after
    cotangents = chosen(after.sent, after.floating) if after else []
    arguments = Arguments(*stage.arguments, cotangents)
    with jax.set_mesh(stage.mesh):
        traced = flattened(functools.partial(_forward_and_backward, stage), *arguments)
        variables = jax.tree.unflatten(jax.tree.structure(arguments), traced.jaxpr.invars)
        parts = _parts(stage, traced, variables, splits, checkpoint)
        leaves = jax.tree.leaves(arguments)
        structs: dict[Atom, Struct] = dict(zip(traced.jaxpr.invars, leaves, strict=True))
        kinds = list(Pass) if splits else [Pass.FORWARD, Pass.BACKWARD]
        sent = {
            Pass.FORWARD: () if after is None else after.sent,
            Pass.BACKWARD: chosen(stage.before.received, stage.before.floating),
        }
        value = [] if stage.value is None else [stage.value]
        totals = {Pass.FORWARD: value, kinds[-1]: stage.params}
        by_pass = {
            kind: _compiled(part, sent.get(kind, ()), totals.get(kind, ()), structs)
            for kind, part in zip(kinds, parts, strict=True)
        }
        return Programs(variables, _zeros(totals), by_pass)


def _forward_and_backward(
    stage: Stage,
    module: Arrays,
    arrived: Arrays,
    targets: Arrays,
    microbatch: Arrays,
    cotangents: Arrays,
) -> tuple[Arrays, Arrays, Arrays]:
    """What a stage sends, or its share of the loss; the cotangents that it sends back; the
    gradients of its weights.
    """
    trained, has_cotangent = stage.floating, stage.before.floating
    params, fixed = parted(module, trained)
    floating, others = parted(arrived, has_cotangent)

    def forward(params: Arrays, floating: Arrays) -> tuple[Arrays, Arrays]:
        module, received = merged(trained, params, fixed), merged(has_cotangent, floating, others)
        arrays, _ = stage.compute(module, received, targets, microbatch)
        if stage.after is None:
            return [arrays[0] / stage.microbatches], []
        sent = filter_shard(arrays, [x.sharding for x in stage.after.sent])
        return parted(sent, stage.after.floating)

    outputs, pull, integers = jax.vjp(forward, params, floating, has_aux=True)
    grads, back = pull(cotangents if stage.after else [jnp.ones_like(outputs[0])])
    sent = outputs if stage.after is None else merged(stage.after.floating, outputs, integers)
    return sent, back, grads


def _parts(
    stage: Stage, traced: ClosedJaxpr, variables: Arguments[Var], splits: bool, checkpoint: bool
) -> list[Piece]:
    results: list[Atom] = list(traced.jaxpr.outvars)
    grads = results[len(results) - len(stage.params) :]
    first = len(stage.after.sent) if stage.after else 1
    sent, back = results[:first], results[first : len(results) - len(grads)]
    backward = [back, grads] if splits else [back + grads]
    held, late = variables.module, variables.cotangents
    if checkpoint:
        return [*pieces(traced, [sent], held, late), *pieces(traced, backward, held)]
    return pieces(traced, [sent, *backward], held, late)


def _zeros(structs: dict[Pass, list[Struct]]) -> jax.stages.Compiled:
    where = jax.tree.map(lambda x: x.sharding, structs)
    zeros = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), structs)
    return jit(lambda: zeros(), out_shardings=where).lower().compile()


def _compiled(
    piece: Piece, sent: Sequence[Struct], totals: Sequence[Struct], structs: dict[Atom, Struct]
) -> PieceProgram:
    """Compiles a piece of a stage. `structs` has the types of the arguments, and of the residuals
    of earlier pieces, and gets those of its own: the compiler decides how they are sharded.
    """
    if not piece.gives and not piece.eqns:
        return PieceProgram((), (), 0, None)
    gives, first, last = piece.gives, len(sent), len(sent) + len(totals)
    # A result that later pieces need, too, is returned once.
    residuals = [i for i in range(last, len(gives)) if gives[i] not in gives[:first]]
    returned = [*range(first), *residuals]

    def run(so_far: Arrays, args: Arrays) -> tuple[Arrays, Arrays]:
        results = piece(*args)
        summed = [x + y for x, y in zip(so_far, results[first:last], strict=True)]
        return [results[i] for i in returned], summed

    where = [x.sharding for x in sent] + [None] * len(residuals), [x.sharding for x in totals]
    program = jit(run, donate_argnums=0, out_shardings=where)
    takes = [structs[x] for x in piece.takes]
    compiled = program.lower(list(totals), takes).compile()
    makes = tuple(gives[i] for i in returned)
    for x, sharding in zip(makes, compiled.output_shardings[0], strict=True):
        aval: Any = x.aval
        structs[x] = Struct(aval.shape, aval.dtype, sharding=sharding)
    return PieceProgram(piece.takes, makes, first, compiled)
