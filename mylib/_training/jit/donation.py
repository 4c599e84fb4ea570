"""Which arguments of a function are donated, each once, and let go of after the call."""

from functools import partial
from itertools import compress
from operator import not_
from typing import Literal

import jax
from jax.core import Tracer

from ..._core.tree import Arrays, outlined
from ..._moving.transfer import let_go
from ..advice import about_not_taken
from .naming import names_of
from .signature import Function
from .steps import Call, Step

Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"] | tuple[str, ...]
_WORDS = ("all", "all-except-first", "warn", "warn-except-first", "none")


def checked(donate: object, function: Function) -> Donate:
    """`donate`, if it is a word or a tuple of names of parameters."""
    parameters = function.signature.parameters
    if isinstance(donate, str) and donate in _WORDS:
        return donate
    if isinstance(donate, tuple | list) and all(name in parameters for name in donate):
        return tuple(donate)
    raise ValueError(
        f"filter_jit: donate={donate!r} is none of {', '.join(map(repr, _WORDS))}, and no tuple of "
        f"parameters of {function.name}, such as {(*parameters,)!r}"
    )


class Donation(Step):
    """Donates arrays of a call, each once, and lets go of them after it."""

    def __init__(self, donate: Donate, call: Call):
        self._donate = donate
        self._donated = _which(donate, call)
        self._spared = tuple(map(not_, self._donated))

    @property
    def positions(self) -> list[int]:
        """The positions of the donated arrays among all arrays that the program takes."""
        return [i for i, donated in enumerate(self._donated) if donated]

    def before(self, arrays: Arrays, call: Call) -> Arrays:
        """Copies each donated array that occurs twice or is also passed without being donated: JAX
        refuses to donate those.
        """
        if call.is_abstract:
            return arrays
        # By identity: two arrays that share memory are left to JAX, which raises.
        donated = list(compress(arrays, self._donated))
        taken = set(map(id, compress(arrays, self._spared)))
        if arrays is not call.arrays:
            taken.update(map(id, compress(call.arrays, self._spared)))
        if len(taken.union(map(id, donated))) == len(taken) + len(donated):
            return arrays
        arrays = list(arrays)
        for i in self.positions:
            x = arrays[i]
            if isinstance(x, jax.Array) and not isinstance(x, Tracer) and id(x) in taken:
                arrays[i] = jax.device_put(x, may_alias=False)
            taken.add(id(x))
        return arrays

    def after(self, call: Call) -> None:
        """Deletes donated arrays that had to be moved before the call."""
        if call.taken is not call.arrays and call.mode == "eager":
            spared = compress(call.arrays, self._spared)
            let_go(list(compress(call.arrays, self._donated)), [*spared, *call.taken])

    def compiled(self, call: Call) -> None:
        if call.mode == "eager" and self._donate in ("warn", "warn-except-first"):
            donated = list(compress(call.taken, self._donated))
            about_not_taken(call.wrapped.name, donated, partial(self._names, call))

    def _names(self, call: Call) -> list[str]:
        return list(compress(names_of(call), self._donated))


def _which(donate: Donate, call: Call) -> tuple[bool, ...]:
    """Whether each array of a call is donated. The last ones are the function's own."""
    wrapped = call.wrapped
    # In the order in which JAX flattens them.
    arguments = [*enumerate(call.args), *sorted(call.kwargs.items())]
    if isinstance(donate, tuple):
        flags = [wrapped.function.parameter(key) in donate for key, _ in arguments]
    else:
        spares_first = donate in ("all-except-first", "warn-except-first")
        flags = [not (key == 0 and spares_first) for key, _ in arguments]
    counts = [len(outlined(x, call.is_abstract)[0]) for _, x in arguments]
    of_arrays = [x for x, n in zip(flags, counts, strict=True) for _ in range(n)]
    return (*of_arrays, *[not isinstance(donate, tuple)] * wrapped.fun.count)
