"""Modules that gather their weights when one of their methods is called."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from ..._core.contexts import in_own_dtypes, kernel_axes, on_one_device
from ..._core.errors import Fault, PlacementError, because
from ..._core.placement import World, axes_in, axis_names, current_world, sharding_of, show
from ..._core.tree import Arrays, Leaves, Outline, outlined, split
from .checkpoint import Policy, recompute_resharded
from .explicit_axes import as_written, on_auto_axes
from .gather import Route, gather_weights, is_float, keep
from .gradient_dtype import call_with_sinks
from .kernel_axes import LayerAxes
from .prefetch import Run, call_ahead
from .prefetch_order import Turns
from .quantised import as_sent
from .residuals import Residuals

# The field that the classes made here add to those of the original.
_PLAN = "_fully_shard_plan"

T = TypeVar("T")
Method = Callable[..., object]
# For each array how many dimensions loops and `vmap`s have removed; empty if they removed none.
Removed = tuple[int, ...]


@dataclass(frozen=True)
class LayerPlan:
    """How `fully_shard` has its layers gather and compute."""

    route: Route
    shapes: tuple[tuple[int, ...], ...]
    checkpoint: bool
    policy: Policy | None
    in_turn: bool
    turns: Turns | None
    residuals: Residuals | None


def is_layer(node: object) -> bool:
    """Whether it gathers its weights already."""
    return isinstance(node, eqx.Module) and _PLAN in node.__dict__


def as_layer(module: eqx.Module, methods: Sequence[str], plan: LayerPlan) -> eqx.Module:
    """The same Module as an instance of a subclass whose `methods` gather its weights."""
    cls = _layer_class(type(module), tuple(methods))
    return _make(cls, {**module.__dict__, _PLAN: plan})


def _make(cls: type[T], fields: Mapping[str, object]) -> T:
    # As Equinox unflattens: without `__init__` and its checks.
    module = object.__new__(cls)
    module.__dict__.update(fields)
    return module


def is_method(cls: type, name: str) -> bool:
    """Whether instances of a class have this method."""
    # `getattr` alone would find the `__call__` of the metaclass.
    attribute = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
    is_bound = isinstance(attribute, staticmethod | classmethod)
    return attribute is not None and not is_bound and callable(getattr(cls, name))


class _Unhooked:
    """The first base of the classes made here. It keeps out `__init_subclass__` of the users'
    classes, which may need keywords, or register each class that they see.
    """

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        pass


@dataclass
class _Hidden:
    """Its field is one that `dataclasses.fields` leaves out, and `dataclasses.replace` copies."""

    _fully_shard_plan: InitVar[LayerPlan | None] = None


@functools.cache
def _layer_class(cls: type, methods: tuple[str, ...]) -> type:
    namespace: dict[str, object] = {name: _gathering(cls, getattr(cls, name)) for name in methods}
    namespace |= {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__annotations__": {_PLAN: object},
        _PLAN: eqx.field(static=True, repr=False, default=None, kw_only=True),
        # This class can't be imported by name, and a plan refers to devices: pickle the original.
        "__reduce__": lambda layer: (_make, (cls, _split_fields(layer)[0])),
        "__copy__": lambda layer: _make(type(layer), layer.__dict__),
        "__deepcopy__": _deep_copy,
    }
    subclass: Any = type(cls)(cls.__name__, (_Unhooked, cls), namespace)
    # Equinox flattens by the fields that it has read now. All others read those of the original.
    fields, hidden = (vars(each)["__dataclass_fields__"] for each in (cls, _Hidden))
    # An `__init__` of the original doesn't take the plan.
    subclass.__dataclass_fields__ = fields | hidden if "__init__" in vars(subclass) else fields
    subclass.__annotations__ = {}
    return subclass


def _split_fields(layer: eqx.Module) -> tuple[dict[str, object], LayerPlan]:
    """The fields of the original, and the plan."""
    fields: dict[str, Any] = dict(layer.__dict__)
    plan = fields.pop(_PLAN, None)
    if plan is None:
        raise TypeError(
            f"this {type(layer).__qualname__} was made by the class of a layer of fully_shard, so "
            "it doesn't know where its weights are. Make it before fully_shard, or change a layer "
            "by equinox.tree_at"
        )
    return fields, plan


def _deep_copy(layer: eqx.Module, memo: dict[int, object]) -> eqx.Module:
    fields, plan = _split_fields(layer)
    return _make(type(layer), {**copy.deepcopy(fields, memo), _PLAN: plan})


def _gathering(cls: type, method: Method) -> Method:
    """A method that gathers the weights, and calls `method` with them."""

    @functools.wraps(method)
    def called(layer: eqx.Module, /, *args: object, **kwargs: object) -> object:
        fields, plan = _split_fields(layer)
        layer = _make(cls, fields)
        leaves = split(layer, naming=lambda path: cls.__qualname__ + jtu.keystr(path))
        if on_one_device.value:
            route = plan.route.in_own_dtypes() if in_own_dtypes.value else plan.route
            weights = [as_sent(weight, route.dtype, route.send_dtype) for weight in leaves.arrays]
            return method(leaves.join(weights), *args, **kwargs)
        world = current_world()
        stacked = _stacked(plan, leaves, world)
        faults = [*_refuse(plan, leaves, stacked, world)]
        if faults:
            raise PlacementError(faults)
        residual = plan.residuals and plan.residuals.residual(args, cls.__qualname__)
        if residual is None:
            return _called(plan, leaves, stacked, world, method, args, kwargs)
        inside, args = residual.inside(method), residual.split(args)
        return residual.back(_called(plan, leaves, stacked, world, inside, args, kwargs))

    return called


def _called(
    plan: LayerPlan,
    leaves: Leaves,
    stacked: Removed,
    world: World,
    method: Method,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> object:
    route, weights = plan.route.without(stacked), leaves.arrays
    if in_own_dtypes.value:
        route = route.in_own_dtypes()
    inputs, outline = outlined((args, kwargs))
    context = LayerAxes.of(method, leaves, inputs, outline, route.used)
    call = _LayerCall(method, leaves, outline, context)
    if world.mesh.explicit_axes:
        compute, inputs, types = as_written(call, weights, inputs, route)
        run = on_auto_axes(_after_gathering(compute, route), types)
    else:
        run = _after_gathering(call, route)
    if plan.turns is not None:
        return call.filled(call_ahead(run, weights, inputs, route.kept, plan.turns))
    if plan.in_turn and not stacked:
        weights, inputs = _after(weights, inputs, route)
    if plan.checkpoint:
        policy = None if plan.policy is None else recompute_resharded(plan.policy)
        if policy is not None:
            run = _naming(run, outlined(args[:1])[1].count)
        run = jax.checkpoint(run, policy=policy)
    return call.filled(run(weights, inputs))


def _naming(run: Run, count: int) -> Run:
    """`run` with a name for as many of its inputs, by which policies may save or offload them."""

    def named(given: jax.Array) -> jax.Array:
        return checkpoint_name(given, LAYER_INPUT) if is_float(given) else given

    def naming(weights: Arrays, inputs: Arrays) -> Arrays:
        return run(weights, [*map(named, inputs[:count]), *inputs[count:]])

    return naming


# For `jax.checkpoint_policies`.
LAYER_INPUT = "layer_input"


class _LayerCall:
    """A call of a layer's method, as a function of its weights and the arrays of its arguments."""

    def __init__(self, method: Method, leaves: Leaves, outline: Outline, context: LayerAxes | None):
        self._method, self._leaves, self._outline = method, leaves, outline
        self._returned, self._context = outline, context

    def __call__(self, weights: Arrays, inputs: Arrays) -> Arrays:
        args, kwargs = self._outline.fill(inputs)
        with kernel_axes(self._context):
            returned = self._method(self._leaves.join(weights), *args, **kwargs)
        arrays, self._returned = outlined(returned)
        return arrays

    def filled(self, arrays: Arrays) -> object:
        """The method's result, with these arrays."""
        return self._returned.fill(arrays)


