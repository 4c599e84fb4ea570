"""Warns of a program that is compiled twice, as its own results come back with other shardings."""

import weakref
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from ..._core.errors import RecompilationWarning, folded, warn
from ..._core.text import some
from ..._core.tree import Arrays

# Where an array is, and whether it is committed; None for NumPy arrays.
_At = tuple[Sharding, bool] | None


class Earlier:
    """The arguments at the last compilation for the same tree of arguments, and the results of that
    call.
    """

    def __init__(self) -> None:
        self._locations: list[tuple[tuple[int, ...], np.dtype, _At]] = []
        self._returned: list[weakref.ref[jax.Array]] = []

    def about_moved(
        self, name: str, arrays: Arrays, returned: Arrays, find_names: Callable[[], Sequence[str]]
    ) -> None:
        """Warns of results of the compilation before that are arguments of this one."""
        before, results = self._locations, {id(ref()) for ref in self._returned}
        after = self._locations = [(x.shape, x.dtype, _place_of(x)) for x in arrays]
        self._returned = [
            weakref.ref(result) for result in returned if isinstance(result, jax.Array)
        ]
        if [form for *form, _ in before] != [form for *form, _ in after]:  # of shapes and dtypes
            return
        moved: dict[str, list[int]] = {}
        trios = zip(arrays, before, after, strict=True)
        for i, (array, (*_, then), (*_, now)) in enumerate(trios):
            if id(array) in results and then != now:
                moved.setdefault(_show_move(then, now), []).append(i)
        if moved:
            _warn_of(name, find_names(), moved)


def _warn_of(name: str, names: Sequence[str], moved: dict[str, list[int]]) -> None:
    texts = [f"{some([*folded([names[i] for i in where])])}: {how}" for how, where in moved.items()]
    warn(
        f"{name} was compiled twice for the same shapes. Give it in_shardings and "
        "out_shardings, or place these arguments before the first call, as its results came "
        f"back with other shardings: {some(texts, '; ')}.",
        RecompilationWarning,
    )


def _place_of(array: object) -> _At:
    return (array.sharding, array.committed) if isinstance(array, jax.Array) else None


def _show_move(then: _At, now: _At) -> str:
    first, second = _show_place(then), _show_place(now)
    return f"{first}, then {second}" + (" on another mesh" if first == second else "")


def _show_place(place: _At) -> str:
    if place is None:
        return "a NumPy array"
    from ..._core.show import show_place  # which most programs don't need

    sharding, is_committed = place
    return show_place(sharding) + ("" if is_committed else " (not committed)")
