"""`fully_shard`: each layer gathers its weights when it is called."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, get_origin

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..._core.contexts import are_gathered, in_own_dtypes, on_one_device
from ..._core.errors import Fault, PlacementError, because
from ..._core.placement import (
    AnyMesh,
    Decision,
    Placement,
    current_world,
    decide,
    sharding_of,
    show,
)
from ..._core.rules import replicated
from ..._core.tree import KeyPath, Leaves, name_of, split
from ..jit import expect
from .checkpoint import Policy, refuse_memory_kinds
from .gather import Route, gather_weights
from .layer import LayerPlan, as_layer, is_layer, is_method
from .prefetch_order import Turns
from .quantised import IN_8_BITS, as_sent
from .residuals import Residuals

T = TypeVar("T")
Layers = (
    type | Sequence[type] | Mapping[type, str | Sequence[str]] | Callable[[eqx.Module, str], bool]
)
# The methods of a module that gather, or None if it is no layer.
_Methods = Callable[[eqx.Module, str], Sequence[str] | None]
_CALL = ("__call__",)


def fully_shard(
    model: T,
    layers: Layers,
    kept: PyTree[Placement],
    used: PyTree[Placement] = replicated(),  # noqa: B008
    *,
    mesh: AnyMesh | None = None,
    dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
    send_dtype: DTypeLike | None = None,
    checkpoint: bool = True,
    policy: Policy | None = None,
    in_turn: bool = True,
    prefetch: int = 0,
    saved: PyTree[Placement] = None,
) -> T:
    """Returns the model with layers that gather their weights when they are called. Call it inside
    the loss, and differentiate with respect to the model that it takes.

    Between calls each device holds its part of the weights (`kept`). When a layer is called, it
    gathers its own weights (`used`), computes, and frees them. In the backward pass it gathers them
    again, and its gradient is reduce-scattered to `kept` immediately. Leaves that are in no layer
    are gathered where `fully_shard` is called. PyTorch calls this `fully_shard`; other names are
    FSDP and ZeRO-3.

    It works in the same way for layers in a list and for stacked layers run by `jax.lax.scan`, with
    and without `jax.vmap` over examples, on Auto and Explicit axes.

    **Arguments:**

    - `model`: any PyTree that contains Modules.
    - `layers`: which Modules are layers: a class, several in a tuple or list, a mapping from
        classes to the methods that gather, `{Attention: ["__call__", "decode"]}`, or a function of
        a Module and its path (such as `.blocks[0]`). A layer inside another layer belongs to the
        outer one. Give the Module that contains the loop of a recurrent model, not its cell, which
        would gather in each iteration.
    - `kept`: the placement of the weights between steps, which they have outside, too.
    - `used`: the placement that a layer computes with: by default all weights are replicated; with
        tensor parallelism, give the rule for that. None leaves it to the compiler, which may then
        move activations instead: right if a batch is smaller than the weights.
    - `mesh`: the mesh for placements that are not shardings; by default that of `jax.set_mesh`.
    - `dtype`: the dtype that floating-point weights are cast to before they are sent. Layers
        compute in it, and gradients are summed in it and returned in the dtype of the weights.
    - `reduce_dtype`: a wider dtype for the gradients of weights that layers multiply, such as
        `jnp.float32` with `dtype=jnp.bfloat16`. They are computed in it from numbers of `dtype`,
        and summed in it over the devices, if the weight is at most cast, transposed, reshaped or
        sliced before the product. Gradients of all other uses, such as biases and norms, and of
        leaves that are in no layer, are summed in `dtype`.
    - `send_dtype`: `jnp.float8_e4m3fn` or `jnp.int8`: layers gather their weights in 8 bits, with
        scales in float32, and cast them to `dtype`. Each device rounds its own part, with a scale
        for each index of the gathered dimension. Gradients and tangents are not rounded: they are
        those of `dtype`, at the rounded weights. Left out are arrays of fewer than two dimensions
        or of integers, small ones, weights that aren't gathered, and leaves that are in no layer,
        such as tied embeddings.
    - `checkpoint`: whether layers are rematerialised, so that gathered weights are never saved for
        the backward pass. If False, everything may be saved.
    - `policy`: what else is saved of a layer, as for `mylib.filter_checkpoint`; by default only
        its input. `jax.checkpoint_policies.everything_saveable` saves all but the gathered weights.
        The name of the first argument is `"layer_input"`, for policies that offload it.
    - `in_turn`: gather one layer at a time (default), for layers that are not stacked: each waits
        for its input. False: the compiler may gather all at once.
    - `prefetch`: for layers that are not stacked, how many layers ahead weights are gathered, in
        the forward and the backward pass. That needs memory for the weights of more layers, and
        is 0 by default. Stacked layers are prefetched by `jax.lax.scan(..., unroll=2)`.
    - `saved`: for tensor parallelism, where a layer's input is saved for the backward pass: a
        placement, or a prefix of placements, for the first positional argument as the layer sees
        it. `P("data", "model")` for `[batch, time, embed]` gives each device a part of the time;
        under `jax.vmap(..., spmd_axis_name="data")` write `P("model")`. The layer gathers its
        input over the axes by which `used` splits weights, and results of the shape and dtype of
        an input are split as that is. By default inputs are replicated over these axes.

    **Returns:**

    A model with the same paths. Its layers are instances of subclasses of their classes.

    **Raises:**

    `mylib.PlacementError`, naming every leaf that can't be placed as requested, layers that the
    model doesn't have or that lack a method, and layers of another call of `fully_shard`. It is
    also raised when a layer is called, if the layer is stacked and `kept` or `used` splits the
    dimension of the layers, because each step of the loop would gather all of them; if layers are
    stacked along other dimensions than the first ones; if an axis is Manual there; if the layer's
    arrays have changed; and if its input can't be placed as `saved`, or `saved` names no axis by
    which `used` splits weights.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        kept = mylib.rules.fsdp("data")


        @mylib.filter_jit(
            in_shardings=(kept, P("data")), out_shardings=kept, mesh=mesh
        )
        def gradient(model, x):
            def loss(model):
                model = mylib.fully_shard(model, eqx.nn.Linear, kept, mesh=mesh)
                return jnp.mean(jax.vmap(model)(x) ** 2)

            return eqx.filter_grad(loss)(model)


        model = eqx.nn.MLP(64, 64, 256, 2, key=jax.random.key(0))
        grads = gradient(model, jnp.ones((16, 64)))
        assert grads.layers[0].weight.sharding.spec == P("data")
        ```
    """
    _check_order(layers, kept)
    check_dtypes(dtype, reduce_dtype, send_dtype)
    _check_options(prefetch, checkpoint, policy, in_turn, saved)
    methods = _checked(layers)
    if are_gathered.value:
        kept, used, saved, prefetch, send_dtype = None, None, None, 0, None
    if in_own_dtypes.value:
        dtype = reduce_dtype = send_dtype = None
    nodes, treedef = _flatten(model, methods)
    if on_one_device.value:
        return jtu.tree_unflatten(treedef, [_alone(node, dtype, send_dtype) for node in nodes])
    leaves = split(model)
    decisions = decide_weights(leaves, kept, used, mesh)
    faults = [*faults_of_weights(leaves, *decisions), *_refuse_layers(layers, model, nodes)]
    if faults:
        raise PlacementError(faults)
    kept_at, used_at = (tuple(decision.targets) for decision in decisions)
    expect(leaves.arrays, kept_at)
    sent_in = None if send_dtype is None else jnp.dtype(send_dtype)
    route = Route(kept_at, used_at, dtype, reduce_dtype, sent_in)
    turns = Turns(prefetch) if prefetch else None
    residuals = None if saved is None else Residuals.of(saved, mesh, used_at)

    def plan_of(inside: Sequence[int]) -> LayerPlan:
        shapes = tuple(tuple(leaves.arrays[i].shape) for i in inside)
        return LayerPlan(route.part(inside), shapes, checkpoint, policy, in_turn, turns, residuals)

    return jtu.tree_unflatten(treedef, _gathering(nodes, leaves, route, plan_of))


def _alone(node: "_Node", dtype: DTypeLike | None, send_dtype: DTypeLike | None) -> object:
    """A node on one device, where it is only rounded."""
    _, layer, method_names = node
    leaves = split(layer)
    sent = None if method_names is None else send_dtype
    return leaves.join([as_sent(weight, dtype, sent) for weight in leaves.arrays])


def _gathering(
    nodes: Sequence["_Node"],
    leaves: Leaves,
    route: Route,
    plan_of: Callable[[Sequence[int]], LayerPlan],
) -> list[object]:
    """The nodes of the new model: layers that gather their weights, and gathered arrays that are in
    no layer.
    """
    new_nodes: list[object] = []
    at_top: dict[int, int] = {}  # the positions in `new_nodes` of arrays that are in no layer
    start = 0
    for _, node, method_names in nodes:
        inside = range(start, start := start + len(split(node).arrays))
        if method_names is not None:
            node = as_layer(node, method_names, plan_of(inside))
        else:
            at_top |= dict.fromkeys(inside, len(new_nodes))
        new_nodes.append(node)
    top = replace(route, reduce_dtype=None, send_dtype=None, lookups=True).part(list(at_top))
    gathered, _ = gather_weights([leaves.arrays[i] for i in at_top], top)
    for position, weight in zip(at_top.values(), gathered, strict=True):
        new_nodes[position] = weight
    return new_nodes


def _check_order(layers: Layers, kept: PyTree[Placement]) -> None:
    classes: Sequence[Any] = kept if isinstance(kept, tuple | list) else (kept,)
    if classes and all(isinstance(cls, type) and issubclass(cls, eqx.Module) for cls in classes):
        shown = ", ".join(cls.__qualname__ for cls in classes)
        raise TypeError(
            f"fully_shard: the layers ({shown}) come before where weights are kept: write "
            "fully_shard(model, layers, kept)"
        )


def check_dtypes(
    dtype: DTypeLike | None,
    reduce_dtype: DTypeLike | None,
    send_dtype: DTypeLike | None = None,
    name: str = "fully_shard",
) -> None:
    """Refuses what weights can't be sent, computed with, or summed in, in a function's name."""
    if send_dtype is not None and jnp.dtype(send_dtype) not in IN_8_BITS:
        raise TypeError(
            f"{name}: send_dtype={send_dtype!r}: write jnp.float8_e4m3fn or jnp.int8. Other "
            "dtypes are sent by dtype="
        )
    for option, given in (("dtype", dtype), ("reduce_dtype", reduce_dtype)):
        if given is not None and not jnp.issubdtype(given, jnp.floating):
            raise TypeError(f"{name}: {option}={given!r} is not a floating dtype")
    if dtype is None or reduce_dtype is None:
        return
    if jnp.promote_types(dtype, reduce_dtype) != reduce_dtype:
        raise TypeError(
            f"{name}: reduce_dtype={jnp.dtype(reduce_dtype)} is narrower than "
            f"dtype={jnp.dtype(dtype)}, in which gradients are computed"
        )


def _check_options(
    prefetch: object,
    checkpoint: bool,
    policy: Policy | None,
    in_turn: bool,
    saved: PyTree[Placement],
) -> None:
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise TypeError(f"fully_shard: prefetch={prefetch!r} is not a number of layers")
    turns = "layers that are prefetched take turns, and are rematerialised whole"
    everything = "it saves everything"
    contradictions = [
        (prefetch and not checkpoint, "prefetch=", "checkpoint=False", turns),
        (prefetch and policy is not None, "prefetch=", "policy=", turns),
        (prefetch and not in_turn, "prefetch=", "in_turn=False", turns),
        (not checkpoint and policy is not None, "checkpoint=False", "policy=", everything),
        (not checkpoint and saved is not None, "checkpoint=False", "saved=", everything),
    ]
    for is_given, option, other, reason in contradictions:
        if is_given:
            raise TypeError(
                f"fully_shard: {option} can't be combined with {other}: {reason}. Leave one out"
            )


def _checked(layers: Any) -> _Methods:
    classes = tuple(layers) if isinstance(layers, tuple | list | Mapping) else (layers,)
    if classes and all(isinstance(cls, type) for cls in classes):
        table: dict[type, Sequence[str]] = dict.fromkeys(classes, _CALL)
        if isinstance(layers, Mapping):
            table = {cls: (n,) if isinstance(n, str) else tuple(n) for cls, n in layers.items()}
        for cls, names in table.items():
            if not names:
                raise TypeError(f"fully_shard: {cls.__qualname__} has no method in layers={layers}")
        return lambda node, _: next((n for cls, n in table.items() if isinstance(node, cls)), None)
    # A class with parameters, `Block[int]`, can be called, too; no Module knows that it is one.
    if callable(layers) and not isinstance(layers, eqx.Module) and get_origin(layers) is None:
        return lambda node, path: _CALL if layers(node, path) else None
    raise TypeError(
        f"fully_shard: layers={layers!r} does not select Modules. Give a class, a "
        "tuple of classes, a mapping from classes to names of methods, or a function of a Module "
        "and its path. The model comes first: fully_shard(model, Block, kept)"
    )


# A layer or a leaf of a model: its path, the node, and the methods that gather.
_Node = tuple[KeyPath, Any, Sequence[str] | None]


def _flatten(model: object, methods: _Methods) -> tuple[list[_Node], Any]:
    def names(path: KeyPath, node: object) -> Sequence[str] | None:
        return methods(node, jtu.keystr(path)) if isinstance(node, eqx.Module) else None

    nodes, treedef = jtu.tree_flatten_with_path(
        model, is_leaf=lambda path, node: names(path, node) is not None, is_leaf_takes_path=True
    )
    return [(path, node, names(path, node)) for path, node in nodes], treedef


def _refuse_layers(layers: Layers, model: object, nodes: Sequence[_Node]) -> Iterator[Fault]:
    """Faults of the layers in this model."""
    modules = _modules(model)
    gathering = [path for path, module in modules if is_layer(module)]
    for path in gathering:
        fix = (
            "call fully_shard once, on the model that the loss takes; for layers of several "
            "classes give a tuple of them"
        )
        yield because("it gathers its weights already", fix, "fully_shard", jtu.keystr(path))
    if gathering:
        return
    new_layers = [(path, node, names) for path, node, names in nodes if names is not None]
    yield from _missing(layers, modules, [node for _, node, _ in new_layers])
    shared = [path for path, module in modules if isinstance(module, eqx.nn.Shared)]
    for path, node, method_names in new_layers:
        yield from _refuse_methods(path, type(node), method_names)
        if any(path[: len(tied)] == tied for tied in shared):
            yield because(
                "its weights are tied (eqx.nn.Shared), so they are also used outside its calls",
                "leave it out of `layers`: weights that are in no layer are gathered once for all "
                "their uses. Or name a class that holds the eqx.nn.Shared",
                "fully_shard",
                name_of(path),
            )


def _refuse_methods(path: KeyPath, cls: type, method_names: Sequence[str]) -> Iterator[Fault]:
    lacking = [name for name in method_names if not is_method(cls, name)]
    if lacking:
        public = [name for name in vars(cls) if name[0] != "_" and is_method(cls, name)]
        yield because(
            f"{cls.__qualname__} has no method {', '.join(lacking)}",
            "name the methods that gather, as in "
            f"layers={{{cls.__qualname__}: {public or ['encode', 'decode']}}}",
            f"fully_shard of {cls.__qualname__}",
            jtu.keystr(path),
        )


def _modules(model: object) -> list[tuple[KeyPath, eqx.Module]]:
    """All Modules of a model, with their paths."""
    modules: list[tuple[KeyPath, eqx.Module]] = []

    def note(path: KeyPath, node: object) -> bool:
        if isinstance(node, eqx.Module):
            modules.append((path, node))
        return False

    jtu.tree_flatten_with_path(model, is_leaf=note, is_leaf_takes_path=True)
    return modules


def _missing(
    layers: Any, modules: Sequence[tuple[KeyPath, eqx.Module]], selected: Sequence[eqx.Module]
) -> Iterator[Fault]:
    names = dict.fromkeys(type(module).__qualname__ for _, module in modules)
    requested = layers if isinstance(layers, tuple | Mapping) else (layers,)
    for cls in requested:
        is_class = isinstance(cls, type)
        if any(isinstance(layer, cls) for layer in selected) if is_class else selected:
            continue
        reason = "no Module of the model matches"
        fix = f"its Modules are {', '.join(names)}" if names else "it has no Module"
        if is_class and any(isinstance(module, cls) for _, module in modules):
            reason = "all of them are inside other layers, which gather their weights"
            fix = "leave the class out"
        yield because(reason, fix, f"fully_shard of {cls.__qualname__ if is_class else cls!r}")


def decide_weights(
    leaves: Leaves, kept: PyTree[Placement], used: PyTree[Placement], mesh: AnyMesh | None
) -> tuple[Decision, Decision]:
    """Where weights are kept, and used."""
    world = current_world()
    fix = "write it in `kept`: layers compute in the memory of the device"
    refuse = partial(refuse_memory_kinds, fix=fix)
    return decide(leaves, kept, mesh, world), decide(leaves, used, mesh, world, refuse)


def faults_of_weights(leaves: Leaves, kept: Decision, used: Decision) -> Iterator[Fault]:
    yield from (*kept.faults, *used.faults)
    # Weights on other devices than the rest: no program has both.
    decisions = kept, used
    meshes = [decision.mesh for decision in decisions if decision.mesh is not None]
    placed = [
        (i, sharding_of(target))
        for decision in decisions
        for i, target in enumerate(decision.targets)
        if target is not None
    ]
    most = max([mesh.size for mesh in meshes] + [at.num_devices for _, at in placed], default=0)
    for i, sharding in placed:
        if sharding.num_devices != most:
            yield leaves.at(
                i,
                because(
                    f"layers compute on {most} devices, and this is on {sharding.num_devices}",
                    "write a PartitionSpec over the mesh of all, such as P()",
                    show(sharding, None),
                ),
            )