def _after_gathering(compute: Run, route: Route) -> Run:
    """`compute` as a function of weights where they are kept."""

    def run(weights: Arrays, inputs: Arrays) -> Arrays:
        gathered, sinks = gather_weights(weights, route)
        if route.reduce_dtype is None:
            return compute(gathered, inputs)
        return call_with_sinks(compute, gathered, sinks, inputs)

    return run


def _after(weights: Arrays, inputs: Arrays, route: Route) -> tuple[Arrays, Arrays]:
    """The weights, available only after the arguments."""
    weights, inputs = jax.lax.optimization_barrier((weights, inputs))
    # Constrain them again. Otherwise the compiler gathers them before the barrier and keeps them.
    return keep(weights, route.kept), inputs


def _stacked(plan: LayerPlan, leaves: Leaves, world: World) -> Removed:
    """How many dimensions of the weights given to `fully_shard` have been removed since."""
    name = type(leaves.tree).__qualname__
    request = f"fully_shard, and a call of {name}"
    fix = (
        "change the model before fully_shard. If weights are tied (eqx.nn.Shared), name a class "
        "that holds both of them, or leave theirs out of `layers`"
    )
    original = "those of the model that fully_shard was called with"
    now = [tuple(array.shape) for array in leaves.arrays]
    if len(now) != len(plan.shapes):
        reason = f"its arrays are not {original}: it has {len(now)}, and had {len(plan.shapes)}"
        raise PlacementError([because(reason, fix, request)])
    # `shard_map` cuts weights.
    are_cut = world.manual_axes and list(map(len, now)) == list(map(len, plan.shapes))
    removed = tuple(len(was) - len(shape) for was, shape in zip(plan.shapes, now, strict=True))
    faults: list[Fault] = []
    for i, (was, shape, count) in enumerate(zip(plan.shapes, now, removed, strict=True)):
        if not are_cut and (count < 0 or was[count:] != shape):
            reason = f"it is not a slice of {original}, of shape {was}, along its first dimensions"
            stack = "stack layers along their first dimension (out_axes=0, in_axes=0), and "
            faults.append(leaves.at(i, because(reason, stack + fix, request)))
    if faults:
        raise PlacementError(faults)
    return removed if any(removed) else ()


