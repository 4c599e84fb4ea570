"""`fully_shard`: the weights of a layer are gathered where it is called."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._errors import Fault, PlacementError
from .._placement import (
    AnyMesh,
    Placement,
    Target,
    current_world,
    decide,
    unusual_memory_kind,
)
from .._tree import Leaves, name_of, split
from ..rules import replicated
from .checkpoint import Policy, recompute_resharded
from .gather import Route, gather
from .layer import Plan, as_layer, is_layer

T = TypeVar("T")
Layers = (
    type | tuple[type, ...] | Mapping[type, str | Sequence[str]] | Callable[[eqx.Module, str], bool]
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
    checkpoint: bool = True,
    policy: Policy | None = None,
    in_turn: bool = True,
) -> T:
    """The model, each of whose layers gathers its weights when it is called. For use inside the
    loss: what is differentiated is the model that went in.

    Between the calls each device holds its part of the weights (`kept`). A layer that is called
    gathers its own (`used`), computes, and forgets them; on the way back it gathers them once more,
    and its gradient is summed and cut to `kept` at once. The leaves of the model that are in no
    layer are gathered where `fully_shard` is called. This is what PyTorch calls `fully_shard`, and
    others FSDP or ZeRO-3.

    The same line serves layers in a list and layers that are stacked and run by `jax.lax.scan`,
    under `jax.vmap` over examples or not, on Auto and Explicit axes. It can be differentiated in
    reverse mode only.

    **Arguments:**

    - `model`: any PyTree with Modules in it.
    - `layers`: which Modules are layers: a class, a tuple of classes, a mapping from classes to the
        methods that gather, `{Attention: ["__call__", "decode"]}`, or a function of a Module and
        its path (such as `.blocks[0]`). A layer inside of a layer belongs to the outer one.
    - `kept`: where the weights are between steps: the placement that they have outside.
    - `used`: where a layer computes with them: by default all of each weight on every device; with
        tensor parallelism the rule for that. None leaves that to the compiler, which then may move
        activations instead: right where a batch is smaller than the weights.
    - `mesh`: for placements that are no shardings; by default that of `jax.set_mesh`.
    - `dtype`: what floating weights are cast to before they are sent. The layers compute with
        that, and gradients are summed in it; they come back in the dtype of the weights.
    - `reduce_dtype`: a wider dtype in which the gradients of layers are made and summed over the
        devices, such as `jnp.float32` where `dtype=jnp.bfloat16`. Products still multiply
        numbers of `dtype`. Leaves in no layer are summed in `dtype` all the same.
    - `checkpoint`: whether layers are rematerialised: gathered weights are then never saved for the
        backward pass. If False, everything may be.
    - `policy`: what else is saved of a layer, as for [`mylib.filter_checkpoint`][]; by default only
        its input. `jax.checkpoint_policies.everything_saveable` saves all but the gathered weights.
    - `in_turn`: whether a layer that is not stacked waits for its input before it gathers its
        weights, so that those of one layer are there at a time. If False, the compiler decides, and
        may take what memory it has.

    **Returns:**

    A model of the same structure and classes.

    **Raises:**

    [`mylib.PlacementError`][]: for every leaf that can't be where it is to be, and for layers that
    are not there. When a layer is called, if it is stacked and `kept` or `used` splits the layers
    themselves, as each turn of the loop would gather them all; if an axis is Manual there; and if
    it has other arrays than `fully_shard` saw.

    !!! Example

        ```python
        mesh = jax.make_mesh(
            (8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
        )
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
    _check_dtypes(dtype, reduce_dtype)
    methods = _checked(layers, checkpoint, policy)
    leaves, world = split(model), current_world()
    decisions = [decide(leaves, placement, mesh, world) for placement in (kept, used)]
    faults = [fault for decision in decisions for fault in decision.faults]
    faults += _refuse_memory(leaves, decisions[1].targets)
    nodes, treedef = _flatten(model, methods)
    faults += _refuse_layers(layers, model, nodes)
    if faults:
        raise PlacementError(faults)
    kept_at, used_at = (tuple(decision.targets) for decision in decisions)
    route = Route(kept_at, used_at, dtype, reduce_dtype)
    made: list[Any] = []
    at_top: dict[int, int] = {}  # of arrays that are in no layer, where they are in `made`
    start = 0
    for _, node, chosen in nodes:
        inside = range(start, start := start + len(split(node).arrays))
        if chosen is not None:
            ranks = tuple(leaves.arrays[i].ndim for i in inside)
            plan = Plan(route.part(inside), ranks, checkpoint, policy, in_turn)
            node = as_layer(node, chosen, plan)
        else:
            at_top |= dict.fromkeys(inside, len(made))
        made.append(node)
    top = replace(route, reduce_dtype=None).part(list(at_top))
    gathered, _ = gather([leaves.arrays[i] for i in at_top], top)
    for position, x in zip(at_top.values(), gathered, strict=True):
        made[position] = x
    return jtu.tree_unflatten(treedef, made)


def _check_dtypes(dtype: Any, reduce_dtype: Any) -> None:
    for name, x in (("dtype", dtype), ("reduce_dtype", reduce_dtype)):
        if x is not None and not jnp.issubdtype(x, jnp.floating):
            raise TypeError(f"fully_shard: {name}={x!r} is not a floating dtype")
    if None not in (dtype, reduce_dtype) and jnp.promote_types(dtype, reduce_dtype) != reduce_dtype:
        raise TypeError(
            f"fully_shard: reduce_dtype={jnp.dtype(reduce_dtype)} is narrower than "
            f"dtype={jnp.dtype(dtype)}, in which gradients are computed"
        )


def _checked(layers: Any, checkpoint: bool, policy: Any) -> _Methods:
    if policy is recompute_resharded:
        raise TypeError(
            "fully_shard: policy=recompute_resharded is what makes a policy, and fully_shard makes "
            "one of any. Give one of jax.checkpoint_policies, or leave it out"
        )
    if policy is not None and not checkpoint:
        raise TypeError("fully_shard: policy= says what a checkpoint saves, and checkpoint=False")
    if isinstance(layers, Mapping):
        table = {cls: (n,) if isinstance(n, str) else tuple(n) for cls, n in layers.items()}
        for cls, names in table.items():
            lacking = [name for name in names if not callable(getattr(cls, name, None))]
            if lacking or not names:
                raise TypeError(f"fully_shard: {cls.__qualname__} has no method {lacking or ''}")
        return lambda x, path: next((n for cls, n in table.items() if isinstance(x, cls)), None)
    if all(isinstance(x, type) for x in (layers if isinstance(layers, tuple) else (layers,))):
        return lambda x, path: _CALL if isinstance(x, layers) else None
    if callable(layers) and not isinstance(layers, eqx.Module):
        return lambda x, path: _CALL if layers(x, path) else None
    raise TypeError(
        f"fully_shard: layers={layers!r} does not say which Modules are layers. Give a class, a "
        "tuple of classes, a mapping from classes to names of methods, or a function of a Module "
        "and its path. The model comes first: fully_shard(model, Block, kept)"
    )


# Each node of a model that is a layer or a leaf: its path, itself, and the methods that gather.
_Node = tuple[Any, Any, Sequence[str] | None]


def _flatten(model: Any, methods: _Methods) -> tuple[list[_Node], Any]:
    chosen: dict[str, Sequence[str]] = {}

    def ends(path: Any, x: Any) -> bool:
        if not isinstance(x, eqx.Module):
            return False
        found = methods(x, jtu.keystr(path))
        if found is not None:
            chosen[jtu.keystr(path)] = found
        return found is not None

    nodes, treedef = jtu.tree_flatten_with_path(model, is_leaf=ends, is_leaf_takes_path=True)
    return [(path, node, chosen.get(jtu.keystr(path))) for path, node in nodes], treedef


def _refuse_layers(layers: Any, model: Any, nodes: Sequence[_Node]) -> Iterator[Fault]:
    """Why these layers can't be had of this model."""
    found = [(path, node) for path, node, chosen in nodes if chosen is not None]
    yield from _missing(layers, model, [node for _, node in found])
    for path, node in found:
        if is_layer(node):
            yield Fault(
                name_of(path) if path else "",
                None,
                "fully_shard",
                "it gathers its weights already",
                "call fully_shard once, on the model that comes into the loss",
            )
    shared: list[Any] = []

    def note(path: Any, x: Any) -> bool:
        if isinstance(x, eqx.nn.Shared):
            shared.append(path)
        return False

    jtu.tree_flatten_with_path(model, is_leaf=note, is_leaf_takes_path=True)
    for path, _ in found:
        if any(path[: len(tied)] == tied for tied in shared):
            yield Fault(
                name_of(path),
                None,
                "fully_shard",
                "its weights are tied (eqx.nn.Shared), so that they are used outside of its calls",
                "leave it out of `layers`: what is in no layer is gathered once for all its uses. "
                "Or name a class that holds the eqx.nn.Shared",
            )


def _missing(layers: Any, model: Any, found: Sequence[Any]) -> Iterator[Fault]:
    there: dict[str, None] = {}

    def note(x: Any) -> bool:
        if isinstance(x, eqx.Module):
            there[type(x).__qualname__] = None
        return False

    jtu.tree_flatten(model, is_leaf=note)
    wanted = layers if isinstance(layers, tuple | Mapping) else (layers,)
    for cls in wanted:
        is_class = isinstance(cls, type)
        if not (any(isinstance(x, cls) for x in found) if is_class else found):
            yield Fault(
                "",
                None,
                f"fully_shard of {cls.__qualname__ if is_class else repr(cls)}",
                "no Module of the model is one",
                f"the Modules there are {', '.join(there)}" if there else "the model has no Module",
            )


def _refuse_memory(leaves: Leaves, targets: Sequence[Target | None]) -> Iterator[Fault]:
    for i, target in enumerate(targets):
        kind = None if target is None else unusual_memory_kind(target)
        if kind is not None:
            yield Fault(
                name_of(leaves.paths[i]),
                tuple(leaves.arrays[i].shape),
                f"used in {kind} memory",
                "nothing is computed there",
                "say so of `kept`; `used` is in the memory of the device",
            )
