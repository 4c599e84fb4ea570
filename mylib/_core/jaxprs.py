"""Walks through jaxprs, and calls their equations again."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax.core import AbstractValue
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .compat import Program, closed_or_open, frames_of, names, opened, scan_sizes, while_body
from .lines import innermost, spot

# What stands for a value of a program.
T = TypeVar("T")
State = TypeVar("State")
Further = TypeVar("Further")
Atom = Var | Literal

# The primitive of calls that `mylib.opaque` can split. It has no jaxpr: what it calls is traced for
# the parts of one device, when it is lowered.
KERNEL = "mylib_kernel"
# Parameters of its equations.
_CALLED, _SPLITS = "kernel", "splits"


def kernel_of(eqn: JaxprEqn) -> tuple[Any, Any]:
    """What an equation of this primitive calls, and how that may be split."""
    return eqn.params[_CALLED], eqn.params[_SPLITS]


def all_jaxprs(
    program: Program, without: Callable[[JaxprEqn], bool] = lambda eqn: False
) -> list[Program]:
    """A jaxpr and all jaxprs inside it, each once. Kernels, and equations for which `without` is
    true, are not entered.

    Unknown primitives are entered, too: they may call the jaxprs among their parameters.
    """
    by_id = {id(opened(program)): program}
    queue = [program]
    while queue:
        for eqn in opened(queue.pop()).eqns:
            inner = jaxprs_in(eqn)
            if not inner or eqn.primitive.name in names.KERNELS or without(eqn):
                continue
            for called in inner:
                if id(opened(called)) not in by_id:
                    by_id[id(opened(called))] = called
                    queue.append(called)
    return list(by_id.values())


def all_equations(program: Program) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr and of all jaxprs inside it."""
    return (eqn for jaxpr in all_jaxprs(program) for eqn in opened(jaxpr).eqns)


def jaxprs_in(eqn: JaxprEqn) -> list[Program]:
    """The jaxprs among an equation's parameters, also in tuples. Programs are large, so this must
    be fast.
    """
    return list(_jaxprs_among(eqn.params.values()))


def _jaxprs_among(params: Iterable[object]) -> Iterator[Program]:
    for param in params:
        if isinstance(param, _JAXPRS):
            yield param
        elif isinstance(param, tuple | list):
            yield from _jaxprs_among(param)


def optimiser_of(eqn: JaxprEqn) -> str:
    """The function whose inner function `update` made an equation, such as `scale_by_muon`, by the
    names of functions; empty if there is none.
    """
    made_by = (frame.function_name.partition(".<locals>.") for frame in frames_of(eqn))
    return next((maker for maker, _, inner in made_by if inner.startswith("update")), "")


class OptimiserProduct(NamedTuple):
    """A product of two matrices in an optimiser: its equation, how often it is computed, and
    whether it is that of a matrix with itself, as in Newton-Schulz and in Shampoo's statistics.
    """

    eqn: JaxprEqn
    times: int
    is_square: bool


def products_of_optimisers(program: Program) -> list[OptimiserProduct]:
    """The products in the optimisers of a step, but for those inside of `shard_map`, where matrices
    are whole.
    """
    found: list[OptimiserProduct] = []

    def walk(
        program: Program, given: list[object] | None, times: int, around: list[JaxprEqn]
    ) -> list[object]:
        """What stands for the results, equal for equal matrices. `around` are the equations that
        call the program: in a loop JAX doesn't know which function has called the loop.
        """

        def rule(eqn: JaxprEqn, values: list[object]) -> list[object]:
            name, here = eqn.primitive.name, [*around, eqn]
            if name in _SAME_MATRIX:
                return values
            if name == names.DOT and any(map(optimiser_of, here)):
                found.append(OptimiserProduct(eqn, times, values[0] == values[1]))
            if name == names.JIT:
                return walk(eqn.params[names.PARAM_JAXPR], values, times, here)
            if name != names.SHARD_MAP and name not in names.KERNELS:
                turns = eqn.params[names.PARAM_LENGTH] if name == names.SCAN else 1
                for inner in jaxprs_in(eqn):
                    walk(inner, None, times * turns, here)
            return [object() for _ in eqn.outvars]

        given = [object() for _ in opened(program).invars] if given is None else given
        return followed(program, given, rule, others=id)

    walk(program, None, 1, [])
    return found


_SAME_MATRIX = {names.TRANSPOSE, names.CONVERT, names.CONSTRAINT, names.RESHARD}


