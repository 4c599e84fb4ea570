"""Walks through jaxprs, and calls their equations again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr

from ._compat import closed_or_open, functions_of, names, opened, scan_sizes, while_body
from ._lines import innermost

# The primitive of calls that `mylib.opaque` can split. It has no jaxpr: what it calls is traced for
# the parts of one device, when it is lowered.
KERNEL = "mylib_kernel"


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
    return list(_jaxprs_among(eqn.params.values()))


def _jaxprs_among(params: Iterable[Any]) -> Iterator[Any]:
    for x in params:
        if isinstance(x, _JAXPRS):
            yield x
        elif isinstance(x, tuple | list):
            yield from _jaxprs_among(x)


def optimiser_of(eqn: Any) -> str:
    """The function whose inner function `update` made an equation, such as `scale_by_muon`, by the
    names of functions; empty if there is none.
    """
    made_by = (name.partition(".<locals>.") for name in functions_of(eqn))
    return next((maker for maker, _, inner in made_by if inner.startswith("update")), "")


class Looped(NamedTuple):
    """A scan or a `while_loop`: its body, and what the body is given in each turn: constants, what
    is carried, and slices. A `while_loop` has a test, which is given `of_test` and what is carried.
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
        constants, carried = scan_sizes(eqn)
        end = constants + carried
        parts = operands[:constants], operands[constants:end], operands[end:]
        return Looped(eqn.params[names.PARAM_JAXPR], *parts)
    if eqn.primitive.name == names.WHILE:
        body, carried = while_body(eqn), len(eqn.outvars)
        start = len(operands) - len(opened(body).invars)
        parts = operands[start : len(operands) - carried], operands[len(operands) - carried :]
        return Looped(body, *parts, [], eqn.params[names.PARAM_COND_JAXPR], operands[:start])
    return None


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


Rule = Callable[[Any, Sequence[Any]], Sequence[Any]]


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
    jaxpr = opened(program)
    consts: Sequence[Any] = getattr(program, "consts", ()) if constants is None else constants
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(x: Any) -> Any:
        return x.val if hasattr(x, "val") else values[x]

    for eqn in jaxpr.eqns:
        with in_place_of(eqn):
            values.update(zip(eqn.outvars, rule(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def checkpointed(eqn: Any, run: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Calls `run` in place of what a `jax.checkpoint` calls."""
    options = {key: eqn.params[key] for key in (names.PARAM_POLICY, names.PARAM_PREVENT_CSE)}
    return jax.checkpoint(run, **options)(*args)


def scanned(eqn: Any, turn: Callable[..., Any], carry: Any, xs: Any) -> Any:
    """Calls `turn` in place of what a `jax.lax.scan` calls."""
    keys = (names.PARAM_LENGTH, names.PARAM_REVERSE, names.PARAM_UNROLL)
    return jax.lax.scan(turn, carry, xs, **{key: eqn.params[key] for key in keys})


def line_of(eqn: Any) -> str:
    """The user's line that made an equation, and its function: `/home/me/train.py:31 (loss)`."""
    traceback = eqn.source_info.traceback
    frame = innermost(traceback.frames if traceback else [], lambda frame: frame.file_name)
    if frame is None:
        return "an unknown line"
    return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
