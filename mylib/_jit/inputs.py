"""Placements for a function's arguments."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

import jax
from jax.core import Tracer

from .._errors import PlacementError
from .._placement import AnyMesh, Decision, Placement, Target, World, decide, is_placement_leaf
from .._tree import Arrays, Leaves
from .signature import Function, Slot

Targets = Sequence[Target | None]


@dataclass(frozen=True)
class Moves:
    """Which arrays are moved before a call.

    - `also_staged`: whether arrays are also moved if the call is part of another program.
    - `needed`: returns the targets of the arrays that must be moved, and None for the others: for
        the arguments, and for the arrays of the function itself. It takes the arguments' leaves and
        targets, the function's arrays, and the world.
    - `decisive`: the part of an array that decides whether it must move.
    """

    also_staged: bool
    needed: Callable[[Leaves, Targets, Arrays, World], tuple[Targets, Targets]]
    decisive: Callable[[Any], Any]


def _all_arguments(
    leaves: Leaves, targets: Targets, own: Arrays, world: World
) -> tuple[Targets, Targets]:
    return targets, [None] * len(own)


_ALL = Moves(True, _all_arguments, attrgetter("shape", "dtype", "sharding", "committed"))


class _Thread(threading.local):
    """The targets resolved by the last call in this thread, until its function is traced."""

    resolved: "tuple[Inputs, Targets] | None" = None


_thread = _Thread()


@dataclass(frozen=True, eq=False)
class Inputs:
    """The placements of a function's arguments.

    - `placement`: one for all of them, a tuple with a prefix for each positional argument, or a
        dict from parameter names to prefixes.
    - `mesh`: the mesh for a `PartitionSpec`.
    - `decide`: finds the targets of the arguments' arrays, given a prefix of (args, kwargs).
    - `moves`: which arrays are moved before a call.
    - `option`: what `placement` is called in errors.
    - `otherwise`: the placement of parameters that it doesn't name.
    """

    placement: Any
    mesh: AnyMesh | None
    decide: Callable[[Leaves, Any, AnyMesh | None, World], Decision] = decide
    moves: Moves = _ALL
    option: str = "in_shardings"
    otherwise: Placement = None

    def bind(self, function: Function, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Splits the arguments into positional and keyword ones. Adds defaults that hold arrays and
        have a placement.
        """
        if not kwargs and not function.array_defaults:
            return args, kwargs
        return function.bind(args, kwargs, self._placed_defaults(function))

    def resolve(
        self, function: Function, leaves: Leaves, args: Any, kwargs: Any, world: World
    ) -> list[Target | None]:
        """The targets of the arguments' arrays, `leaves`."""
        prefix = self.prefix(function, args, kwargs)
        decision = self.decide(leaves, prefix, self.mesh, world)
        if decision.faults:
            raise PlacementError(decision.faults)
        return decision.targets

    def hand_over(self, targets: Targets | None) -> None:
        """Stores the resolved targets (or None) for the function about to be traced."""
        _thread.resolved = None if targets is None else (self, targets)

    def handed_over(self) -> Targets | None:
        """The targets of the call that has led to this trace, once; None if they are unknown."""
        resolved, _thread.resolved = _thread.resolved, None
        return resolved[1] if resolved is not None and resolved[0] is self else None

    def state_of(self, arrays: Sequence[Any], world: World) -> Any:
        """Equal for arrays that need the same moves; None if unknown."""
        if _are_on_devices(frozenset(map(type, arrays))):
            return world, list(map(self.moves.decisive, arrays))
        return None

    def prefix(self, function: Function, args: Any, kwargs: Any) -> Any:
        """A prefix of (args, kwargs)."""
        given = self.placement
        if is_placement_leaf(given):
            return given
        if isinstance(given, dict):
            by_name = _ByName(function, given, self.otherwise)
            by_name.check(args, kwargs)
            return (
                tuple([by_name.entry(function.slot(i)) for i in range(len(args))]),
                {key: by_name.entry(function.slot(key)) for key in kwargs},
            )
        if type(given) in (tuple, list):
            if len(given) != len(args):
                raise TypeError(
                    f"{function.name}: {self.option} is a {type(given).__name__} of {len(given)}; "
                    f"positional arguments in this call: {len(args)}. Give one for each, or a dict "
                    "from parameter names"
                )
            return tuple(given), dict.fromkeys(kwargs, self.otherwise)
        raise TypeError(
            f"{function.name}: {self.option} is a {type(given).__name__}, which could be meant for "
            "the first argument or for all. Write a tuple with an entry for each positional "
            "argument, or a dict from parameter names"
        )

    def _placed_defaults(self, function: Function) -> frozenset[str]:
        """The parameters whose defaults hold arrays that have a placement."""
        given, found = self.placement, function.array_defaults
        if isinstance(given, dict):
            return frozenset(name for name in found if given.get(name) is not None)
        if type(given) in (tuple, list):
            return frozenset(found).intersection([*function.signature.parameters][: len(given)])
        return frozenset(found)


class _ByName:
    """A dict from parameter names to prefixes."""

    def __init__(self, function: Function, given: Mapping[Any, Any], otherwise: Placement):
        self.function = function
        self.given = given
        self.otherwise = otherwise

    @cached_property
    def others(self) -> Any:
        """The placements of `**kwargs`, whose names may stand beside the parameters'."""
        known = self.function.signature.parameters
        among = {key: entry for key, entry in self.given.items() if key not in known}
        return self.given.get(self.function.rest, among)

    def entry(self, slot: Slot) -> Any:
        """The prefix for an argument."""
        if slot.within is None:
            return self.given.get(slot.parameter, self.otherwise)
        if isinstance(slot.within, str):
            others = self.others
            return others.get(slot.within, self.otherwise) if isinstance(others, dict) else others
        several = self.given.get(slot.parameter, self.otherwise)
        return several if is_placement_leaf(several) else several[slot.within]

    def check(self, args: Any, kwargs: Any) -> None:
        function, given = self.function, self.given
        name, known, rest = function.name, function.signature.parameters, function.rest
        unknown = [key for key in given if key not in known]
        if unknown and not (rest and rest not in given and all(key in kwargs for key in unknown)):
            raise TypeError(
                f"{name} has no parameter {', '.join(map(repr, unknown))}: it has "
                f"{', '.join(known)}. To place the entries of an argument that "
                "is a dict, write {'parameter name': {...}}"
            )
        several: Any = given.get(function.several)
        count = max(0, len(args) - len(function.by_position))
        if not is_placement_leaf(several) and not isinstance(several, tuple | list):
            raise TypeError(
                f"{name}: write a placement for all of *{function.several}, or a tuple with one "
                f"for each, not a {type(several).__name__}"
            )
        if not is_placement_leaf(several) and len(several) != count:
            raise TypeError(
                f"{name}: there are {len(several)} entries for *{function.several}, and it has "
                f"{count}. Give one for each, or a placement for all of them"
            )
        if isinstance(self.others, dict):
            spare = [key for key in self.others if key in function.by_keyword or key not in kwargs]
            if spare:
                raise TypeError(f"{name} got no {', '.join(map(repr, spare))} in **{rest}")
        elif not is_placement_leaf(self.others):
            raise TypeError(
                f"{name}: write a placement for all of **{rest}, or a dict from its names, not "
                f"a {type(self.others).__name__}"
            )


@lru_cache(maxsize=512)
def _are_on_devices(types: frozenset[type]) -> bool:
    return all(issubclass(t, jax.Array) and not issubclass(t, Tracer) for t in types)