def _refuse(plan: LayerPlan, leaves: Leaves, stacked: Removed, world: World) -> Iterator[Fault]:
    if stacked and plan.turns is not None:
        yield because(
            "the layers are stacked, and called in one place: no layer comes before another",
            "leave out prefetch= for them. In a loop write jax.lax.scan(..., unroll=2): it "
            "gathers the next layer's weights ahead. An ensemble under jax.vmap gathers the "
            "weights of all members together",
            "fully_shard(..., prefetch=...)",
        )
    for i, target in [*enumerate(plan.route.kept), *enumerate(plan.route.used)]:
        sharding = None if target is None else sharding_of(target)
        if not isinstance(sharding, NamedSharding):
            continue
        entries = sharding.spec.partitions[: stacked[i] if stacked else 0]
        taken = [axis for entry in entries for axis in axis_names(entry)]
        manual = sorted(axes_in(sharding.spec) & world.manual_axes)
        if taken:
            stacked_too = because(
                f"{taken[0]!r} splits them by layer: each step of the loop would gather all layers",
                "shard another dimension: fsdp(..., stacked=...) with the class of the layers "
                "never takes the first",
                f"{show(sharding, None)}, of the stacked layers",
            )
            yield leaves.at(i, stacked_too)
        if manual:
            in_map = because(
                f"the layer is called inside shard_map, where {manual[0]!r} is Manual: the "
                "compiler can't gather over it",
                "leave the axis Auto (axis_names= of filter_shard_map), or gather by hand",
                show(sharding, None),
            )
            yield leaves.at(i, in_map)
