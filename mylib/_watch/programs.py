"""Tells apart programs of the same name, such as two lambdas, by what is the same in all processes.

Their text can't be compared: a call that hangs may not have been lowered here.
"""

from collections.abc import Iterator
from contextlib import suppress
from types import CodeType
from typing import Any, NamedTuple

from .._lines import spot
from .._processes import digest
from .._text import listed
from .._tree import canonical_dtype, split, texts_of

# Show the shapes of at most this many arguments.
_ARRAYS = 4
_PLAIN = bool | int | float | complex | str | bytes | None


class Identity(NamedTuple):
    """A function, and a program of it for some arguments, in words."""

    function: str = ""
    program: str = ""


def identity_of(call: Any) -> Identity:
    """The identity of the program in a call of `filter_jit`."""
    python = call.wrapped.code
    function = ""
    if python is not None:
        code = python.__code__
        place = spot(code.co_filename, code.co_firstlineno)
        function = f"defined in {place}, checksum {digest([*_texts(python)])[:6]}"
    arrays = [f"{canonical_dtype(x)}{[*x.shape]}" for x in call.arrays]
    static = digest([arrays, texts_of(split((call.args, call.kwargs)))])[:6]
    given = f"for {listed(arrays, _ARRAYS) or 'no arrays'} (checksum {static})"
    return Identity(function, f"{function}, {given}" if function else given)


def _texts(python: Any) -> Iterator[str]:
    for cell in python.__closure__ or ():
        with suppress(ValueError):  # it has no value yet
            yield repr(cell.cell_contents) if isinstance(cell.cell_contents, _PLAIN) else ""
    yield from _texts_of_code(python.__code__)


def _texts_of_code(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield from code.co_names
    for x in code.co_consts:
        if isinstance(x, CodeType):
            yield from _texts_of_code(x)
        else:
            yield from texts_of(split(x))
