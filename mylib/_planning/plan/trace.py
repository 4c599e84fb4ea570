"""A step, traced with a policy and without a mesh: its leaves, and their groups of dimensions."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.typing import DTypeLike

from ..._core.belongs import Owners
from ..._core.compat import cudnn_as_described, names
from ..._core.dims import Event, Nodes, Reading, program_of
from ..._core.errors import MylibError, PlacementError
from ..._core.lines import line_that_raised
from ..._core.placement import PLANNING, planning_mesh, trimmed
from ..._core.rules import fsdp, replicated, where_even
from ..._core.tree import is_array, is_of_keys, parts_in
from ..._training.fsdp import LAYER_INPUT, fully_shard, is_layer
from ..._training.matrices import MatrixState
from .calls import CalledModule, Calls, LayerInputs, NotServedError, argument_of, roles_in
from .layers import layers_in, repeated_in, weights_of

# The policies for what layers save, and how to write them.
POLICIES: dict[str, tuple[str, Any]] = {
    "full": ("", None),
    "dots": (
        "jax.checkpoint_policies.dots_with_no_batch_dims_saveable",
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    ),
    "all": (
        "jax.checkpoint_policies.everything_saveable",
        jax.checkpoint_policies.everything_saveable,
    ),
    "offload_inputs": (
        "jax.checkpoint_policies.save_and_offload_only_these_names(names_which_can_be_saved=[], "
        f'names_which_can_be_offloaded=["{LAYER_INPUT}"], offload_src="device", '
        'offload_dst="pinned_host")',
        jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ),
    "offload": (
        'jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")',
        jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    ),
}
# With fewer numbers an array is not worth splitting: `fsdp`'s own limit.
SMALL = 2**12


class PlanError(MylibError, ValueError):
    """There is no plan, or none that can be applied. The message explains why.

    !!! Example

        ```python
        def step(batch, model):
            loss = lambda model: jnp.mean(jax.vmap(model)(batch) ** 2)
            grads = eqx.filter_grad(loss)(model)
            return eqx.apply_updates(model, jax.tree.map(lambda g: -g, grads))

        model = eqx.nn.MLP(64, 64, 256, 2, key=jax.random.key(0))
        batch = np.ones((16, 64), np.float32)
        try:
            mylib.plan(step, batch, model, memory=10_000, compile=0)
        except mylib.errors.PlanError as error:
            print(error)  # by how much the smallest candidate misses
        ```
    """


@dataclass(frozen=True)
class PlannedStep:
    """A step, and its arguments without numbers. `batch` is the position of the batch, which the
    step cuts into as many `micro_batches`; with one it is not cut.
    """

    fun: Callable[..., object]
    args: tuple[object, ...]
    names: tuple[str, ...]
    roles: tuple[CalledModule, ...]
    batch: int
    micro_batches: int = 1

    @staticmethod
    def of(fun: Callable[..., Any], args: Sequence[Any], micro_batches: int = 1) -> "PlannedStep":
        abstract = tuple(jax.tree.map(_described, tuple(args)))
        roles = tuple(roles_in(abstract))
        names = tuple(_names(fun, abstract))
        if not roles:
            raise PlanError(
                "no argument of the step has a Module that can be called: plan needs the model as "
                "an argument, such as plan(step, batch, model, state)"
            )
        batch = _batch_of(abstract, names, roles)
        return PlannedStep(fun, abstract, names, roles, batch, micro_batches)

    def called(self, path: str) -> str:
        """A path of the tuple of arguments, with the argument's name."""
        number, rest = argument_of(path)
        return self.names[number] + rest


def _described(leaf: object) -> object:
    """Without its sharding, too, which may be on the mesh in force."""
    if not is_array(leaf, abstract=True):
        return leaf
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _names(fun: Callable[..., object], args: tuple[object, ...]) -> Iterator[str]:
    signature = inspect.signature(fun)
    try:
        bound = signature.bind(*args).arguments
    except TypeError as error:
        raise TypeError(f"plan: the step can't be called with these arguments: {error}") from None
    for name, x in bound.items():
        several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
        yield from (f"{name}_{i}" for i in range(len(x))) if several else (name,)


def _batch_of(args: tuple[object, ...], names: Sequence[str], roles: Sequence[CalledModule]) -> int:
    """The first argument with an array outside of Modules and states."""
    models = {argument_of(role.path)[0] for role in roles}
    for i, arg in enumerate(args):
        leaves = jtu.tree_leaves(arg, is_leaf=lambda arg: isinstance(arg, eqx.nn.State))
        if i not in models and any(map(_has_rows, leaves)):
            return i
    raise PlanError(
        f"none of the arguments {', '.join(names)} is a batch: an argument with arrays of at least "
        "one dimension, which has no Module that can be called"
    )


