"""Placements for a function's arguments, which are moved there before a call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import compress
from operator import attrgetter, is_
from typing import Any, ClassVar

import jax
from jax.core import Tracer
from jax.experimental.layout import Format

from .._errors import PlacementError
from .._placement import (
    AnyMesh,
    Decision,
    Placement,
    Target,
    World,
    current_world,
    decide,
    is_placement_leaf,
    is_rule,
    on_one_device,
)
from .._processes import one_call, processes_of_call, raised_in_all
from .._transfer import place_leaves
from .._tree import Arrays, Leaves, split
from .signature import Function
from .steps import Call, Step

Targets = Sequence[Target | None]


@dataclass(frozen=True, eq=False)
class Inputs:
    """The placements of a function's arguments.

    - `placement`: one for all of them, a tuple with a prefix for each positional argument, or a
        dict from parameter names to prefixes.
    - `mesh`: the mesh for a `PartitionSpec`.
    """

    placement: Any
    mesh: AnyMesh | None

    # What `placement` is called in errors.
    option: ClassVar[str] = "in_shardings"
    # The placement of parameters that it doesn't name.
    otherwise: ClassVar[Placement] = None
    # Whether arrays are also moved if the call is part of another program.
    also_staged: ClassVar[bool] = True
    # The attributes of an array that decide whether it must move.
    decisive: ClassVar[Sequence[str]] = ("sharding", "committed")

    def decide(self, leaves: Leaves, prefix: Any, world: World) -> Decision:
        """Finds the targets of the arguments' arrays. `prefix` is one of (args, kwargs)."""
        return decide(leaves, prefix, self.mesh, world)

    def needed(
        self, leaves: Leaves, targets: Targets, fun_arrays: Arrays, world: World
    ) -> tuple[Targets, Targets]:
        """The targets of the arrays that must be moved before the call, and None for the others: of
        the arguments, and of the function itself.
        """
        return targets, [None] * len(fun_arrays)

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
        decision = self.decide(leaves, self.prefix(function, args, kwargs), world)
        if decision.faults:
            raise PlacementError(decision.faults)
        return decision.targets

    def state_of(self, arrays: Sequence[Any], world: World) -> Any:
        """Equal for arrays that need the same moves; None if unknown."""
        if not _are_on_devices(frozenset(map(type, arrays))):
            return None
        # Shardings are equal whatever the rank, and a spec with more entries fits some ranks only.
        ranks = list(map(len, map(_shape_of, arrays)))
        return world, ranks, list(map(self._state_of_one, arrays))

    @cached_property
    def _state_of_one(self) -> Callable[[Any], Any]:
        # Rules alone ask for shapes: what is split over a mesh divides into its parts.
        placements = jax.tree.leaves(self.placement, is_leaf=is_placement_leaf)
        asked_by_rules = ("shape", "dtype") if any(map(is_rule, placements)) else ()
        return attrgetter(*self.decisive, *asked_by_rules)

    def prefix(self, function: Function, args: Any, kwargs: Any) -> Any:
        """A prefix of (args, kwargs)."""
        placement = self.placement
        if is_placement_leaf(placement):
            return placement
        if isinstance(placement, dict):
            return _by_name(placement, self.otherwise, function, len(args), kwargs)
        if type(placement) in (tuple, list):
            if len(placement) != len(args):
                raise TypeError(
                    f"{function.name}: {self.option} is a {type(placement).__name__} of "
                    f"{len(placement)}; positional arguments in this call: {len(args)}. Give one "
                    "for each, or a dict from parameter names"
                )
            return tuple(placement), dict.fromkeys(kwargs, self.otherwise)
        raise TypeError(
            f"{function.name}: {self.option} is a {type(placement).__name__}, which could be meant "
            "for the first argument or for all. Write a tuple with an entry for each positional "
            "argument, or a dict from parameter names"
        )

    def _placed_defaults(self, function: Function) -> frozenset[str]:
        """The parameters whose defaults hold arrays that have a placement."""
        placement, defaults = self.placement, function.array_defaults
        if isinstance(placement, dict):
            return frozenset(name for name in defaults if placement.get(name) is not None)
        if type(placement) in (tuple, list):
            return defaults.intersection([*function.signature.parameters][: len(placement)])
        return defaults


