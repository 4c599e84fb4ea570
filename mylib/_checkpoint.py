"""`filter_checkpoint`: `jax.checkpoint` that knows where arrays are kept, and where used."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
from jaxtyping import PyTree

from ._arguments import Function, Inputs
from ._leaves import split
from ._placement import Placement
from ._program import outlined
from ._shard import place_leaves
from ._target import AnyMesh
from ._world import World, current_world

P = ParamSpec("P")
T = TypeVar("T")
Policy = Callable[..., Any]

# Names of JAX's primitives whose results are what went in, elsewhere,
_RESHARDING = frozenset(
    "sharding_constraint layout_constraint reshard relayout mesh_cast "
    "all_gather all_gather_invariant all_gather_reduced "
    "all_gather_start all_gather_reduced_start all_gather_done "
    "pvary preduced reduced_vary_cast reduced_vary_cast_p".split()
)
# and of those whose results are what went in, arranged otherwise and no smaller.
_REARRANGING = frozenset(
    "transpose reshape squeeze broadcast_in_dim tile rev copy split unstack concatenate "
    "stack".split()
)
_SAVE_ALL = jax.checkpoint_policies.everything_saveable


def recompute_resharded(policy: Policy = _SAVE_ALL) -> Policy:
    """A policy for `jax.checkpoint` that saves what `policy` saves, but not the results of
    resharding: they are gathered again, from where they are kept.

    From the forward pass JAX keeps the values that the gradient will need. Weights that are
    gathered for a layer are among them, so that in the end each device holds the whole model,
    sharded though it is. With this policy it holds its part, and gathers once more on the way back.
    What was computed is not computed again.

    Resharding is [`mylib.filter_shard`][] and what it is made of (`with_sharding_constraint`,
    `reshard`), a transfer from host memory, and inside `shard_map` `all_gather` and `pcast`. What
    is only another form of a value and no smaller (transposed, reshaped, of a wider type) isn't
    kept either: it would be a copy of what was gathered.

    **Arguments:**

    - `policy`: what may be saved of the rest: one of `jax.checkpoint_policies`, or any function
        like them. By default everything.

    **Returns:**

    A policy, for [`mylib.filter_checkpoint`][] or `jax.checkpoint`.

    !!! Example

        ```python
        dots = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        jax.checkpoint(jnp.sin, policy=mylib.recompute_resharded(dots))
        ```
    """
    return _RecomputeResharded(policy)


@dataclass(frozen=True)
class _RecomputeResharded:
    # Equal policies are equal, as JAX keeps its traces by them.
    policy: Policy

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if _is_elsewhere(primitive.name, avals) or _is_rearranged(primitive.name, avals, params):
            return False
        if primitive.name == "name" and self.policy is _SAVE_ALL:
            # The one who saves everything asks for no name; what has it would be a copy.
            return False
        return self.policy(primitive, *avals, **params)


def _is_elsewhere(name: str, avals: Any) -> bool:
    if name == "device_put":
        # On its way to the host a value is to be saved there.
        return all(aval.memory_space == jax.memory.Space.Host for aval in avals)
    return name in _RESHARDING


def _is_rearranged(name: str, avals: Any, params: Any) -> bool:
    if name == "convert_element_type":
        return params["new_dtype"].itemsize >= avals[0].dtype.itemsize
    return name in _REARRANGING


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
    """`jax.checkpoint` for functions of PyTrees: what `fun` computes isn't kept for the backward
    pass, but computed again there. Takes the place of `equinox.filter_checkpoint`.

    **Arguments:**

    - `fun`: the function, or method, or Module. Without it a decorator is returned.
    - `prevent_cse`: whether the compiler is kept from merging the two computations, which would
        undo it. Inside of `jax.lax.scan` it can't do so, and False is faster.
    - `policy`: what is kept all the same: [`mylib.recompute_resharded`][] of any policy, or one of
        `jax.checkpoint_policies`. By default only the arguments.
    - `in_shardings`: where the arguments are kept between the two passes, over the signature of
        `fun` as for [`mylib.filter_jit`][]: a placement for all of them, a tuple with a prefix for
        each of the positional ones, or a dict from names of parameters to prefixes. On Auto axes
        the compiler otherwise decides, and may keep them as `fun` uses them, gathered.
    - `mesh`: for placements that are no shardings; by default that of `jax.set_mesh`.

    **Returns:**

    A function of the same arguments.

    **Raises:**

    [`mylib.PlacementError`][], naming every argument that can't be where `in_shardings` says.

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))
        kept = mylib.rules.fsdp("data")

        @mylib.filter_checkpoint(
            policy=mylib.recompute_resharded(), in_shardings={"layer": kept}, mesh=mesh
        )
        def apply(layer, x):
            layer = mylib.filter_shard(layer, P(), mesh=mesh)
            return jax.nn.relu(jax.vmap(layer)(x))

        layer = eqx.nn.Linear(512, 512, key=jax.random.key(0))
        eqx.filter_grad(lambda layer, x: jnp.sum(apply(layer, x)))(layer, jnp.ones((8, 512)))
        ```
    """
    if fun is None:
        return functools.partial(
            filter_checkpoint,
            prevent_cse=prevent_cse,
            policy=policy,
            in_shardings=in_shardings,
            mesh=mesh,
        )
    if policy is recompute_resharded:
        raise TypeError(
            "filter_checkpoint: policy=recompute_resharded is what makes the policy. Write "
            "policy=recompute_resharded(), with what may be saved of the rest in it"
        )
    inputs = None if in_shardings is None else Inputs(in_shardings, mesh)
    return eqx.module_update_wrapper(_Checkpointed(fun, prevent_cse, policy, inputs))


class _Checkpointed(eqx.Module):
    fun: Callable[..., Any]
    prevent_cse: bool = eqx.field(static=True)
    policy: Policy | None = eqx.field(static=True)
    inputs: Inputs | None = eqx.field(static=True)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fun

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        world = current_world()
        # In a program the constraints belong inside, behind what keeps the compiler from merging
        # the two passes. Outside they would be one value more to keep.
        given = (args, kwargs) if world.staged else self._kept(args, kwargs, world)
        arrays, rest = eqx.partition((self.fun, given), eqx.is_array)
        static = None

        def computed(arrays: Any) -> Any:
            nonlocal static
            fun, (args, kwargs) = eqx.combine(arrays, rest)
            args, kwargs = self._kept(args, kwargs, current_world())
            returned, static = eqx.partition(fun(*args, **kwargs), eqx.is_array)
            return returned

        checkpoint = jax.checkpoint(computed, prevent_cse=self.prevent_cse, policy=self.policy)
        returned = checkpoint(arrays)
        return eqx.combine(returned, static)

    def _kept(self, args: Any, kwargs: Any, world: World) -> tuple[Any, Any]:
        """The arguments, where they are to be kept."""
        if self.inputs is None:
            return args, kwargs
        function = Function.of(self.fun)
        given = self.inputs.bind(function, args, kwargs)
        leaves = split(given, outlined(given)[1].positions)
        targets = self.inputs.resolve(function, leaves, *given, world)
        with function.named_in_errors():
            return leaves.join(place_leaves(leaves, targets, world))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else eqx.Partial(self, instance)
