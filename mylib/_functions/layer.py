"""Modules that gather their weights when one of their methods is called."""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.sharding import AxisType, NamedSharding

from .._errors import Fault, PlacementError, because
from .._placement import World, axes_in, axis_names, current_world, entries_of, sharding_of, show
from .._tree import Arrays, Leaves, outlined, split
from .ahead import call_ahead
from .checkpoint import Policy, filter_checkpoint, recompute_resharded
from .gather import Route, gather, keep
from .turns import Turns
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
        route, arrays = plan.route.without(stacked), leaves.arrays

        def run(arrays: Arrays, args: Any, kwargs: Any) -> Any:
            gathered, sinks = gather(arrays, route)

            def plain(gathered: Arrays, args: Any, kwargs: Any) -> Any:
                return method(leaves.join(gathered), *args, **kwargs)

            if route.reduce_dtype is None:
                return plain(gathered, args, kwargs)
            return _with_sinks(plain, gathered, sinks, args, kwargs)

        if AxisType.Explicit in world.mesh.axis_types:
            run = _in_auto_axes(run)
        if plan.turns is not None:
            return _ahead(run, arrays, route, plan.turns, args, kwargs)
        if plan.in_turn and not stacked:
            arrays, args, kwargs = _after(arrays, route, args, kwargs)
        if plan.checkpoint:
            policy = None if plan.policy is None else recompute_resharded(plan.policy)
            run = filter_checkpoint(run, policy=policy)
        return run(arrays, args, kwargs)

    return called


def _with_sinks(
    run: Callable[..., Any], weights: Arrays, sinks: Arrays, args: Any, kwargs: Any
) -> Any:
    given, outline = outlined((args, kwargs))
    returned = outline

    def computed(weights: Arrays, given: Arrays) -> Arrays:
        nonlocal returned
        arrays, returned = outlined(run(weights, *outline.fill(given)))
        return arrays

    arrays = call_with_sinks(computed, weights, sinks, given)
    return returned.fill(arrays)


def _after(arrays: Arrays, route: Route, args: Any, kwargs: Any) -> tuple[Arrays, Any, Any]:
    """The weights, available only after the arguments."""
    given, outline = outlined((args, kwargs))
    arrays, given = jax.lax.optimization_barrier((arrays, given))
    # Constrain them again. Otherwise the compiler gathers them before the barrier and keeps them.
    return keep(arrays, route.kept), *outline.fill(given)


def _ahead(
    run: Callable[..., Any], arrays: Arrays, route: Route, turns: Turns, args: Any, kwargs: Any
) -> Any:
    """With weights that are gathered while earlier layers compute."""
    given, outline = outlined((args, kwargs))
    returned = outline

    def computed(arrays: Arrays, given: Arrays) -> Arrays:
        nonlocal returned
        results, returned = outlined(run(arrays, *outline.fill(given)))
        return results

    results = call_ahead(computed, arrays, given, route.kept, turns)
    return returned.fill(results)


def _in_auto_axes(run: Callable[..., Any]) -> Callable[..., Any]:
    """Runs a function with Auto axes. On Explicit axes the types would make gradients of gathered
    weights whole on each device; on Auto axes the compiler can reduce-scatter them.
    """

    def inside(*args: Any) -> Any:
        given, outline = outlined(args)
        returned = outline

        def computed(given: Arrays) -> Arrays:
            nonlocal returned
            arrays, returned = outlined(run(*outline.fill(given)))
            return arrays

        types = jax.eval_shape(computed, given)
        specs = [x.sharding.spec for x in types]
        arrays: Any = jax.sharding.auto_axes(computed, out_sharding=specs)(given)
        return returned.fill(arrays)

    return inside


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
                "the layers are stacked, and called in one place: no layer comes before another",
                "leave out prefetch= for them. In a loop write jax.lax.scan(..., unroll=2): it "
                "gathers the next layer's weights ahead. An ensemble under jax.vmap gathers the "
                "weights of all members together",
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