class Placing(Step):
    """Moves the arrays of a call to their targets."""

    def __init__(self, inputs: Inputs):
        self._inputs = inputs
        # The arguments whose placements were resolved last, and their targets.
        self._resolved: tuple[Any, Targets] | None = None
        # The state of the last arguments that needed no moves.
        self._in_place: Any = None

    def before(self, arrays: Arrays, call: Call) -> Arrays:
        inputs, world = self._inputs, current_world()
        if on_one_device.value or (world.staged and not inputs.also_staged):
            return arrays
        state = inputs.state_of(arrays, world)
        if state is not None and self._in_place == state:
            return arrays
        leaves = call.wrapped.function.split((call.args, call.kwargs), call.is_abstract)
        processes = () if call.is_abstract else processes_of_call(inputs.mesh, world)
        with one_call(processes), raised_in_all(processes):
            targets = self._targets(call, leaves, world)
        fun_arrays = arrays[call.outline.count :]
        moves, fun_moves = inputs.needed(leaves, targets, fun_arrays, world)
        place = _abstract if call.is_abstract else place_leaves
        values = place(leaves, moves, world)
        fun_values = place(split(fun_arrays), fun_moves, world)
        if all(map(is_, values + fun_values, leaves.arrays + fun_arrays)):
            # The state does not include layouts.
            if not any(isinstance(target, Format) for target in targets):
                self._in_place = state
            return arrays
        everything = list(leaves.all)
        for position, x in zip(leaves.positions, values, strict=True):
            everything[position] = x
        return [*compress(everything, call.outline.are_arrays), *fun_values]

    def _targets(self, call: Call, leaves: Leaves, world: World) -> Targets:
        """Rules are called once for the same shapes in the same context."""
        key = ([(x.shape, x.dtype) for x in leaves.arrays], leaves.kinds, world)
        resolved = self._resolved
        if resolved is None or resolved[0] != key:
            function = call.wrapped.function
            targets = self._inputs.resolve(function, leaves, call.args, call.kwargs, world)
            resolved = self._resolved = key, targets
        return resolved[1]


# Each call asks this of each array, and `x.ndim` would call two functions.
_shape_of = attrgetter("aval.shape")


def _by_name(
    entries: Mapping[Any, Any], default: Placement, function: Function, count: int, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A prefix for each argument, from a dict that has them by parameter. The first `count`
    arguments are positional.
    """
    name, parameters = function.name, function.signature.parameters
    args_name, kwargs_name = function.args_name, function.kwargs_name
    # The entries of `**kwargs` may stand beside the parameters'.
    beside = {key: entry for key, entry in entries.items() if key not in parameters}
    if beside and not (kwargs_name and kwargs_name not in entries and set(beside) <= set(kwargs)):
        raise TypeError(
            f"{name} has no parameter {', '.join(map(repr, beside))}: it has "
            f"{', '.join(parameters)}. To place the entries of an argument that is a dict, write "
            "{'parameter name': {...}}"
        )
    by_position = [entries.get(key, default) for key in function.by_position[:count]]
    by_keyword = {key: entries.get(key, default) for key in kwargs if key in function.by_keyword}
    further = range(count - len(by_position))
    in_args = _for_each(entries.get(args_name, default), further, name, f"*{args_name}")
    keys = [key for key in kwargs if key not in by_keyword]
    in_kwargs = entries.get(kwargs_name, beside or default)
    named = _for_each(in_kwargs, keys, name, f"**{kwargs_name}")
    return (*by_position, *in_args.values()), dict.fromkeys(keys, default) | named | by_keyword


def _for_each(entry: Any, keys: Sequence[Any], name: str, what: str) -> dict[Any, Any]:
    """The prefixes of the arguments in `*args`, which are numbered, or in `**kwargs`."""
    if is_placement_leaf(entry):
        return dict.fromkeys(keys, entry)
    if isinstance(entry, tuple | list) and len(entry) == len(keys):
        entry = dict(enumerate(entry))
    if not (isinstance(entry, dict) and set(entry) <= set(keys)):
        raise TypeError(
            f"{name}: the placement of {what} is {entry!r}, for {[*keys]}. Give a placement for "
            "all of them, or one for each: a tuple for arguments by position, a dict for those by "
            "name"
        )
    return entry


def _abstract(leaves: Leaves, targets: Targets, world: World) -> list[Any]:
    """The arrays, or their shapes at the targets."""
    shapes = jax.eval_shape(lambda arrays: arrays, leaves.arrays)
    trios = zip(leaves.arrays, shapes, targets, strict=True)
    return [x if target is None else shape.update(sharding=target) for x, shape, target in trios]


@lru_cache(maxsize=512)
def _are_on_devices(types: frozenset[type]) -> bool:
    return all(issubclass(t, jax.Array) and not issubclass(t, Tracer) for t in types)