def _has_rows(leaf: Any) -> bool:
    # By shape alone, which several arguments may have: the first of them is the batch.
    if not is_array(leaf, abstract=True) or is_of_keys(leaf):
        return False
    # Keys of `jax.random.PRNGKey` look like a batch of two numbers.
    is_raw_key = leaf.shape == (2,) and leaf.dtype == np.uint32
    return len(leaf.shape) > 0 and not is_raw_key


@dataclass(eq=False)
class ArrayIn:
    """An array among the arguments or results: its path, the groups of its dimensions, and whether
    it has rows of the batch, or is a result.
    """

    path: str
    aval: jax.ShapeDtypeStruct
    groups: Nodes
    is_data: bool = False

    @property
    def is_small(self) -> bool:
        return math.prod(self.aval.shape) < SMALL


@dataclass(eq=False)
class Together:
    """Groups of dimensions that are split together: those of equal layers. `members` are the path
    and the dimension of each weight that they split, `limit` is what a number of parts must divide,
    and `size` is the number of the weights' elements.
    """

    groups: tuple[int, ...]
    limit: int
    size: int
    members: list[tuple[str, int]]


def is_matrix_state(x: object) -> TypeGuard[MatrixState]:
    return isinstance(x, MatrixState) and bool(x.layout.groups)


@dataclass(eq=False)
class TracedStep:
    """A step that has been traced with a policy. `inputs` are the first arguments of layers, and
    `input` is what they have in common.
    """

    step: PlannedStep
    policy: str
    layers: tuple[type, ...]
    program: Reading
    leaves: list[ArrayIn]
    called: list[CalledModule]
    results: list[ArrayIn]
    rows: set[int]
    jaxpr: ClosedJaxpr = field(repr=False)
    inputs: Sequence[Event | None]
    input: "LayerInput | None" = None

    @cached_property
    def loops(self) -> set[int]:
        return {self.program.dims.group(node) for node in self.program.loops}

    @cached_property
    def batch_size(self) -> int:
        # Arrays of the batch may have other numbers of rows, such as several for each example.
        sizes = [x.aval.shape[0] for x in self.leaves if x.groups and x.groups[0] in self.rows]
        return math.gcd(*sizes)

    def is_iterated(self, leaf: ArrayIn) -> bool:
        """Whether a loop iterates over its first dimension."""
        return bool(leaf.groups) and leaf.groups[0] in self.loops

    @cached_property
    def stacked(self) -> set[str]:
        """The paths of the weights of stacked layers, whose arrays a loop iterates over."""
        iterated = {leaf.path for leaf in self.leaves if self.is_iterated(leaf)}
        layers = [
            {path + path_in_model for path_in_model in weights}
            for path, role in self.models.items()
            for weights in weights_of(role.module, self.layers)
        ]
        return set[str]().union(*(weights for weights in layers if weights <= iterated))

    def is_stacked(self, leaf: ArrayIn) -> bool:
        """Whether its first dimension is that of stacked layers."""
        return self.followed.get(leaf.path, leaf.path) in self.stacked

    @cached_property
    def weights(self) -> dict[tuple[Nodes, tuple[int, ...]], list[ArrayIn]]:
        """Arrays that are no data, by the groups of their dimensions and their shape."""
        by_dims: dict[tuple[Nodes, tuple[int, ...]], list[ArrayIn]] = {}
        for leaf in self.leaves:
            if not leaf.is_data and leaf.groups:
                by_dims.setdefault((leaf.groups, tuple(leaf.aval.shape)), []).append(leaf)
        return by_dims

    @cached_property
    def models(self) -> dict[str, CalledModule]:
        """The models that are called, by their path."""
        return {role.path: role for role in self.called}

    @cached_property
    def in_models(self) -> dict[str, tuple[CalledModule, str]]:
        """For the path of each weight of a called model: the model, and the path in it."""
        return {
            role.path + path: (role, path) for role in self.models.values() for path in role.shapes
        }

    @cached_property
    def states(self) -> dict[str, MatrixState]:
        """The states of `by_matrix` among the arguments, by their paths."""
        leaves = jtu.tree_flatten_with_path(self.step.args, is_leaf=is_matrix_state)[0]
        return {jtu.keystr(path): x for path, x in leaves if is_matrix_state(x)}

    @cached_property
    def groups(self) -> list[Together]:
        return _groups_of(self)

    @cached_property
    def followed(self) -> dict[str, str]:
        """For the path of each array that is no weight of a called model, such as a moment: that of
        the weight with its dimensions that it belongs to.
        """
        arrays = {x.path: x for x in self.leaves if x.groups and not x.is_data}
        forms = {path: (x.groups, tuple(x.aval.shape)) for path, x in arrays.items()}
        weights = {
            path: parts_in(self.in_models[path][1]) for path in arrays if path in self.in_models
        }
        owners = Owners(weights, forms.__getitem__)
        others = {x: owners.of(parts_in(x), forms[x]).all for x in arrays if x not in weights}
        return {path: found[0] for path, found in others.items() if found}

    def choices(
        self, parts: int, is_whole: Callable[[str, int], bool] = lambda path, dim: False
    ) -> list[tuple[Together, ...]]:
        """Sets of groups that can be split over as many devices, of which no array has two and to
        which none can be added. Those with most bytes come first. Megatron's is one of them: heads,
        hidden layers and vocabulary. `is_whole` is for dimensions of weights.
        """
        fitting = [
            group
            for group in self.groups
            if group.limit % parts == 0 and not any(is_whole(*x) for x in group.members)
        ]
        return _maximal(sorted(fitting, key=lambda group: -group.size)[:_MOST], self)


