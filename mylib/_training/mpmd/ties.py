"""Parameters that are in several stages."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..._core.compat import jit
from ..._core.errors import Fault, PlacementError, because
from .modules import Module
from .stage import Stage, Struct, is_floating

Where = Callable[[Sequence[Any]], Any]
# An array: its stage, and its number there.
Tied = tuple[int, int]


def tied_groups(tied: Sequence[tuple[Where, Where]], modules: Sequence[Module]) -> list[list[Tied]]:
    """Arrays that are one parameter: for each group, the stage and the number of each array."""
    faults: list[Fault] = []
    groups: list[list[Tied]] = []
    for n, pair in enumerate(tied):
        first, second = (_places(where, modules) for where in pair)
        faults += [
            because(reason, _FIX, "one parameter in two places", f"tied[{n}]")
            for reason in _unequal(first, second, modules)
        ]
        if not faults:
            for places in zip(first, second, strict=True):
                _join(groups, places)
    if faults:
        raise PlacementError(faults)
    return groups


def _places(where: Where, modules: Sequence[Module]) -> list[Tied]:
    # Objects in the arrays' places show which ones `where` takes.
    marks = [[object() for _ in module.form.structs] for module in modules]
    places = {id(x): (s, i) for s, stubs in enumerate(marks) for i, x in enumerate(stubs)}
    marked = [module.form.outline.fill(stubs) for module, stubs in zip(modules, marks, strict=True)]
    return [places[id(x)] for x in jax.tree.leaves(where(marked)) if id(x) in places]


_FIX = "give two functions of the stages, whose arrays have equal shapes and dtypes"


def _unequal(first: list[Tied], second: list[Tied], modules: Sequence[Module]) -> Iterator[str]:
    """Why the arrays in these places can't be one parameter."""
    if len(first) != len(second) or not first:
        yield f"the first function takes {len(first)} arrays, and the second {len(second)}"
        return
    for (s, i), (t, j) in zip(first, second, strict=True):
        a, b = modules[s].form.structs[i], modules[t].form.structs[j]
        if a.shape != b.shape or a.dtype != b.dtype:
            yield f"stages[{s}] has {a.dtype}{a.shape}, and stages[{t}] has {b.dtype}{b.shape}"
        if (s, i) == (t, j):
            yield "both are the same array"
        if not is_floating(a):
            yield "integers have no gradient"


def _join(groups: list[list[Tied]], places: Sequence[Tied]) -> None:
    """Adds places of one parameter to the groups that have one of them, which become one group."""
    touched = [group for group in groups if not set(places).isdisjoint(group)]
    joined = list(dict.fromkeys([*(x for group in touched for x in group), *places]))
    groups[:] = [group for group in groups if group not in touched] + [joined]


@dataclass(frozen=True, eq=False)
class Tie:
    """Places that hold one parameter. Its gradient is the sum of theirs."""

    places: list[Tied]
    structs: list[Struct]
    # Adds them on the mesh of the first place; None in processes without its devices.
    add: jax.stages.Compiled | None

    @classmethod
    def of(cls, places: list[Tied], stages: Sequence[Stage]) -> "Tie":
        structs = [stages[s].module.structs[i] for s, i in places]
        first = structs[0]
        add = None
        if stages[places[0][0]].is_here:
            program = jit(lambda *grads: sum(grads[1:], grads[0]), out_shardings=first.sharding)
            add = program.lower(*[first] * len(places)).compile()
        return cls(places, structs, add)
