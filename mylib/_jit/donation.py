"""Which arguments of a function are donated."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from operator import not_
from typing import Any, Literal

from .._tree import Arrays, outlined
from .signature import Function

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
    def of(
        cls,
        donate: Donate,
        function: Function,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        own: int,
        abstract: bool,
    ) -> "Donated | None":
        """Of a call with these arguments; the last arrays, `own` of them, are the function's."""
        if donate == "none":
            return None
        # In the order in which JAX flattens them.
        keys = [*range(len(args)), *sorted(kwargs)]
        arguments = [*args, *(kwargs[key] for key in sorted(kwargs))]
        if isinstance(donate, tuple):
            flags = [function.slot(key).parameter in donate for key in keys]
        else:
            flags = [not (key == 0 and spares_the_first(donate)) for key in keys]
        counts = [len(outlined(x, abstract)[0]) for x in arguments]
        of_arrays = [x for x, n in zip(flags, counts, strict=True) for _ in range(n)]
        return cls([*of_arrays, *[not isinstance(donate, tuple)] * own])

    def parted(self, arrays: Iterable[Any]) -> tuple[Arrays, Arrays]:
        """The arrays that are kept, and those that are donated."""
        arrays = list(arrays)
        return list(compress(arrays, self._kept)), list(compress(arrays, self.flags))

    def joined(self, kept: Iterable[Any], donated: Iterable[Any]) -> Arrays:
        kept, donated = iter(kept), iter(donated)
        return [next(donated if x else kept) for x in self.flags]