# Combine at most this many groups: there may be 2 ** 14 sets of them. The limit is a guess.
_MOST = 14


def _groups_of(traced: TracedStep) -> list[Together]:
    group = traced.program.dims.group
    # If an operation needs a dimension whole, splitting it would gather it each time.
    cut = {group(node) for event in traced.program.whole for node in event.over}
    members_of: dict[int, list[tuple[str, int, int]]] = {}
    for (groups, shape), leaves in traced.weights.items():
        paths = [leaf.path for leaf in leaves if leaf.path in traced.in_models]
        for i, x in enumerate(groups):
            if x not in traced.rows | traced.loops | cut and shape[i] > 1:
                members_of.setdefault(x, []).extend((path, i, math.prod(shape)) for path in paths)
    # Layers in a list have groups of their own. Splitting some of them only would be a choice for
    # each layer, of which there are too many.
    alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for x, members in members_of.items():
        if members:
            key = tuple(sorted({(role_of(path), i) for path, i, *_ in members}))
            alike.setdefault(key, []).append(x)
    splittable: list[Together] = []
    for together in alike.values():
        # Equal layers with a square weight: one's output may be another's input.
        twice = len(together) > 1 and _splits_twice(together, traced)
        for part in [[x] for x in together] if twice else [together]:
            if not _splits_twice(part, traced):
                members = [m for x in part for m in members_of[x]]
                limit = math.gcd(*map(traced.program.dims.parts, part))
                size = sum(m[2] for m in members)
                splittable.append(Together(tuple(part), limit, size, [m[:2] for m in members]))
    return splittable


def role_of(path: str) -> str:
    """A path without the numbers of equal layers."""
    return re.sub(r"\[\d+\]", "[*]", path)


def _splits_twice(groups: Sequence[int], traced: TracedStep) -> bool:
    return any(sum(x in groups for x in dims) > 1 for dims, _ in traced.weights)


def _maximal(groups: Sequence[Together], traced: TracedStep) -> list[tuple[Together, ...]]:
    arrays = [set(dims) for dims, _ in traced.weights]

    def clash(a: Together, b: Together) -> bool:
        return any(x & set(a.groups) and x & set(b.groups) for x in arrays)

    rivals = [{j for j, b in enumerate(groups) if a is not b and clash(a, b)} for a in groups]
    maximal: list[set[int]] = []

    def grow(i: int, chosen: set[int]) -> None:
        if i == len(groups):
            if chosen and all(j in chosen or rivals[j] & chosen for j in range(i)):
                maximal.append(chosen)
            return
        if not rivals[i] & chosen:
            grow(i + 1, chosen | {i})
        # Without rivals it is in all sets to which none can be added.
        if rivals[i]:
            grow(i + 1, chosen)

    grow(0, set())
    sets = [tuple(groups[i] for i in sorted(chosen)) for chosen in maximal]
    return sorted(sets, key=lambda chosen: -sum(group.size for group in chosen))


