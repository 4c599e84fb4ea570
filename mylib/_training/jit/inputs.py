"""Placements for a function's arguments, which are moved there before a call."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import compress
from operator import attrgetter, is_
from typing import TYPE_CHECKING, ClassVar

import jax
from jax.core import Tracer
from jax.experimental.layout import Format
from jaxtyping import PyTree

from ..._core.contexts import on_one_device
from ..._core.errors import PlacementError
from ..._core.placement import (
    AnyMesh,
    Decision,
    Placement,
    Target,
    World,
    current_world,
    decide,
    is_placement_leaf,
    is_rule,
)
from ..._core.tree import Arrays, Leaves, split
from ..._moving.several import Alone, one_call, raised_in_all
from ..._moving.transfer import place_leaves
from .signature import Function
from .steps import Call, Step

if TYPE_CHECKING:
    from ..._moving.several import CommonCall

Targets = Sequence[Target | None]
Args = Sequence[object]
Kwargs = Mapping[str, object]
Prefix = PyTree[Placement]


@dataclass(frozen=True, eq=False)
class Inputs:
    """The placements of a function's arguments.

    - `placement`: one for all of them, a tuple with a prefix for each positional argument, or a
        dict from parameter names to prefixes.
    - `mesh`: the mesh for a `PartitionSpec`.
    """

    placement: PyTree[Placement]
    mesh: AnyMesh | None

    # What `placement` is called in errors.
    option: ClassVar[str] = "in_shardings"
    # The placement of parameters that it doesn't name.
    otherwise: ClassVar[Placement] = None
    # Whether arrays are also moved if the call is part of another program.
    also_staged: ClassVar[bool] = True
    # The attributes of an array that decide whether it must move.
    decisive: ClassVar[Sequence[str]] = ("sharding", "committed")

    def decide(self, leaves: Leaves, prefix: Prefix, world: World) -> Decision:
        """Finds the targets of the arguments' arrays. `prefix` is one of (args, kwargs)."""
        return decide(leaves, prefix, self.mesh, world)

    def needed(
        self, leaves: Leaves, targets: Targets, fun_arrays: Arrays, world: World
    ) -> tuple[Targets, Targets]:
        """The targets of the arrays that must be moved before the call, and None for the others: of
        the arguments, and of the function itself.
        """
        return targets, [None] * len(fun_arrays)

    def bind(self, function: Function, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Splits the arguments into positional and keyword ones. Adds defaults that hold arrays and
        have a placement.
        """
        if not kwargs and not function.array_defaults:
            return args, kwargs
        return function.bind(args, kwargs, self._placed_defaults(function))

    def resolve(
        self, function: Function, leaves: Leaves, args: Args, kwargs: Kwargs, world: World
    ) -> list[Target | None]:
        """The targets of the arguments' arrays, `leaves`."""
        decision = self.decide(leaves, self.prefix(function, args, kwargs), world)
        if decision.faults:
            raise PlacementError(decision.faults)
        return decision.targets

    def meeting(self, world: World, abstract: bool) -> "AbstractContextManager[Alone | CommonCall]":
        """The call that processes have in common if they place arguments."""
        return one_call(self.mesh, world, False if abstract else None)

    @contextmanager
    def raised_in_all(self, abstract: bool) -> Iterator[None]:
        """Raises an error in all processes, before any of them has read its arguments."""
        alone = abstract or on_one_device.value
        with self.meeting(current_world(), alone) as call, raised_in_all(call.processes):
            yield

    def state_of(self, arrays: Arrays, world: World) -> object:
        """Equal for arrays that need the same moves; None if unknown."""
        if not _are_on_devices(frozenset(map(type, arrays))):
            return None
        # Shardings are equal whatever the rank, and a spec with more entries fits some ranks only.
        ranks = list(map(len, map(_shape_of, arrays)))
        return world, ranks, list(map(self._state_of_one, arrays))

    @cached_property
    def _state_of_one(self) -> Callable[[jax.Array], object]:
        # Rules alone ask for shapes: what is split over a mesh divides into its parts.
        placements = jax.tree.leaves(self.placement, is_leaf=is_placement_leaf)
        asked_by_rules = ("shape", "dtype") if any(map(is_rule, placements)) else ()
        return attrgetter(*self.decisive, *asked_by_rules)

    def prefix(self, function: Function, args: Args, kwargs: Kwargs) -> Prefix:
        """A prefix of (args, kwargs)."""
        placement = self.placement
        if is_placement_leaf(placement):
            return placement
        if isinstance(placement, dict):
            return _by_name(placement, self.otherwise, function, args, kwargs)
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
        self._resolved: tuple[object, Targets] | None = None
        # The state of the last arguments that needed no moves.
        self._in_place: object = None

    def before(self, arrays: Arrays, call: Call) -> Arrays:
        inputs, world = self._inputs, current_world()
        if on_one_device.value or (world.staged and not inputs.also_staged):
            return arrays
        state = inputs.state_of(arrays, world)
        if state is not None and self._in_place == state:
            return arrays
        leaves = call.wrapped.function.split((call.args, call.kwargs), call.is_abstract)
        fun_arrays = arrays[call.outline.count :]
        with inputs.meeting(world, call.is_abstract) as placing:
            with raised_in_all(placing.processes):
                targets = self._targets(call, leaves, world)
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
        for position, value in zip(leaves.positions, values, strict=True):
            everything[position] = value
        return [*compress(everything, call.outline.are_arrays), *fun_values]

    def _targets(self, call: Call, leaves: Leaves, world: World) -> Targets:
        """Rules are called once for the same shapes in the same context."""
        key = ([(array.shape, array.dtype) for array in leaves.arrays], leaves.kinds, world)
        resolved = self._resolved
        if resolved is None or resolved[0] != key:
            function = call.wrapped.function
            targets = self._inputs.resolve(function, leaves, call.args, call.kwargs, world)
            resolved = self._resolved = key, targets
        return resolved[1]


# Each call asks this of each array, and `x.ndim` would call two functions.
_shape_of = attrgetter("aval.shape")


def _by_name(
    entries: Mapping[str, Prefix],
    default: Placement,
    function: Function,
    args: Args,
    kwargs: Kwargs,
) -> Prefix:
    """A prefix for each argument, from a dict that has them by parameter. `*args` and `**kwargs`
    have one for each of their arguments; those in `**kwargs` may also have one of their own.
    """
    parameters = function.signature.parameters
    own = set(kwargs).difference(parameters)
    unknown = [key for key in entries if key not in parameters and key not in own]
    if unknown:
        raise TypeError(
            f"{function.name} has no parameter {', '.join(map(repr, unknown))}: it has "
            f"{', '.join(parameters)}. To place the entries of an argument that is a dict, write "
            "{'parameter name': {...}}"
        )

    def entry(key: int | str) -> Prefix:
        return entries.get(function.parameter(key), default)

    own.intersection_update(entries)
    by_keyword = {key: entries[key] if key in own else entry(key) for key in kwargs}
    return tuple(map(entry, range(len(args)))), by_keyword


def _abstract(leaves: Leaves, targets: Targets, world: World) -> Arrays:
    """The arrays, or their shapes at the targets."""
    shapes = jax.eval_shape(lambda arrays: arrays, leaves.arrays)
    trios = zip(leaves.arrays, shapes, targets, strict=True)
    return [array if to is None else shape.update(sharding=to) for array, shape, to in trios]


@lru_cache(maxsize=512)
def _are_on_devices(types: frozenset[type]) -> bool:
    return all(issubclass(t, jax.Array) and not issubclass(t, Tracer) for t in types)