class Looped(NamedTuple, Generic[T]):
    """A scan or a `while_loop`: its body, and what the body is given in each iteration: constants,
    what is carried, and slices. A `while_loop` has a test, which is given `of_test` and what is
    carried.
    """

    body: ClosedJaxpr
    constants: list[T]
    carry: list[T]
    slices: list[T]
    test: ClosedJaxpr | None = None
    of_test: Sequence[T] = ()


def loop_of(eqn: JaxprEqn, operands: list[T]) -> Looped[T] | None:
    """An equation as a loop, by anything that stands for its operands; None if it is none."""
    if eqn.primitive.name == names.SCAN:
        return scan_of(eqn, operands)
    if eqn.primitive.name == names.WHILE:
        body, carried = while_body(eqn), len(eqn.outvars)
        start = len(operands) - len(opened(body).invars)
        parts = operands[start : len(operands) - carried], operands[len(operands) - carried :]
        return Looped(body, *parts, [], eqn.params[names.PARAM_COND_JAXPR], operands[:start])
    return None


def scan_of(eqn: JaxprEqn, operands: Sequence[T]) -> Looped[T]:
    constants, carried = scan_sizes(eqn)
    end = constants + carried
    before, carry, slices = map(
        list, (operands[:constants], operands[constants:end], operands[end:])
    )
    return Looped(eqn.params[names.PARAM_JAXPR], before, carry, slices)


def repeated(
    loop: Looped[T], turn: Callable[[list[T]], list[T]], join: Callable[[T, T], T]
) -> tuple[list[T], list[T]]:
    """What holds in every iteration of a loop: for what is carried, before and after any number of
    iterations, and for the results of an iteration. `turn` gives the results from what the body is
    given, and `join` says what holds for two values that may be the same one.
    """
    carry = loop.carry
    while True:
        results = turn([*loop.constants, *carry, *loop.slices])
        # A body also returns slices.
        after = list(map(join, carry, results))
        if after == carry:
            return carry, results
        carry = after


def called_by(eqn: JaxprEqn, operands: list[T]) -> tuple[Program, list[T]] | None:
    """The jaxpr that a call or a `jax.checkpoint` runs, and what stands for its operands, which are
    the last of the equation; None if it is neither.
    """
    if eqn.primitive.name not in names.CALLS and eqn.primitive.name != names.REMAT:
        return None
    (inside, *_) = jaxprs_in(eqn)
    return inside, operands[len(operands) - len(opened(inside).invars) :]


def with_equations(program: Program, change: Callable[[JaxprEqn], JaxprEqn]) -> Program:
    """A copy of a jaxpr, with its equations as `change` returns them."""
    jaxpr = opened(program)
    jaxpr = jaxpr.replace(eqns=list(map(change, jaxpr.eqns)))
    return closed_or_open(ClosedJaxpr(jaxpr, getattr(program, "consts", ())), program)


def with_jaxprs(eqn: JaxprEqn, change: Callable[[Program], object]) -> dict[str, Any]:
    """An equation's parameters, with the jaxprs among them as `change` returns them."""

    def changed(param: object) -> object:
        return change(param) if isinstance(param, _JAXPRS) else param

    holders = (*_JAXPRS, tuple, list)
    params = eqn.params.items()
    return {k: jax.tree.map(changed, x) if isinstance(x, holders) else x for k, x in params}


def is_opaque(eqn: JaxprEqn) -> bool:
    """Whether it calls code that can't be analysed: a callback, a kernel, or jaxprs of an unknown
    primitive.
    """
    name = eqn.primitive.name
    if name in names.KNOWN_CALLS:
        return False
    return name in names.OPAQUE_CALLS or name in names.KERNELS or bool(jaxprs_in(eqn))


def opaque_calls(program: Program, without: Collection[str] = ()) -> Iterator[JaxprEqn]:
    """Its equations that call code that can't be analysed, without those of `equinox.error_if`, and
    those in calls of some names.
    """

    def is_left_out(eqn: JaxprEqn) -> bool:
        checks = eqn.primitive.name == names.COND and any(map(only_calls_back, jaxprs_in(eqn)))
        return checks or eqn.primitive.name in without

    for jaxpr in all_jaxprs(program, without=is_left_out):
        yield from filter(is_opaque, opened(jaxpr).eqns)


def only_calls_back(program: Program) -> bool:
    """Whether it is the branch in which `equinox.error_if` raises, and computes nothing."""
    eqns = opened(program).eqns
    return bool(eqns) and all(eqn.primitive.name in names.OPAQUE_CALLS for eqn in eqns)


_JAXPRS = (Jaxpr, ClosedJaxpr)


