"""Walking through jaxprs, and calling their equations again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr

from ._compat import names, opened


def parts_of(program: Any, without: Callable[[Any], bool] = lambda eqn: False) -> list[Any]:
    """The jaxprs that a jaxpr is made of, itself the first, each once. What a kernel does inside is
    not among them, nor what is inside of equations `without` which they are wanted.

    An equation of an unknown name is gone into as well: what it holds, it may call.
    """
    parts = {id(opened(program)): program}
    queue = [program]
    while queue:
        for eqn in opened(queue.pop()).eqns:
            inner = jaxprs_in(eqn)
            if not inner or eqn.primitive.name in names.KERNELS or without(eqn):
                continue
            for x in inner:
                if id(opened(x)) not in parts:
                    parts[id(opened(x))] = x
                    queue.append(x)
    return list(parts.values())


def jaxprs_in(eqn: Any) -> list[Any]:
    """The jaxprs among an equation's parameters, also in tuples. Programs are large, so this
    has to be quick.
    """
    found: list[Any] = []
    for param in eqn.params.values():
        if isinstance(param, _JAXPRS):
            found.append(param)
        elif isinstance(param, tuple | list):
            found += _jaxprs_among(param)
    return found


def _jaxprs_among(several: Iterable[Any]) -> Iterator[Any]:
    for x in several:
        if isinstance(x, _JAXPRS):
            yield x
        elif isinstance(x, tuple | list):
            yield from _jaxprs_among(x)


def is_opaque(eqn: Any) -> bool:
    """Whether it calls what nothing is known of: something that is no jaxpr, a kernel, or programs
    in a way that only the primitive knows.
    """
    name = eqn.primitive.name
    if name in names.KNOWN_CALLS:
        return False
    return name in names.OPAQUE_CALLS or name in names.KERNELS or bool(jaxprs_in(eqn))


_JAXPRS = (Jaxpr, ClosedJaxpr)


def bind_as(eqn: Any, args: Sequence[Any], **changed: Any) -> list[Any]:
    """Calls an equation's primitive, with these of its parameters changed."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    made = eqn.primitive.bind(*args, **params)
    return made if eqn.primitive.multiple_results else [made]


@contextmanager
def in_place_of(eqn: Any) -> Iterator[None]:
    """What is called here stands at the same line, and under the same names, as an equation did."""
    source = eqn.source_info
    names = source_info_util.current_name_stack() + source.name_stack
    with source_info_util.user_context(source.traceback, name_stack=names), eqn.ctx.manager:
        yield
