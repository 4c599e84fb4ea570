"""Cuts a traced program into pieces that run one after the other: the forward pass of a stage, its
backward pass, and the part of it that only the gradients of the weights need.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from ..._core.compat import names, opened, without_dead_code
from ..._core.jaxprs import bind_as, interpret, jaxprs_in
from ..._moving.transfer import constrain_auto_p

Atom: TypeAlias = Var | Literal


@dataclass(frozen=True, eq=False)
class Piece:
    """Some equations of a program: a function of the values of `takes` that returns those of
    `gives`. A piece returns its results, then the residuals for later pieces.
    """

    takes: tuple[Var, ...]
    gives: tuple[Atom, ...]
    eqns: list[JaxprEqn]
    program: ClosedJaxpr

    def __call__(self, *args: jax.Array) -> list[jax.Array]:
        return interpret(self.program, args)


def flattened(fun: Callable[..., object], *args: object) -> ClosedJaxpr:
    """The closed jaxpr of `fun`, without dead code and without calls: the equations inside nested
    `jit`s, checkpoints and custom derivatives are its own. Loops, conditions and `shard_map`s stay
    single equations, because what is inside can't be run in two parts.
    """
    program = jax.make_jaxpr(fun)(*args)
    inlined = jax.make_jaxpr(lambda *args: interpret(program, args, _call))
    return without_dead_code(inlined(*jax.tree.leaves(args)))


def _call(eqn: JaxprEqn, args: Sequence[jax.Array]) -> list[jax.Array]:
    if eqn.primitive.name not in names.CALLS | {names.REMAT} or _is_placed(eqn):
        return bind_as(eqn, args)
    if eqn.primitive.name == names.REMAT and _computes_again(eqn):
        # As JAX does when it compiles a checkpoint: otherwise the compiler could compute its values
        # early, and hold them until they are needed.
        args = list(jax.lax.optimization_barrier(tuple(args)))
    (inner,) = jaxprs_in(eqn)
    return interpret(inner, args, _call)


def _is_placed(eqn: JaxprEqn) -> bool:
    """Whether it is a `jit` that places its arguments or results."""
    params = (names.PARAM_IN_SHARDINGS, names.PARAM_OUT_SHARDINGS)
    shardings = [x for name in params for x in eqn.params.get(name, ())]
    return any(isinstance(x, jax.sharding.Sharding) for x in shardings)


def _computes_again(eqn: JaxprEqn) -> bool:
    return eqn.params[names.PARAM_DIFFERENTIATED] and bool(eqn.params[names.PARAM_PREVENT_CSE])


def pieces(
    program: ClosedJaxpr,
    goals: Sequence[Sequence[Atom]],
    held: Iterable[Var] = (),
    late: Iterable[Var] = (),
) -> list[Piece]:
    """A piece for each of the `goals`, which are results of the program. Each computes its goal
    from the arguments and from what earlier pieces give, and nothing is computed twice.

    Only constants, and values that are moved or rearranged (transposed weights, for example), are
    made again if that keeps less between the pieces. `held` are arguments that are held anyway;
    `late` are arguments that the first piece does not get.
    """
    graph = _Dependencies(program, held)
    needing_late = graph.depending_on(late)
    effects = [i for i, eqn in enumerate(graph.eqns) if eqn.effects]
    done: set[int] = set()
    cuts: list[_Cut] = []
    for number, goal in enumerate(goals):
        ready = [i for i in effects if i not in done and (number or i not in needing_late)]
        cut = graph.cut(goal, ready, done)
        done |= cut.eqns
        cuts.append(cut)
    in_reverse: list[Piece] = []
    needed: dict[Var, None] = {}
    for cut in reversed(cuts):
        crossing = [x for x in needed if graph.maker.get(x) in cut.new]
        in_reverse.append(graph.piece(cut, crossing))
        needed.update(dict.fromkeys(cut.takes))
    return in_reverse[::-1]


@dataclass(frozen=True)
class _Cut:
    """A part of the equations, by their numbers. `new` are those that no earlier cut has."""

    goal: Sequence[Atom]
    eqns: set[int]
    new: set[int]
    takes: list[Var]
    # For results of barriers in earlier pieces: what the barrier was given.
    same: dict[Var, Atom]


class _Dependencies:
    """The equations that each equation needs."""

    def __init__(self, program: ClosedJaxpr, held: Iterable[Var]):
        self.program = program
        self.eqns = opened(program).eqns
        self.constants = set(opened(program).constvars)
        self.maker = {x: i for i, eqn in enumerate(self.eqns) for x in eqn.outvars}
        self.cheap = self._cheap(held)

    def _cheap(self, held: Iterable[Var]) -> set[int]:
        """The equations that are called again rather than keeping their results."""
        constant, free, cheap = set(self.constants), set(held), set()
        for i, eqn in enumerate(self.eqns):
            args = [x for x in eqn.invars if isinstance(x, Var)]
            if eqn.effects:
                continue
            if constant.issuperset(args):
                constant.update(eqn.outvars)
                cheap.add(i)
            elif eqn.primitive.name in _MOVES:
                to_hold = [x for x in args if x not in constant and x not in free]
                if not to_hold:
                    free.update(eqn.outvars)
                if not to_hold or _is_worth_repeating(eqn, to_hold):
                    cheap.add(i)
        return cheap

    def depending_on(self, args: Iterable[Var]) -> set[int]:
        variables, eqns = set(args), set()
        for i, eqn in enumerate(self.eqns):
            if not variables.isdisjoint(x for x in eqn.invars if isinstance(x, Var)):
                variables.update(eqn.outvars)
                eqns.add(i)
        return eqns

    def cut(self, goal: Sequence[Atom], effects: Sequence[int], done: set[int]) -> _Cut:
        """The equations that lead to `goal`, without those that are `done`; and `effects`."""
        eqns, takes, same = set[int](effects), dict[Var, None](), dict[Var, Atom]()
        queue = [*goal, *(x for i in effects for x in self.eqns[i].invars)]
        seen: set[Var] = set()
        while queue:
            x = queue.pop()
            if isinstance(x, Literal) or x in seen or x in self.constants:
                continue
            seen.add(x)
            i = self.maker.get(x)
            if i is None:
                takes[x] = None
            elif i in done and self.eqns[i].primitive.name == names.BARRIER:
                same[x] = self.eqns[i].invars[self.eqns[i].outvars.index(x)]
                queue.append(same[x])
            elif i in done and i not in self.cheap:
                takes[x] = None
            else:
                eqns.add(i)
                queue += self.eqns[i].invars
        return _Cut(goal, eqns, eqns - done, list(takes), same)

    def piece(self, cut: _Cut, crossing: Sequence[Var]) -> Piece:
        def source(x: Atom) -> Atom:
            while isinstance(x, Var) and x in cut.same:
                x = cut.same[x]
            return x

        gives = (*cut.goal, *crossing)
        eqns = [self.eqns[i] for i in sorted(cut.eqns)]
        jaxpr = opened(self.program).replace(
            invars=cut.takes,
            outvars=list(map(source, gives)),
            eqns=[eqn.replace(invars=list(map(source, eqn.invars))) for eqn in eqns],
        )
        return Piece(tuple(cut.takes), gives, eqns, ClosedJaxpr(jaxpr, self.program.consts))


# These communicate, so only parameters are moved again.
_PLACES = frozenset({names.CONSTRAINT, names.RESHARD, constrain_auto_p.name})
# A barrier is not among them: made again it would hold all its operands.
_MOVES = (names.ONLY_MOVED | _PLACES | {names.CHECKPOINT_NAME, names.CONVERT}) - {names.BARRIER}


def _is_worth_repeating(eqn: JaxprEqn, held: Sequence[Var]) -> bool:
    smaller = sum(map(_nbytes, held)) <= sum(map(_nbytes, eqn.outvars))
    return smaller and eqn.primitive.name not in _PLACES


def _nbytes(var: Any) -> int:
    return var.aval.size * var.aval.dtype.itemsize
