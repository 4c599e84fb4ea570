"""Which arguments of a function are donated, each once, and let go of after the call."""

from collections.abc import Iterable
from itertools import compress
from operator import not_
from typing import Any, Literal

import jax
from jax.core import Tracer

from .._transfer import let_go
from .._tree import Arrays, outlined
from .signature import Function
from .variants import Call

Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"] | tuple[str, ...]
_WORDS = ("all", "all-except-first", "warn", "warn-except-first", "none")


def checked(donate: Any, function: Function) -> Donate:
    """`donate`, if it is a word or a tuple of names of parameters."""
    parameters = function.signature.parameters
    if isinstance(donate, str):
        if donate in _WORDS:
            return donate
        words = ", ".join(map(repr, _WORDS))
        is_name = donate in parameters
        instead = f". For the parameter of this name write ({donate!r},)" if is_name else ""
        raise ValueError(f"filter_jit: donate={donate!r} is none of {words}{instead}")
    if not isinstance(donate, tuple | list):
        raise ValueError(
            f"filter_jit: donate={donate!r} is no word, and no tuple of names of parameters"
        )
    unknown = [name for name in donate if name not in parameters]
    if unknown:
        raise ValueError(
            f"filter_jit: donate names {', '.join(map(repr, unknown))}, and {function.name} has "
            f"the parameters {', '.join(parameters) or '()'}"
        )
    return tuple(donate)


def warns(donate: Donate) -> bool:
    return donate in ("warn", "warn-except-first")


def spares_the_first(donate: Donate) -> bool:
    return donate in ("all-except-first", "warn-except-first")


class Donated:
    """Which of a program's arrays are donated. It takes two lists: those kept, those donated."""

    def __init__(self, flags: Iterable[bool]):
        self.flags: tuple[bool, ...] = tuple(flags)
        self._kept = tuple(map(not_, self.flags))

    @classmethod
    def of(cls, call: Call) -> "Donated | None":
        """The last arrays are the function's own."""
        program, donate = call.program, call.program.donate
        if donate == "none":
            return None
        # In the order in which JAX flattens them.
        arguments = [*enumerate(call.args), *sorted(call.kwargs.items())]
        if isinstance(donate, tuple):
            flags = [program.function.parameter(key) in donate for key, _ in arguments]
        else:
            flags = [not (key == 0 and spares_the_first(donate)) for key, _ in arguments]
        counts = [len(outlined(x, call.is_abstract)[0]) for _, x in arguments]
        of_arrays = [x for x, n in zip(flags, counts, strict=True) for _ in range(n)]
        return cls([*of_arrays, *[not isinstance(donate, tuple)] * program.fun.count])

    def parted(self, arrays: Iterable[Any]) -> tuple[Arrays, Arrays]:
        """The arrays that are kept, and those that are donated."""
        arrays = list(arrays)
        return list(compress(arrays, self._kept)), list(compress(arrays, self.flags))

    def joined(self, kept: Iterable[Any], donated: Iterable[Any]) -> Arrays:
        kept, donated = iter(kept), iter(donated)
        return [next(donated if x else kept) for x in self.flags]


def used_once(call: Call, arrays: Arrays, donation: Donated) -> tuple[Arrays, Arrays]:
    """The arrays that are kept and those that are donated, with a copy of each donated one that
    occurs twice or is also passed without being donated: JAX refuses to donate those.
    """
    kept, donated = donation.parted(arrays)
    taken = {*map(id, kept), *map(id, donation.parted(call.arrays)[0])}
    if len(taken.union(map(id, donated))) == len(taken) + len(donated):
        return kept, donated
    for i, x in enumerate(donated):
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and id(x) in taken:
            donated[i] = jax.device_put(x, may_alias=False)
        taken.add(id(x))
    return kept, donated


def let_go_of_moved(call: Call, placed: Arrays, donation: Donated) -> None:
    """After a successful call, deletes donated arrays that had to be moved before it."""
    kept, donated = donation.parted(call.arrays)
    let_go(donated, [*kept, *placed])