def trace(
    step: PlannedStep, policy: str, layers: tuple[type, ...] | None, dtype: DTypeLike | None = None
) -> TracedStep:
    """Traces a step. Its models are those of `fully_shard`, on one device, so that what is computed
    again, and when weights are gathered, is a part of the program. Without `layers` the step is
    traced as it is, to find them.
    """
    inputs = LayerInputs()
    options = {"mesh": planning_mesh(), "dtype": dtype, "policy": POLICIES[policy][1]}

    def shard(role: CalledModule, model: Any) -> Callable[..., object]:
        if layers is None:
            return model
        if any(map(is_layer, jtu.tree_leaves(model, is_leaf=is_layer))):
            raise PlanError(f"{_PLAIN} ({step.called(role.path)} is one of fully_shard's)")
        kept = where_even(fsdp(PLANNING, stacked=layers))
        try:
            which = outermost(model, layers)
            sharded_model = fully_shard(model, which, kept, replicated(), **options)
        except PlacementError as error:
            if not all("fully_shard" in fault.request for fault in error.faults):
                raise _not_plain(error) from error
            raise PlanError(f"layers= of {step.called(role.path)}: {error}") from error
        # `fully_shard` makes a subclass of each layer's class.
        classes = {type(x) for x in jtu.tree_leaves(sharded_model, is_leaf=of_class) if of_class(x)}

        def called(*args: object, **kwargs: object) -> object:
            with inputs.tracing(classes):
                return sharded_model(*args, **kwargs)

        return called

    def of_class(x: object) -> bool:
        return isinstance(x, layers or ())

    calls = Calls(step.roles, shard)
    try:
        with calls.tracing():
            jaxpr, arrays, returned = _jaxpr_of(step)
    except NotServedError as error:
        raise PlanError(f"{error}. {_by_hand(step)}") from None
    except PlacementError as error:
        raise _not_plain(error) from error
    if not calls.seen:
        models = ", ".join(step.called(role.path) for role in step.roles)
        raise PlanError(f"the step calls none of its models ({models}). {_by_hand(step)}")
    return _traced(step, policy, layers or (), calls, inputs, jaxpr, arrays, returned)


_PLAIN = (
    "hand over the step as for one device, without fully_shard, in_shardings, out_shardings and "
    "mesh: the plan adds them"
)


def _not_plain(error: PlacementError) -> PlanError:
    """For a step that places arrays, before the plan has chosen a mesh."""
    fault = error.faults[0]
    return PlanError(
        f"{_PLAIN}. A placement that the step may lack is written with mylib.rules.where_present "
        f"({fault.path} at {fault.request}: {fault.reason})"
    )


def _jaxpr_of(step: PlannedStep) -> tuple[ClosedJaxpr, object, object]:
    """A step's jaxpr without a mesh, and the trees of arrays that it takes and returns."""
    arrays, static = eqx.partition(step.args, lambda x: is_array(x, abstract=True))

    def arrays_returned(arrays: Any) -> object:
        return eqx.filter(step.fun(*eqx.combine(arrays, static)), eqx.is_array)

    try:
        with cudnn_as_described():
            jaxpr, returned = jax.make_jaxpr(arrays_returned, return_shape=True)(arrays)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, PlacementError) or names.TEXT_NO_MESH not in str(error):
            raise
        raise PlanError(
            f"{_PLAIN}. {line_that_raised(error)} gives JAX a PartitionSpec, which needs a mesh: "
            "leave that out, or write mylib.filter_shard(x, mylib.rules.where_present(spec)), "
            "which only a mesh with these axes obeys"
        ) from error
    return jaxpr, arrays, returned


class LayerInput(NamedTuple):
    """The first argument of a layer, as it sees it: its rank, its dimension of rows (None under
    `jax.vmap`), and the sizes of the dimensions that no weight has, such as that of time.
    """

    rank: int
    rows: int | None
    free: tuple[tuple[int, int], ...]

    def spec(
        self, rows: str | tuple[str, ...] | None, axis: str, parts: int
    ) -> tuple[Any, ...] | None:
        """A spec that splits the first such dimension; None if there is none to divide."""
        dim = next((dim for dim, size in self.free if size % parts == 0), None)
        if dim is None:
            return None
        spec = [axis if i == dim else rows if i == self.rows else None for i in range(self.rank)]
        return trimmed(spec)