def bind_as(eqn: JaxprEqn, args: Sequence[Any], **changed: Any) -> list[Any]:
    """Calls an equation's primitive, with some parameters changed."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    results = eqn.primitive.bind(*args, **params)
    return results if eqn.primitive.multiple_results else [results]


@contextmanager
def in_place_of(eqn: JaxprEqn) -> Iterator[None]:
    """Gives the equations made here the source line and the name stack of `eqn`."""
    source = eqn.source_info
    name_stack = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=name_stack), eqn.ctx.manager:
        yield


Rule = Callable[[JaxprEqn, list[T]], Sequence[T]]


def followed(
    program: Program, given: Sequence[T], rule: Rule[T], others: Callable[[Atom], T]
) -> list[T]:
    """The one walk through a jaxpr from top to bottom: what stands for its results, if `given`
    stands for its arguments. `rule` is called with each equation and what stands for its operands,
    and returns what stands for its results. `others` gives that for literals, and for constants.
    """
    jaxpr = opened(program)
    values = dict(zip(jaxpr.invars, given, strict=True))

    def read(atom: Atom) -> T:
        # Literals can't be hashed.
        return others(atom) if isinstance(atom, Literal) or atom not in values else values[atom]

    for eqn in jaxpr.eqns:
        results = rule(eqn, list(map(read, eqn.invars)))
        values.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def interpret(
    program: Program,
    args: Sequence[T],
    rule: Rule[T] = bind_as,
    constants: Sequence[T] | None = None,
) -> list[T]:
    """The results of a program, with other `constants` if they are given.

    `rule` calls an equation. It gets what it has returned for earlier equations, so the values may
    be of any type.
    """
    consts = getattr(program, "consts", ()) if constants is None else constants
    of_constant = dict(zip(opened(program).constvars, consts, strict=True))

    def call(eqn: JaxprEqn, args: list[T]) -> Sequence[T]:
        with in_place_of(eqn):
            return rule(eqn, args)

    def other(atom: Atom) -> T:
        return atom.val if isinstance(atom, Literal) else of_constant[atom]

    return followed(program, args, call, other)


def at_shardings(
    arrays: Sequence[T],
    shardings: Sequence[object],
    constrain: Callable[[T, jax.sharding.Sharding], T] = jax.lax.with_sharding_constraint,
) -> list[T]:
    """The arguments or results of a `jit` where it asks for them; some are left alone."""
    pairs = zip(arrays, shardings, strict=True)
    return [constrain(x, s) if isinstance(s, jax.sharding.Sharding) else x for x, s in pairs]


def checkpointed(eqn: JaxprEqn, run: Callable[..., T], args: Sequence[object]) -> T:
    """Calls `run` in place of what a `jax.checkpoint` calls."""
    options = {key: eqn.params[key] for key in (names.PARAM_POLICY, names.PARAM_PREVENT_CSE)}
    return jax.checkpoint(run, **options)(*args)


def scanned(
    eqn: JaxprEqn,
    loop: Looped[T],
    turn: Callable[[State, list[T]], tuple[State, list[T], Further]],
    state: State,
) -> tuple[State, list[T], Further]:
    """Calls `turn` in place of the body of a `jax.lax.scan`, with a state and what the body is
    given. It returns the next state, the body's results, and further values. Returns the last
    state, the results of the scan, and the further values of all iterations.
    """
    carried = len(loop.carry)

    def one(
        state_and_carry: tuple[State, list[T]], slices: list[T]
    ) -> tuple[tuple[State, list[T]], tuple[list[T], Further]]:
        state, carry = state_and_carry
        state, results, further = turn(state, [*loop.constants, *carry, *slices])
        return (state, results[:carried]), (results[carried:], further)

    keys = (names.PARAM_LENGTH, names.PARAM_REVERSE, names.PARAM_UNROLL)
    options = {key: eqn.params[key] for key in keys}
    (state, carry), (ys, further) = jax.lax.scan(one, (state, loop.carry), loop.slices, **options)
    return state, [*carry, *ys], further


def shape_of(aval: AbstractValue) -> tuple[int, ...]:
    return tuple(getattr(aval, "shape", ()))


def is_on_host(aval: AbstractValue | None) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def frame_of(eqn: JaxprEqn) -> Any:
    """The frame of the user's line that made an equation; None if it is unknown."""
    return innermost(frames_of(eqn), lambda frame: frame.file_name)


def line_of(eqn: JaxprEqn) -> str:
    """The user's line that made an equation, and its function: `/home/me/train.py:31 (loss)`."""
    frame = frame_of(eqn)
    if frame is None:
        return "an unknown line"
    return f"{spot(frame.file_name, frame.line_num, frame.file_name)} ({frame.function_name})"
