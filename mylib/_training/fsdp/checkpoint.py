"""`filter_checkpoint`: `jax.checkpoint` with placements, and a policy for gathered arrays."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from ..._core.compat import names
from ..._core.errors import Fault, because
from ..._core.placement import (
    AnyMesh,
    Decision,
    Placement,
    Target,
    World,
    current_world,
    decide,
    entries_over,
    mesh_in_force,
    sharding_of,
    unusual_memory_kind,
)
from ..._core.tree import Arrays, Leaves, Made, outlined
from ..._moving.transfer import constrain_auto_p, place_leaves
from ..jit import Function, Inputs
from .gather import gathered_p

P = ParamSpec("P")
T = TypeVar("T")
Policy = Callable[..., Any]
Avals = Sequence[ShapedArray]
Params = Mapping[str, Any]


def recompute_resharded(policy: Policy = jax.checkpoint_policies.everything_saveable) -> Policy:
    """A policy for `jax.checkpoint` that saves what `policy` saves, except results of resharding:
    these are gathered again.

    JAX saves the values of the forward pass that the gradient needs. They include the gathered
    weights of each layer, so each device ends up with the whole model although it is sharded. With
    this policy each device holds only its shards, and gathers again in the backward pass. Nothing
    else is computed again.

    Resharding means `mylib.filter_shard` and its primitives (`with_sharding_constraint`,
    `reshard`), a transfer from host memory, and, inside `shard_map`, `all_gather` and `pcast`.
    Values that are transposed, reshaped, sliced or converted to a wider dtype aren't saved either:
    they would be copies of the gathered array.

    **Arguments:**

    - `policy`: what to save otherwise: one of `jax.checkpoint_policies`, or any function like them.
        By default everything.

    **Returns:**

    A policy, for `mylib.filter_checkpoint` or `jax.checkpoint`.

    **Raises:**

    `TypeError` if `policy` is no policy.

    !!! Example

        ```python
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        jax.checkpoint(jnp.sin, policy=mylib.recompute_resharded(dots))
        ```
    """
    if not callable(policy) or policy is recompute_resharded:
        raise TypeError(
            f"recompute_resharded: {policy!r} is no policy. Give one of jax.checkpoint_policies, "
            "or nothing, to save everything that was not resharded"
        )
    return _RecomputeResharded(policy)


@dataclass(frozen=True)
class _RecomputeResharded:
    # Equal by value, because JAX caches traces by policy.
    policy: Policy

    def __call__(self, primitive: Primitive, *avals: ShapedArray, **params: object) -> object:
        name = primitive.name
        if name in _IS_RECOMPUTED and _IS_RECOMPUTED[name](avals, params):
            return False
        if name == names.CHECKPOINT_NAME and self.policy(jax.lax.neg_p, *avals) is True:
            # If the base policy saves everything, don't save the named value too: it is a copy.
            return False
        return self.policy(primitive, *avals, **params)


def _is_gathered(avals: Avals, params: Params) -> bool:
    """Whether each device has at least as much as before, and nothing was summed."""
    source, target = avals[0].sharding, params[names.PARAM_DST_SHARDING]
    size_before, size_after = (math.prod(s.shard_shape(avals[0].shape)) for s in (source, target))
    return size_after >= size_before and not source.spec.unreduced


def _is_to_device(avals: Avals, params: Params) -> bool:
    """A value that is moved to host memory is meant to be saved there."""
    return not any(
        to is jax.memory.Space.Host or "host" in str(getattr(to, "memory_kind", None))
        for to in params[names.PARAM_DEVICES]
    )


def _is_large_part(avals: Avals, params: Params) -> bool:
    """Whether the slice is large, like one of several weights that are gathered as one array."""
    bounds = zip(params[names.PARAM_STARTS], params[names.PARAM_LIMITS], strict=True)
    return math.prod(stop - start for start, stop in bounds) * 8 >= avals[0].size


# By primitive name: when its results are not saved, because they are its operands, moved or
# rearranged.
_IS_RECOMPUTED: dict[str, Callable[[Avals, Params], bool]] = {
    **dict.fromkeys(
        names.ONLY_MOVED | {constrain_auto_p.name, gathered_p.name},
        lambda avals, params: True,
    ),
    names.RESHARD: _is_gathered,
    names.DEVICE_PUT: _is_to_device,
    # No narrower.
    names.CONVERT: lambda avals, params: (
        params[names.PARAM_NEW_DTYPE].itemsize >= avals[0].dtype.itemsize
    ),
    names.SLICE: _is_large_part,
}


@overload
def filter_checkpoint(
    *,
    prevent_cse: bool = True,
    policy: Policy | None = None,
    in_shardings: PyTree[Placement] = None,
    mesh: AnyMesh | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


@overload
def filter_checkpoint(
    fun: Callable[P, T],
    *,
    prevent_cse: bool = True,
    policy: Policy | None = None,
    in_shardings: PyTree[Placement] = None,
    mesh: AnyMesh | None = None,
) -> Callable[P, T]: ...


def filter_checkpoint(
    fun: Callable[..., Any] | None = None,
    *,
    prevent_cse: bool = True,
    policy: Policy | None = None,
    in_shardings: PyTree[Placement] = None,
    mesh: AnyMesh | None = None,
) -> Callable[..., Any]:
    """`jax.checkpoint` for functions of PyTrees: intermediate values of `fun` aren't saved for the
    backward pass, but computed again there. A replacement for `equinox.filter_checkpoint`.

    **Arguments:**

    - `fun`: a function, method or Module. Without it a decorator is returned.
    - `prevent_cse`: whether to prevent the compiler from merging the two computations, which would
        undo the checkpoint. Inside `jax.lax.scan` it can't merge them, and False is faster.
    - `policy`: what to save nevertheless: `mylib.recompute_resharded` of any policy, or one of
        `jax.checkpoint_policies`. By default only the arguments are saved.
    - `in_shardings`: how the arguments are sharded between the two passes, written as for
        `mylib.filter_jit`: a placement for all of them, a tuple with a prefix for each
        positional argument, or a dict from parameter names to prefixes. On Auto axes the compiler
        may otherwise keep them gathered, as `fun` uses them.
    - `mesh`: the mesh for placements that are not shardings; by default that of `jax.set_mesh`.

    **Returns:**

    A function of the same arguments.

    **Raises:**

    `mylib.PlacementError`, naming every argument that can't be placed according to
    `in_shardings`.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        kept = mylib.rules.fsdp("data")


        @mylib.filter_checkpoint(
            policy=mylib.recompute_resharded(),
            in_shardings={"layer": kept},
            mesh=mesh,
        )
        def apply(layer, x):
            layer = mylib.filter_shard(layer, P(), mesh=mesh)
            return jax.nn.relu(jax.vmap(layer)(x))


        layer = eqx.nn.Linear(512, 512, key=jax.random.key(0))
        eqx.filter_grad(lambda layer, x: jnp.sum(apply(layer, x)))(
            layer, jnp.ones((8, 512))
        )
        ```
    """

    def wrap(fun: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = _Checkpointed(fun, prevent_cse, policy, in_shardings, mesh)
        return eqx.module_update_wrapper(wrapped)

    return wrap if fun is None else wrap(fun)


class _Checkpointed(eqx.Module):
    # No field is static, so that two of these have the same tree structure.
    fun: Callable[..., Any]
    prevent_cse: bool
    policy: Policy | None
    in_shardings: PyTree[Placement]
    mesh: AnyMesh | None

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fun

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        arrays, outline = outlined(self._placed_arguments(args, kwargs, before=True))

        def call(arrays: Arrays) -> Made:
            args, kwargs = self._placed_arguments(*outline.fill(arrays))
            return Made.of(self.fun(*args, **kwargs))

        run = jax.checkpoint(call, policy=self.policy, prevent_cse=self.prevent_cse)
        return run(arrays).tree()

    def _placed_arguments(
        self, args: Sequence[object], kwargs: Mapping[str, object], *, before: bool = False
    ) -> tuple[Sequence[object], Mapping[str, object]]:
        """The arguments, sharded as they are to be saved; `before` or inside the checkpoint."""
        if self.in_shardings is None:
            return args, kwargs
        function, world = Function.of(self.fun), current_world()
        inputs = _Saved(self.in_shardings, self.mesh)
        arguments = inputs.bind(function, args, kwargs)
        leaves = function.split(arguments)
        targets = inputs.resolve(function, leaves, *arguments, world)
        if before and world.staged:
            # On Auto axes the constraint must come after the barrier that prevents merging; before
            # it, it would only be one more value to save.
            pairs = zip(leaves.arrays, targets, strict=True)
            targets = [to if _has_another_type(array, to, world) else None for array, to in pairs]
        return leaves.join(place_leaves(leaves, targets, world))

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else eqx.Partial(self, instance)

    def __hash__(self) -> int:
        # `jax.jit` needs hashable functions, and placements may be dicts and lists.
        return hash((self.fun, self.prevent_cse, self.policy))


_OFFLOAD = "use a policy that offloads saved values (jax.checkpoint_policies.offload_...)"


def refuse_memory_kinds(target: Target, fix: str = _OFFLOAD) -> Iterator[Fault]:
    kind = unusual_memory_kind(target)
    if kind is not None:
        yield because(f"programs can't compute in {kind} memory", fix)


class _Saved(Inputs):
    """Where arguments are saved."""

    def decide(self, leaves: Leaves, prefix: PyTree[Placement], world: World) -> Decision:
        return decide(leaves, prefix, self.mesh, world, refuse_memory_kinds)


def _has_another_type(array: jax.Array, target: Target | None, world: World) -> bool:
    """Whether it is split differently on Explicit axes, and so would be saved that way, too."""
    if target is None or not isinstance(sharding := sharding_of(target), NamedSharding):
        return False
    now, explicit = jax.typeof(array).sharding, mesh_in_force(sharding.mesh, world).explicit_axes
    return entries_over(now.spec, explicit) != entries_over(sharding.spec, explicit)
