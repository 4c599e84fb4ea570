"""Placements for a function's parameters, and readable names of its arguments."""

import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar

import jax
from jax.core import Tracer

from .._errors import Fault, PlacementError
from .._placement import AnyMesh, Decision, Placement, Target, World, decide, is_placement_leaf
from .._tree import Leaves, outlined

# The start of a path in (args, kwargs).
_ARGUMENT = re.compile(r"\[0\]\[(?P<index>\d+)\]|\[1\]\['(?P<name>\w+)'\]")


_ABOUT = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")


def about(fun: Any) -> dict[str, Any]:
    """Metadata to copy onto wrappers."""
    shown = inspect.unwrap(fun)
    return {name: getattr(shown, name) for name in _ABOUT if hasattr(shown, name)}


@dataclass(frozen=True)
class Function:
    """A function's name and signature, for messages."""

    name: str
    signature: inspect.Signature

    @classmethod
    def of(cls, fun: Any) -> "Function":
        name = getattr(inspect.unwrap(fun), "__name__", None)
        return cls(name if isinstance(name, str) else "the function", inspect.signature(fun))

    @cached_property
    def has_array_defaults(self) -> bool:
        return any(
            outlined(p.default)[0]
            for p in self.signature.parameters.values()
            if p.default is not p.empty
        )

    def named(self, faults: Sequence[Fault]) -> list[Fault]:
        """Renames faults of leaves of (args, kwargs) by parameter."""
        return [replace(fault, path=self.readable(fault.path)) for fault in faults]

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        try:
            yield
        except PlacementError as error:
            raise PlacementError(self.named(error.faults)) from None

    def readable(self, path: str) -> str:
        """A path in (args, kwargs) as text with the parameter's name: `model.layers[0].weight`."""
        match = _ARGUMENT.match(path)
        if match is None:
            return path
        if match["name"]:
            return match["name"] + path[match.end() :]
        index = int(match["index"])
        names = list(self.signature.parameters)
        kinds = [p.kind for p in self.signature.parameters.values()]
        several = inspect.Parameter.VAR_POSITIONAL
        first = kinds.index(several) if several in kinds else len(names)
        if index < first:
            name = names[index]
        else:
            name = f"{names[first]}[{index - first}]" if first < len(names) else f"args[{index}]"
        return name + path[match.end() :]


