"""Walks through jaxprs, and calls their equations again."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ._compat import closed_or_open, functions_of, names, opened, scan_sizes, while_body
from ._lines import innermost, spot

# The primitive of calls that `mylib.opaque` can split. It has no jaxpr: what it calls is traced for
# the parts of one device, when it is lowered.
KERNEL = "mylib_kernel"
# Parameters of its equations.
_CALLED, _SPLITS = "kernel", "splits"


def kernel_of(eqn: Any) -> tuple[Any, Any]:
    """What an equation of this primitive calls, and how that may be split."""
    return eqn.params[_CALLED], eqn.params[_SPLITS]


def all_jaxprs(program: Any, without: Callable[[Any], bool] = lambda eqn: False) -> list[Any]:
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
            for x in inner:
                if id(opened(x)) not in by_id:
                    by_id[id(opened(x))] = x
                    queue.append(x)
    return list(by_id.values())


def all_equations(program: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of all jaxprs inside it."""
    return (eqn for jaxpr in all_jaxprs(program) for eqn in opened(jaxpr).eqns)


def jaxprs_in(eqn: Any) -> list[Any]:
    """The jaxprs among an equation's parameters, also in tuples. Programs are large, so this must
    be fast.
    """
    return list(jaxprs_among(eqn.params.values()))


def jaxprs_among(params: Iterable[Any]) -> Iterator[Any]:
    for x in params:
        if isinstance(x, _JAXPRS):
            yield x
        elif isinstance(x, tuple | list):
            yield from jaxprs_among(x)


def optimiser_of(eqn: Any) -> str:
    """The function whose inner function `update` made an equation, such as `scale_by_muon`, by the
    names of functions; empty if there is none.
    """
    made_by = (name.partition(".<locals>.") for name in functions_of(eqn))
    return next((maker for maker, _, inner in made_by if inner.startswith("update")), "")


class OptimiserProduct(NamedTuple):
    """A product of two matrices in an optimiser: its equation, how often it is computed, and
    whether it is that of a matrix with itself, as in Newton-Schulz and in Shampoo's statistics.
    """

    eqn: Any
    times: int
    is_square: bool


def products_of_optimisers(program: Any) -> list[OptimiserProduct]:
    """The products in the optimisers of a step, but for those inside of `shard_map`, where matrices
    are whole.
    """
    found: list[OptimiserProduct] = []

    def walk(program: Any, given: list[Any] | None, times: int, around: list[Any]) -> list[Any]:
        """What stands for the results, equal for equal matrices. `around` are the equations that
        call the program: in a loop JAX doesn't know which function has called the loop.
        """

        def rule(eqn: Any, values: list[Any]) -> list[Any]:
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


class Looped(NamedTuple):
    """A scan or a `while_loop`: its body, and what the body is given in each iteration: constants,
    what is carried, and slices. A `while_loop` has a test, which is given `of_test` and what is
    carried.
    """

    body: Any
    constants: list[Any]
    carry: list[Any]
    slices: list[Any]
    test: Any = None
    of_test: Sequence[Any] = ()


def loop_of(eqn: Any, operands: list[Any]) -> Looped | None:
    """An equation as a loop, by anything that stands for its operands; None if it is none."""
    if eqn.primitive.name == names.SCAN:
        return scan_of(eqn, operands)
    if eqn.primitive.name == names.WHILE:
        body, carried = while_body(eqn), len(eqn.outvars)
        start = len(operands) - len(opened(body).invars)
        parts = operands[start : len(operands) - carried], operands[len(operands) - carried :]
        return Looped(body, *parts, [], eqn.params[names.PARAM_COND_JAXPR], operands[:start])
    return None


def scan_of(eqn: Any, operands: Sequence[Any]) -> Looped:
    constants, carried = scan_sizes(eqn)
    end = constants + carried
    parts = map(list, (operands[:constants], operands[constants:end], operands[end:]))
    return Looped(eqn.params[names.PARAM_JAXPR], *parts)


def repeated(
    loop: Looped, turn: Callable[[list[Any]], list[Any]], join: Callable[[Any, Any], Any]
) -> tuple[list[Any], list[Any]]:
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


