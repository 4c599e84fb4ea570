"""Modules that gather their weights when one of their methods is called."""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding

from .._errors import Fault, PlacementError, because
from .._placement import World, axes_in, axis_names, current_world, entries_of, sharding_of, show
from .._tree import Arrays, Leaves, Outline, outlined, split
from .ahead import Turns, call_ahead
from .checkpoint import Policy, recompute_resharded
from .explicit import as_written, has_explicit_axes, on_auto_axes
from .gather import Route, gather, keep
from .wide import call_with_sinks

# The field that the classes made here add to those of the original.
_PLAN = "_fully_shard_plan"


@dataclass(frozen=True)
class Plan:
    """How `fully_shard` has its layers gather and compute."""

    route: Route
    ranks: tuple[int, ...]
    checkpoint: bool
    policy: Policy | None
    in_turn: bool
    turns: Turns | None


def is_layer(x: Any) -> bool:
    """Whether `x` gathers its weights already."""
    return isinstance(x, eqx.Module) and _PLAN in x.__dict__


def as_layer(module: eqx.Module, methods: Sequence[str], plan: Plan) -> Any:
    """The same Module as an instance of a subclass whose `methods` gather its weights."""
    cls = _layer_class(type(module), tuple(methods))
    return _make(cls, {**module.__dict__, _PLAN: plan})


def _make(cls: type, fields: dict[str, Any]) -> Any:
    # As Equinox unflattens: without `__init__` and its checks.
    made = object.__new__(cls)
    made.__dict__.update(fields)
    return made


@functools.cache
def _layer_class(cls: type, methods: tuple[str, ...]) -> type:
    namespace: dict[str, Any] = {name: _gathering(cls, getattr(cls, name)) for name in methods}
    namespace |= {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__annotations__": {_PLAN: Any},
        _PLAN: eqx.field(static=True, repr=False, default=None),
        # This class can't be imported by name, and a plan refers to devices: pickle the original.
        "__reduce__": lambda layer: (_make, (cls, _split_fields(layer)[0])),
        "__copy__": lambda layer: _make(type(layer), layer.__dict__),
        "__deepcopy__": _deep_copy,
    }
    return type(cls)(cls.__name__, (cls,), namespace)


def _split_fields(layer: Any) -> tuple[dict[str, Any], Plan]:
    """The fields of the original, and the plan."""
    fields = dict(layer.__dict__)
    plan = fields.pop(_PLAN)
    return fields, plan


def _deep_copy(layer: Any, memo: dict[int, Any]) -> Any:
    fields, plan = _split_fields(layer)
    return _make(type(layer), {**copy.deepcopy(fields, memo), _PLAN: plan})


def _gathering(cls: type, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that gathers the weights, and calls `method` with them."""

    @functools.wraps(method)
    def called(layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        fields, plan = _split_fields(layer)
        leaves, world = split(_make(cls, fields)), current_world()
        stacked = _stacked(plan, leaves)
        _refuse(plan, leaves, stacked, world)
        route, weights = plan.route.without(stacked), leaves.arrays
        given, outline = outlined((args, kwargs))
        call = _Call(method, leaves, outline)
        compute = call
        explicit = has_explicit_axes(world.mesh)
        if explicit:
            compute, given, types = as_written(call, weights, given, route)

        def run(weights: Arrays, given: Arrays) -> Arrays:
            gathered, sinks = gather(weights, route)
            if route.reduce_dtype is None:
                return compute(gathered, given)
            return call_with_sinks(compute, gathered, sinks, given)

        if explicit:
            run = on_auto_axes(run, types)
        if plan.turns is not None:
            return call.filled(call_ahead(run, weights, given, route.kept, plan.turns))
        if plan.in_turn and not stacked:
            weights, given = _after(weights, given, route)
        if plan.checkpoint:
            policy = None if plan.policy is None else recompute_resharded(plan.policy)
            run = jax.checkpoint(run, policy=policy)
        return call.filled(run(weights, given))

    return called


class _Call:
    """A call of a layer's method, as a function of its weights and the arrays of its arguments."""

    def __init__(self, method: Callable[..., Any], leaves: Leaves, given: Outline):
        self._method, self._leaves, self._given = method, leaves, given
        self._returned = given

    def __call__(self, weights: Arrays, given: Arrays) -> Arrays:
        args, kwargs = self._given.fill(given)
        returned = self._method(self._leaves.join(weights), *args, **kwargs)
        arrays, self._returned = outlined(returned)
        return arrays

    def filled(self, arrays: Arrays) -> Any:
        """What the method has returned, with these arrays."""
        return self._returned.fill(arrays)


def _after(weights: Arrays, given: Arrays, route: Route) -> tuple[Arrays, Arrays]:
    """The weights, available only after the arguments."""
    weights, given = jax.lax.optimization_barrier((weights, given))
    # Constrain them again. Otherwise the compiler gathers them before the barrier and keeps them.
    return keep(weights, route.kept), given


def _stacked(plan: Plan, leaves: Leaves) -> int:
    """The number of dimensions that loops over stacked layers have removed from the weights."""
    found = {rank - x.ndim for rank, x in zip(plan.ranks, leaves.arrays, strict=False)}
    if len(plan.ranks) == len(leaves.arrays) and len(found) <= 1:
        dims = found.pop() if found else 0
        if dims >= 0:
            return dims
    name = type(leaves.tree).__qualname__
    raise PlacementError(
        [
            because(
                "its arrays are not those of the model that fully_shard was called with, nor "
                f"slices of them: their ranks are {[x.ndim for x in leaves.arrays]}, and were "
                f"{list(plan.ranks)}",
                "change the model before fully_shard. If weights are tied (eqx.nn.Shared), name a "
                "class that holds both of them, or leave theirs out of `layers`",
                f"fully_shard, and a call of {name}",
            )
        ]
    )


def _refuse(plan: Plan, leaves: Leaves, stacked: int, world: World) -> None:
    faults: list[Fault] = []
    if stacked and plan.turns is not None:
        faults.append(
            because(
                "the layers are stacked: the loop gathers the weights of one layer in each step",
                "leave out prefetch=, and write jax.lax.scan(..., unroll=2)",
                "fully_shard(..., prefetch=...)",
            )
        )
    cls = type(leaves.tree).__qualname__
    leaves = replace(leaves, naming=lambda path: cls + jtu.keystr(path))
    for i, target in [*enumerate(plan.route.kept), *enumerate(plan.route.used)]:
        sharding = None if target is None else sharding_of(target)
        if not isinstance(sharding, NamedSharding):
            continue
        taken = [a for entry in entries_of(sharding.spec)[:stacked] for a in axis_names(entry)]
        manual = sorted(axes_in(sharding.spec) & world.manual_axes)
        if not (taken or manual):
            continue
        asked = show(sharding, None)
        if taken:
            stacked_too = because(
                f"{taken[0]!r} splits them by layer: each step of the loop would gather all layers",
                "shard another dimension: fsdp(..., stacked=...) with the class of the layers "
                "never takes the first",
                f"{asked}, of the stacked layers",
            )
            faults.append(leaves.at(i, stacked_too))
        if manual:
            in_map = because(
                f"the layer is called inside shard_map, where {manual[0]!r} is Manual: the "
                "compiler can't gather over it",
                "leave the axis Auto (axis_names= of filter_shard_map), or gather by hand",
                asked,
            )
            faults.append(leaves.at(i, in_map))
    if faults:
        raise PlacementError(faults)
