"""`fully_shard`: each layer gathers its weights when it is called."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_origin

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._errors import Fault, PlacementError, because
from .._jit import expect
from .._placement import (
    AnyMesh,
    Decision,
    Placement,
    Target,
    current_world,
    decide,
    in_own_dtypes,
    on_one_device,
    sharding_of,
    show,
    split_over,
    unusual_memory_kind,
)
from .._tree import KeyPath, Leaves, name_of, split
from ..rules import replicated
from .checkpoint import Policy, recompute_resharded
from .gather import Route, gather_weights
from .layer import LayerPlan, as_layer, is_layer, is_method
from .prefetch_order import Turns
from .quantised import IN_8_BITS
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
    dtype: Any = None,
    reduce_dtype: Any = None,
    send_dtype: Any = None,
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
        or of integers, weights that aren't gathered, and leaves that are in no layer, such as tied
        embeddings; [`mylib.explain`][] of the returned model shows which.
    - `checkpoint`: whether layers are rematerialised, so that gathered weights are never saved for
        the backward pass. If False, everything may be saved.
    - `policy`: what else is saved of a layer, as for [`mylib.filter_checkpoint`][]; by default only
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

    [`mylib.PlacementError`][], naming every leaf that can't be placed as requested, leaves that
    `used` splits over an axis over which `kept` splits none, layers that the model doesn't have or
    that lack a method, and layers of another call of `fully_shard`. It is also raised when a layer
    is called, if the layer is stacked and `kept` or `used` splits the dimension of the layers,
    because each step of the loop would gather all of them; if layers are stacked along other
    dimensions than the first ones; if an axis is Manual there; if the layer's arrays have changed;
    and if its input can't be placed as `saved`, or `saved` names no axis by which `used` splits
    weights.

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
    _check_prefetch(prefetch, checkpoint, policy, in_turn)
    _check_saving(checkpoint, policy, saved)
    methods = _checked(layers)
    if on_one_device.value:
        return model
    if in_own_dtypes.value:
        dtype = reduce_dtype = send_dtype = None
    nodes, treedef = _flatten(model, methods)
    leaves, world = split(model), current_world()
    decisions = [decide(leaves, placement, mesh, world) for placement in (kept, used)]
    faults = [*faults_of_weights(leaves, decisions), *_refuse_layers(layers, model, nodes)]
    if faults:
        raise PlacementError(faults)
    kept_at, used_at = (tuple(decision.targets) for decision in decisions)
    expect(leaves.arrays, kept_at)
    send_dtype = None if send_dtype is None else jnp.dtype(send_dtype)
    route = Route(kept_at, used_at, dtype, reduce_dtype, send_dtype)
    turns = Turns(prefetch) if prefetch else None
    residuals = None if saved is None else Residuals.of(saved, mesh, used_at)

    def plan_of(inside: Sequence[int]) -> LayerPlan:
        shapes = tuple(tuple(leaves.arrays[i].shape) for i in inside)
        return LayerPlan(route.part(inside), shapes, checkpoint, policy, in_turn, turns, residuals)

    return jtu.tree_unflatten(treedef, _gathering(nodes, leaves, route, plan_of))


def _gathering(
    nodes: Sequence["_Node"],
    leaves: Leaves,
    route: Route,
    plan_of: Callable[[Sequence[int]], LayerPlan],
) -> list[Any]:
    """The nodes of the new model: layers that gather their weights, and gathered arrays that are in
    no layer.
    """
    new_nodes: list[Any] = []
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
    for position, x in zip(at_top.values(), gathered, strict=True):
        new_nodes[position] = x
    return new_nodes


def _check_order(layers: Any, kept: Any) -> None:
    classes: Sequence[Any] = kept if isinstance(kept, tuple | list) else (kept,)
    if classes and all(isinstance(x, type) and issubclass(x, eqx.Module) for x in classes):
        shown = ", ".join(cls.__qualname__ for cls in classes)
        raise TypeError(
            f"fully_shard: the layers ({shown}) come before where weights are kept: write "
            "fully_shard(model, layers, kept)"
        )


def check_dtypes(
    dtype: Any, reduce_dtype: Any, send_dtype: Any = None, name: str = "fully_shard"
) -> None:
    """Refuses what weights can't be sent, computed with, or summed in, in a function's name."""
    if send_dtype is not None and jnp.dtype(send_dtype) not in IN_8_BITS:
        raise TypeError(
            f"{name}: send_dtype={send_dtype!r}: write jnp.float8_e4m3fn or jnp.int8. Other "
            "dtypes are sent by dtype="
        )
    for option, x in (("dtype", dtype), ("reduce_dtype", reduce_dtype)):
        if x is not None and not jnp.issubdtype(x, jnp.floating):
            raise TypeError(f"{name}: {option}={x!r} is not a floating dtype")
    if None not in (dtype, reduce_dtype) and jnp.promote_types(dtype, reduce_dtype) != reduce_dtype:
        raise TypeError(
            f"{name}: reduce_dtype={jnp.dtype(reduce_dtype)} is narrower than "
            f"dtype={jnp.dtype(dtype)}, in which gradients are computed"
        )


def _check_prefetch(prefetch: Any, checkpoint: bool, policy: Any, in_turn: bool) -> None:
    if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
        raise TypeError(f"fully_shard: prefetch={prefetch!r} is not a number of layers")
    others = {"checkpoint=False": not checkpoint, "policy=": policy, "in_turn=False": not in_turn}
    for name, is_given in others.items():
        if prefetch and is_given:
            raise TypeError(
                f"fully_shard: prefetch={prefetch} can't be combined with {name}: layers that are "
                "prefetched take turns, and are rematerialised whole. Leave one out"
            )


def _check_saving(checkpoint: bool, policy: Any, saved: Any) -> None:
    if policy is recompute_resharded:
        raise TypeError(
            "fully_shard: recompute_resharded returns a policy, and fully_shard applies it to any "
            "policy itself. Give one of jax.checkpoint_policies, or leave out policy="
        )
    for option, x in (("policy", policy), ("saved", saved)):
        if x is not None and not checkpoint:
            raise TypeError(
                f"fully_shard: {option}= has no effect with checkpoint=False, which saves "
                "everything: leave one out"
            )


def _checked(layers: Any) -> _Methods:
    classes = tuple(layers) if isinstance(layers, tuple | list | Mapping) else (layers,)
    for cls in classes:
        origin = get_origin(cls)
        if isinstance(origin, type) and issubclass(origin, eqx.Module):
            raise TypeError(
                f"fully_shard: layers={layers!r}: Modules don't know the parameters of their "
                f"class. Write {origin.__qualname__}, not {cls!r}"
            )
    if classes and all(isinstance(cls, type) for cls in classes):
        table: dict[type, Sequence[str]] = dict.fromkeys(classes, _CALL)
        if isinstance(layers, Mapping):
            table = {cls: (n,) if isinstance(n, str) else tuple(n) for cls, n in layers.items()}
        for cls, names in table.items():
            if not names:
                raise TypeError(f"fully_shard: {cls.__qualname__} has no method in layers={layers}")
        return lambda x, path: next((n for cls, n in table.items() if isinstance(x, cls)), None)
    if callable(layers) and not isinstance(layers, eqx.Module):
        return lambda x, path: _CALL if layers(x, path) else None
    raise TypeError(
        f"fully_shard: layers={layers!r} does not select Modules. Give a class, a "
        "tuple of classes, a mapping from classes to names of methods, or a function of a Module "
        "and its path. The model comes first: fully_shard(model, Block, kept)"
    )


# A layer or a leaf of a model: its path, the node, and the methods that gather.
_Node = tuple[Any, Any, Sequence[str] | None]


def _flatten(model: Any, methods: _Methods) -> tuple[list[_Node], Any]:
    def names(path: Any, x: Any) -> Sequence[str] | None:
        return methods(x, jtu.keystr(path)) if isinstance(x, eqx.Module) else None

    nodes, treedef = jtu.tree_flatten_with_path(
        model, is_leaf=lambda path, x: names(path, x) is not None, is_leaf_takes_path=True
    )
    return [(path, node, names(path, node)) for path, node in nodes], treedef


def _refuse_layers(layers: Any, model: Any, nodes: Sequence[_Node]) -> Iterator[Fault]:
    """Faults of the layers in this model."""
    modules = _modules(model)
    gathering = [(path, x) for path, x in modules if is_layer(x)]
    for path, _ in gathering:
        fix = (
            "call fully_shard once, on the model that the loss takes; for layers of several "
            "classes give a tuple of them"
        )
        yield because("it gathers its weights already", fix, "fully_shard", jtu.keystr(path))
    if gathering:
        return
    new_layers = [(path, node, names) for path, node, names in nodes if names is not None]
    yield from _missing(layers, modules, [node for _, node, _ in new_layers])
    shared = [path for path, x in modules if isinstance(x, eqx.nn.Shared)]
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
        public_methods = [x for x in vars(cls) if not x.startswith("_") and is_method(cls, x)]
        yield because(
            f"{cls.__qualname__} has no method {', '.join(lacking)}",
            "name the methods that gather, as in "
            f"layers={{{cls.__qualname__}: {public_methods or ['encode', 'decode']}}}",
            f"fully_shard of {cls.__qualname__}",
            jtu.keystr(path),
        )


def _modules(model: Any) -> list[tuple[KeyPath, eqx.Module]]:
    """All Modules of a model, with their paths."""
    modules: list[tuple[KeyPath, eqx.Module]] = []

    def note(path: KeyPath, x: Any) -> bool:
        if isinstance(x, eqx.Module):
            modules.append((path, x))
        return False

    jtu.tree_flatten_with_path(model, is_leaf=note, is_leaf_takes_path=True)
    return modules


def _missing(
    layers: Any, modules: Sequence[tuple[KeyPath, eqx.Module]], selected: Sequence[Any]
) -> Iterator[Fault]:
    names = dict.fromkeys(type(x).__qualname__ for _, x in modules)
    requested = layers if isinstance(layers, tuple | Mapping) else (layers,)
    for cls in requested:
        is_class = isinstance(cls, type)
        if any(isinstance(x, cls) for x in selected) if is_class else selected:
            continue
        reason = "no Module of the model matches"
        fix = f"its Modules are {', '.join(names)}" if names else "it has no Module"
        if is_class and any(isinstance(x, cls) for _, x in modules):
            reason = "all of them are inside other layers, which gather their weights"
            fix = "leave the class out"
        yield because(reason, fix, f"fully_shard of {cls.__qualname__ if is_class else cls!r}")


def faults_of_weights(leaves: Leaves, decisions: Sequence[Decision]) -> Iterator[Fault]:
    """Faults of `kept` and `used`, in this order in `decisions`."""
    kept, used = decisions
    yield from (*kept.faults, *used.faults)
    yield from _refuse_memory(leaves, used.targets)
    yield from _refuse_devices(leaves, decisions)
    yield from _refuse_exchanged(leaves, kept.targets, used.targets)


def _refuse_memory(leaves: Leaves, targets: Sequence[Target | None]) -> Iterator[Fault]:
    for i, target in enumerate(targets):
        kind = None if target is None else unusual_memory_kind(target)
        if kind is not None:
            fix = "write it in `kept`: layers compute in the memory of the device"
            refused = because("nothing is computed there", fix, f"used in {kind} memory")
            yield leaves.at(i, refused)


def _refuse_devices(leaves: Leaves, decisions: Sequence[Decision]) -> Iterator[Fault]:
    """Faults of weights that are on other devices than the rest: no program has both."""
    meshes = [decision.mesh for decision in decisions if decision.mesh is not None]
    placed = [
        (i, sharding_of(target))
        for decision in decisions
        for i, target in enumerate(decision.targets)
        if target is not None
    ]
    most = max([mesh.size for mesh in meshes] + [x.num_devices for _, x in placed], default=0)
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


def _refuse_exchanged(
    leaves: Leaves, kept: Sequence[Target | None], used: Sequence[Target | None]
) -> Iterator[Fault]:
    """Faults of weights that `used` splits over an axis over which `kept` splits no weight."""
    kept_axes = {axis for target in kept for axis in split_over(target)}
    for i, (before, target) in enumerate(zip(kept, used, strict=True)):
        others = [axis for axis in split_over(target) if axis not in kept_axes]
        if before is not None and target is not None and others:
            yield leaves.at(
                i,
                because(
                    f"`used` splits it over {others[0]!r}, over which `kept` splits no weight: "
                    "each device would hold more between steps than a layer computes with",
                    "`kept` comes first: fully_shard(model, layers, kept, used). What `used` "
                    "splits, `kept` splits, too",
                    f"used={show(sharding_of(target), None)}",
                ),
            )