@dataclass(frozen=True, eq=False)
class Inputs:
    """The placements of a function's arguments."""

    placement: Any
    mesh: AnyMesh | None

    # The name of the option, and the placement of parameters that it doesn't name.
    option: ClassVar[str] = "in_shardings"
    otherwise: ClassVar[Placement] = None
    # The attributes of an array that decide whether it must be moved.
    decisive: ClassVar[Any] = staticmethod(attrgetter("shape", "dtype", "sharding", "committed"))

    def bind(self, function: Function, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Splits the arguments into positional and keyword ones. Adds defaults that hold arrays and
        have a placement.
        """
        if not kwargs and not function.has_array_defaults:
            return args, kwargs
        bound = function.signature.bind(*args, **kwargs)
        _give_defaults(bound, self.placement)
        return bound.args, bound.kwargs

    def resolve(
        self, function: Function, leaves: Leaves, args: Any, kwargs: Any, world: World
    ) -> list[Target | None]:
        """The targets of the arguments' arrays, `leaves`."""
        prefix = self.prefix(function, args, kwargs)
        decision = self.decide(function, leaves, prefix, world)
        if decision.faults:
            raise PlacementError(function.named(decision.faults))
        return decision.targets

    def decide(self, function: Function, leaves: Leaves, prefix: Any, world: World) -> Decision:
        return decide(leaves, prefix, self.mesh, world)

    def are_placed(self, world: World) -> bool:
        """Whether no argument must be moved before the call."""
        return False

    def state_of(self, arrays: Sequence[Any], world: World) -> Any:
        """Equal for arrays of which the same must be moved; None if unknown."""
        if _are_on_devices(frozenset(map(type, arrays))):
            return world, list(map(self.decisive, arrays))
        return None

    def missing(
        self,
        function: Function,
        leaves: Leaves,
        targets: Sequence[Target | None],
        world: World,
    ) -> Sequence[Target | None]:
        """The targets of arrays that must be moved before the call; None for the others."""
        return targets

    def missing_own(
        self, function: Function, own: Sequence[Any], world: World
    ) -> Sequence[Target | None]:
        """The same for the arrays of the function itself."""
        return [None] * len(own)

    def prefix(self, function: Function, args: Any, kwargs: Any) -> Any:
        """A prefix of (args, kwargs)."""
        given, name = self.placement, function.name
        if is_placement_leaf(given):
            return given
        if isinstance(given, dict):
            return self._prefix_by_name(function, given, args, kwargs)
        if type(given) in (tuple, list):
            if len(given) != len(args):
                raise TypeError(
                    f"{name}: {self.option} has {len(given)} entries, and there are {len(args)} "
                    "positional arguments. Give one for each, or a dict from parameter names"
                )
            return tuple(given), dict.fromkeys(kwargs, self.otherwise)
        raise TypeError(
            f"{name}: {self.option} is a {type(given).__name__}, which could be meant for the "
            "first argument or for all. Write a tuple with an entry for each positional argument, "
            "or a dict from parameter names"
        )

    def _prefix_by_name(
        self, function: Function, given: dict[Any, Any], args: Any, kwargs: Any
    ) -> Any:
        name, known = function.name, function.signature.parameters
        parameters = known.values()
        unknown = [key for key in given if key not in known]
        rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        if unknown and not (rest and rest not in given and all(n in kwargs for n in unknown)):
            raise TypeError(
                f"{name} has no parameter {', '.join(map(repr, unknown))}: it has "
                f"{', '.join(known)}. To place the entries of an argument that "
                "is a dict, write {'parameter name': {...}}"
            )
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        by_position = [given.get(p.name, self.otherwise) for p in positional[: len(args)]]
        left = len(args) - len(by_position)
        rest_of = (p.name for p in parameters if p.kind is p.VAR_POSITIONAL)
        several: Any = given.get(next(rest_of, None), self.otherwise)
        by_position += [several] * left if is_placement_leaf(several) else several
        named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
        others = given.get(rest, {key: given[key] for key in unknown})
        if isinstance(others, dict):
            spare = [key for key in others if key in named or key not in kwargs]
            if spare:
                raise TypeError(f"{name} got no {', '.join(map(repr, spare))} in **{rest}")
        elif not is_placement_leaf(others):
            raise TypeError(
                f"{name}: write a placement for all of **{rest}, or a dict from its names, not "
                f"a {type(others).__name__}"
            )

        def of_keyword(key: str) -> Any:
            if key in named:
                return given.get(key, self.otherwise)
            return others.get(key, self.otherwise) if isinstance(others, dict) else others

        return tuple(by_position), {key: of_keyword(key) for key in kwargs}


def _give_defaults(bound: inspect.BoundArguments, given: Any) -> None:
    parameters = bound.signature.parameters.values()
    if isinstance(given, dict):
        placed = {name for name, placement in given.items() if placement is not None}
    elif type(given) in (tuple, list):
        placed = {p.name for p in list(parameters)[: len(given)]}
    else:
        placed = set(bound.signature.parameters)
    before: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.name in bound.arguments or parameter.default is parameter.empty:
            continue
        if parameter.name in placed and outlined(parameter.default)[0]:
            bound.arguments[parameter.name] = parameter.default
            # Positional-only arguments before it can't be left out.
            for other in before if parameter.kind is parameter.POSITIONAL_ONLY else ():
                bound.arguments[other.name] = other.default
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            before.append(parameter)


@functools.lru_cache(maxsize=512)
def _are_on_devices(types: frozenset[type]) -> bool:
    return all(issubclass(t, jax.Array) and not issubclass(t, Tracer) for t in types)