def _layer_input(traced: TracedStep, inputs: LayerInputs) -> LayerInput | None:
    """The first argument that all calls of layers have in common; None if they differ, or if it is
    not one array.
    """
    program, rows = traced.program, traced.rows
    weights = {dim for leaf in traced.leaves if not leaf.is_data for dim in leaf.groups}
    layer_inputs: set[LayerInput | None] = set()
    for event, rank in zip(traced.inputs, inputs.ranks, strict=True):
        seen = program.dims.groups(event.dims if event else ())
        # Under `jax.vmap` a layer doesn't see the rows.
        if len(seen) > (rank or 0):
            seen = tuple(dim for dim in seen if dim not in rows)
        # What isn't understood is saved whole, as without `saved=`.
        if rank is None or len(seen) != rank:
            return None
        free = [
            (i, program.dims.parts(dim)) for i, dim in enumerate(seen) if dim not in weights | rows
        ]
        of_rows = next((i for i, dim in enumerate(seen) if dim in rows), None)
        layer_inputs.add(LayerInput(rank, of_rows, tuple(free)))
    return layer_inputs.pop() if len(layer_inputs) == 1 else None


def _by_hand(step: PlannedStep) -> str:
    name = step.called(step.roles[0].path)
    return (
        f"A plan is applied where the model is called, {name}(...). Call it in the step, without "
        f"fully_shard, or apply a strategy by hand, in the loss: {name} = "
        f"mylib.fully_shard({name}, layers, kept, used)"
    )


def _refuse(program: Reading) -> None:
    """Raises the reason why a program can't be planned, if there is one."""
    if program.placed:
        raise PlanError(f"{_PLAIN} (it places an array at {program.placed[0]})")
    if program.unknown:
        lines = {name: f" ({line})" if line else "" for name, line in program.unknown.items()}
        listed = ", ".join(name + line for name, line in lines.items())
        raise PlanError(
            f"plan doesn't know how these may be split: {listed}. Say it by mylib.opaque(f, like=) "
            "or dims=, write the step without them, or choose a strategy by hand"
        )
    for name, line in program.alone.items():
        raise PlanError(
            f"compilers can't split {name} ({line}). Call it in a function f, and that as "
            "mylib.opaque(f, like=f), which finds how it may be split"
        )


def _traced(
    step: PlannedStep,
    policy: str,
    layers: tuple[type, ...],
    calls: Calls,
    inputs: LayerInputs,
    jaxpr: ClosedJaxpr,
    arrays: object,
    returned: object,
) -> TracedStep:
    program = program_of(jaxpr)
    _refuse(program)

    def arrays_in(tree: object, dims: Sequence[Nodes]) -> list[ArrayIn]:
        pairs = zip(jtu.tree_flatten_with_path(tree)[0], dims, strict=True)
        groups = program.dims.groups
        return [ArrayIn(jtu.keystr(path), x, groups(nodes)) for (path, x), nodes in pairs]

    leaves = arrays_in(arrays, program.inputs)
    # Like data, results that are no weights or moments are split by their rows.
    results = [replace(x, is_data=True) for x in arrays_in(returned, program.results)]
    called = calls.called(program.origins, [leaf.path for leaf in leaves])
    rows = _rows(leaves, f"[{step.batch}]")
    for leaf in leaves:
        leaf.is_data = leaf.path.startswith(f"[{step.batch}]") or bool(rows & set(leaf.groups))
    events = [program.named.get(inputs.name(i)) for i in range(len(inputs.ranks))]
    traced = TracedStep(step, policy, layers, program, leaves, called, results, rows, jaxpr, events)
    traced.input = _layer_input(traced, inputs)
    return traced


def _rows(leaves: Sequence[ArrayIn], batch: str) -> set[int]:
    """The groups of the first dimension of a batch: of its first array, and of all as long."""
    arrays = [array for array in leaves if array.path.startswith(batch) and array.groups]
    size = arrays[0].aval.shape[0]
    # Labels have a row for each example, too; what is shorter or longer is something else.
    return {array.groups[0] for array in arrays if array.aval.shape[0] == size}


def outermost(model: eqx.Module, layers: tuple[type, ...]) -> Any:
    """The layers of `fully_shard`: a model without layers of these classes is one layer."""
    return layers_in(model, layers) or (lambda node, path: not path)


def layers_of(traced: TracedStep) -> tuple[type, ...]:
    """The classes of what repeats in the models of a step that has been traced as it is."""
    classes: list[type] = []
    iterated = {leaf.path for leaf in traced.leaves if traced.is_iterated(leaf)}
    for path, role in traced.models.items():
        iterated_paths = {p[len(path) :] for p in iterated if p.startswith(path)}
        classes += repeated_in(role.module, iterated_paths)
    return tuple(dict.fromkeys(classes))