def with_equations(program: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a jaxpr, with its equations as `change` returns them."""
    jaxpr = opened(program)
    jaxpr = jaxpr.replace(eqns=list(map(change, jaxpr.eqns)))
    return closed_or_open(ClosedJaxpr(jaxpr, getattr(program, "consts", ())), program)


def with_jaxprs(eqn: Any, change: Callable[[Any], Any]) -> dict[str, Any]:
    """An equation's parameters, with the jaxprs among them as `change` returns them."""

    def changed(x: Any) -> Any:
        return change(x) if isinstance(x, _JAXPRS) else x

    holders = (*_JAXPRS, tuple, list)
    params = eqn.params.items()
    return {k: jax.tree.map(changed, x) if isinstance(x, holders) else x for k, x in params}


def is_opaque(eqn: Any) -> bool:
    """Whether it calls code that can't be analysed: a callback, a kernel, or jaxprs of an unknown
    primitive.
    """
    name = eqn.primitive.name
    if name in names.KNOWN_CALLS:
        return False
    return name in names.OPAQUE_CALLS or name in names.KERNELS or bool(jaxprs_in(eqn))


def opaque_calls(program: Any, without: Collection[str] = ()) -> Iterator[Any]:
    """Its equations that call code that can't be analysed, without those of `equinox.error_if`, and
    those in calls of some names.
    """

    def is_left_out(eqn: Any) -> bool:
        checks = eqn.primitive.name == names.COND and any(map(only_calls_back, jaxprs_in(eqn)))
        return checks or eqn.primitive.name in without

    for jaxpr in all_jaxprs(program, without=is_left_out):
        yield from filter(is_opaque, opened(jaxpr).eqns)


def only_calls_back(program: Any) -> bool:
    """Whether it is the branch in which `equinox.error_if` raises, and computes nothing."""
    eqns = opened(program).eqns
    return bool(eqns) and all(x.primitive.name in names.OPAQUE_CALLS for x in eqns)


_JAXPRS = (Jaxpr, ClosedJaxpr)


def bind_as(eqn: Any, args: Sequence[Any], **changed: Any) -> list[Any]:
    """Calls an equation's primitive, with some parameters changed."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    results = eqn.primitive.bind(*args, **params)
    return results if eqn.primitive.multiple_results else [results]


@contextmanager
def in_place_of(eqn: Any) -> Iterator[None]:
    """Gives the equations made here the source line and the name stack of `eqn`."""
    source = eqn.source_info
    name_stack = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=name_stack), eqn.ctx.manager:
        yield


Rule = Callable[[Any, list[Any]], Sequence[Any]]


def followed(
    program: Any, given: Sequence[Any], rule: Rule, others: Callable[[Any], Any]
) -> list[Any]:
    """The one walk through a jaxpr from top to bottom: what stands for its results, if `given`
    stands for its arguments. `rule` is called with each equation and what stands for its operands,
    and returns what stands for its results. `others` gives that for literals, and for constants.
    """
    jaxpr = opened(program)
    values = dict(zip(jaxpr.invars, given, strict=True))

    def read(x: Any) -> Any:
        # Literals can't be hashed.
        return others(x) if isinstance(x, Literal) or x not in values else values[x]

    for eqn in jaxpr.eqns:
        results = rule(eqn, list(map(read, eqn.invars)))
        values.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def interpret(
    program: Any,
    args: Sequence[Any],
    rule: Rule = bind_as,
    constants: Sequence[Any] | None = None,
) -> list[Any]:
    """The results of a program, with other `constants` if they are given.

    `rule` calls an equation. It gets what it has returned for earlier equations, so the values may
    be of any type.
    """
    consts: Sequence[Any] = getattr(program, "consts", ()) if constants is None else constants
    of_constant = dict(zip(opened(program).constvars, consts, strict=True))

    def call(eqn: Any, args: list[Any]) -> Sequence[Any]:
        with in_place_of(eqn):
            return rule(eqn, args)

    def other(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else of_constant[x]

    return followed(program, args, call, other)


def at_shardings(
    xs: Sequence[Any], shardings: Sequence[Any], constrain: Any = jax.lax.with_sharding_constraint
) -> list[Any]:
    """The arguments or results of a `jit` where it asks for them; some are left alone."""
    pairs = zip(xs, shardings, strict=True)
    return [constrain(x, s) if isinstance(s, jax.sharding.Sharding) else x for x, s in pairs]


def checkpointed(eqn: Any, run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Calls `run` in place of what a `jax.checkpoint` calls."""
    options = {key: eqn.params[key] for key in (names.PARAM_POLICY, names.PARAM_PREVENT_CSE)}
    return jax.checkpoint(run, **options)(*args)


def scanned(
    eqn: Any, loop: Looped, turn: Callable[[Any, list[Any]], tuple[Any, list[Any], Any]], state: Any
) -> tuple[Any, list[Any], Any]:
    """Calls `turn` in place of the body of a `jax.lax.scan`, with a state and what the body is
    given. It returns the next state, the body's results, and further values. Returns the last
    state, the results of the scan, and the further values of all iterations.
    """
    carried = len(loop.carry)

    def one(state_and_carry: Any, slices: list[Any]) -> Any:
        state, carry = state_and_carry
        state, results, further = turn(state, [*loop.constants, *carry, *slices])
        return (state, results[:carried]), (results[carried:], further)

    keys = (names.PARAM_LENGTH, names.PARAM_REVERSE, names.PARAM_UNROLL)
    options = {key: eqn.params[key] for key in keys}
    (state, carry), (ys, further) = jax.lax.scan(one, (state, loop.carry), loop.slices, **options)
    return state, [*carry, *ys], further


def is_on_host(aval: Any) -> bool:
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def frame_of(eqn: Any) -> Any:
    """The frame of the user's line that made an equation; None if it is unknown."""
    traceback = eqn.source_info.traceback
    return innermost(traceback.frames if traceback else [], lambda frame: frame.file_name)


def line_of(eqn: Any) -> str:
    """The user's line that made an equation, and its function: `/home/me/train.py:31 (loss)`."""
    frame = frame_of(eqn)
    if frame is None:
        return "an unknown line"
    return f"{spot(frame.file_name, frame.line_num, frame.file_name)} ({frame.function_name})"
