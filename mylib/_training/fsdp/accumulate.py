"""`accumulate`: gradients of a batch in pieces, with weights that are gathered once, and gradients
that are summed over the devices once.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..._core.contexts import are_gathered, in_own_dtypes, on_one_device
from ..._core.errors import Fault, PlacementError, because
from ..._core.placement import AnyMesh, Placement, Target, current_world
from ..._core.rules import replicated
from ..._core.tree import Arrays, Leaves, is_array, split
from ..jit import expect
from .explicit_axes import on_auto_axes
from .fully_shard import check_dtypes, decide_weights, faults_of_weights
from .gather import Route, gather_weights, keep, summed
from .quantised import cast

T = TypeVar("T")
# The value of a loss, and gradients; or sums of them.
Sums = tuple[jax.Array, Arrays]


def accumulate(
    loss: Callable[[T, Any], Any],
    model: T,
    batch: PyTree[Any],
    kept: PyTree[Placement],
    used: PyTree[Placement] = replicated(),  # noqa: B008
    *,
    pieces: int,
    axes: str | Sequence[str] = "data",
    mesh: AnyMesh | None = None,
    dtype: DTypeLike | None = None,
    reduce_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, T]:
    """The loss and gradients of a batch, computed in pieces one after the other. Weights are
    gathered once, and gradients are summed over the devices once, after the last piece.

    Each device holds all weights in `dtype`, and its own sums of all gradients. Where that is too
    much, add the gradients of the pieces in a loop of your own, and call `mylib.fully_shard` in
    the loss: it gathers each layer and sums its gradient in each piece.

    **Arguments:**

    - `loss`: a function of the model and a piece of the batch. It returns a number that is a mean
        over rows. It must not constrain anything over `axes`. If it calls `fully_shard`, layers
        gather nothing, and their `dtype`, `checkpoint` and `policy` count; other losses recompute
        layers by `mylib.filter_checkpoint`.
    - `model`: any PyTree; gradients are taken with respect to its floating-point arrays.
    - `batch`: any PyTree. The first dimension of all of its arrays is that of the rows, which are
        split over `axes`.
    - `kept`, `used`, `mesh`, `dtype`: as for `fully_shard`.
    - `pieces`: how many. The rows of each device must be a multiple.
    - `axes`: the mesh axes of the rows.
    - `reduce_dtype`: the dtype in which gradients are added and summed; by default that of the
        weights.

    **Returns:**

    The loss, a mean over all rows, and the gradients, placed as in `kept`.

    **Raises:**

    `mylib.PlacementError`, naming every leaf that can't be placed as requested, or can't be
    divided into pieces.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        kept = mylib.rules.fsdp("data")


        @mylib.filter_jit(in_shardings={"x": P("data")}, mesh=mesh)
        def gradients(model, x):
            def loss(model, x):
                return jnp.mean(jax.vmap(model)(x) ** 2)

            return mylib.accumulate(loss, model, x, kept, pieces=2, mesh=mesh)


        model = eqx.nn.MLP(64, 64, 256, 2, key=jax.random.key(0))
        value, grads = gradients(model, jnp.ones((32, 64)))
        assert grads.layers[0].weight.sharding.spec == P("data")
        ```
    """
    _refuse_swapped(loss, model)
    check_dtypes(dtype, reduce_dtype, name="accumulate")
    if in_own_dtypes.value:
        dtype = reduce_dtype = None
    if on_one_device.value:
        return _alone(loss, model, batch, dtype, reduce_dtype)
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    weights, rows, world = split(model), split(batch), current_world()
    decisions = decide_weights(weights, kept, used, mesh)
    over = decisions[0].mesh or world.mesh
    faults = [*faults_of_weights(weights, *decisions), *_faults(rows, over, axes, pieces)]
    if faults:
        raise PlacementError(faults)
    kept_at, used_at = (tuple(decision.targets) for decision in decisions)
    expect(weights.arrays, kept_at)
    route = Route(kept_at, used_at, dtype)
    gathered, _ = gather_weights(weights.arrays, route)
    trained = [i for i, weight in enumerate(gathered) if eqx.is_inexact_array(weight)]

    def of_piece(arrays: Arrays, piece: Arrays) -> jax.Array:
        replaced = dict(zip(trained, arrays, strict=True))
        values = [replaced.get(i, weight) for i, weight in enumerate(gathered)]
        with are_gathered(True):
            return loss(weights.join(values), rows.join(piece))

    route, arrays = route.part(trained), [gathered[i] for i in trained]
    types = [jax.typeof(weights.arrays[i]) for i in trained]
    start = [
        (of.shape, reduce_dtype or of.dtype, at) for of, at in zip(types, route.used, strict=True)
    ]
    value, sums = _sums(of_piece, arrays, rows.arrays, start, (over, axes, pieces))
    grads = list[jax.Array | None]([None]) * len(gathered)
    for i, mean in zip(trained, _means(sums, route, types, pieces), strict=True):
        grads[i] = mean
    return value, weights.fill(grads)


def _refuse_swapped(loss: object, model: object) -> None:
    if isinstance(loss, eqx.Module) and inspect.isroutine(model):
        raise TypeError("accumulate takes the loss first: accumulate(loss, model, batch, kept)")


def _alone(
    loss: Callable[[T, Any], Any],
    model: T,
    batch: PyTree[Any],
    dtype: DTypeLike | None,
    reduce_dtype: DTypeLike | None,
) -> tuple[jax.Array, T]:
    """On one device, all at once, with the roundings of weights and of sums."""

    def as_computed(model: T) -> T:
        return jax.tree.map(lambda leaf: cast(leaf, dtype) if is_array(leaf) else leaf, model)

    with are_gathered(True):
        value, grads = eqx.filter_value_and_grad(lambda m, b: loss(as_computed(m), b))(model, batch)
    return value, jax.tree.map(lambda g: cast(cast(g, reduce_dtype), g.dtype), grads)


def _means(sums: Arrays, route: Route, types: Sequence[ShapedArray], pieces: int) -> Arrays:
    """Of the devices' sums; placed as the weights are, whose types these are."""

    def run(sums: Arrays, _: Arrays) -> Arrays:
        return summed(route, types, [jnp.sum(each, 0) / (len(each) * pieces) for each in sums])

    # The type of a sum would ask for it on each device; like this it is a reduce-scatter.
    on_auto = on_auto_axes(run, types) if current_world().mesh.explicit_axes else run
    return on_auto(sums, [])


def _sums(
    of_piece: Callable[[Arrays, Arrays], jax.Array],
    arrays: Arrays,
    rows: Arrays,
    start: Sequence[tuple[tuple[int, ...], DTypeLike, Target | None]],
    where: tuple[AnyMesh, Sequence[str], int],
) -> Sums:
    """The mean of `of_piece` over all pieces and devices, and the sums of each device's gradients.
    `start` are their shapes, dtypes, and where the weights are used.
    """
    mesh, axes, pieces = where
    devices = math.prod(mesh.shape[axis] for axis in axes)
    # Of each device by itself: nothing is summed over the devices.
    on_each = jax.vmap(jax.value_and_grad(of_piece), in_axes=(None, 0), spmd_axis_name=axes)

    def add(total: Sums, piece: Arrays) -> tuple[Sums, None]:
        new = on_each(arrays, piece)
        return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, new), None

    def zeros(shape: tuple[int, ...], dtype: DTypeLike, at: Target | None) -> jax.Array:
        spec = at.spec if isinstance(at, NamedSharding) else PartitionSpec()
        return _at(jnp.zeros((devices, *shape), dtype), mesh, axes, *spec)

    def cut(batch: jax.Array) -> jax.Array:
        """Rows in pieces, and of each piece those of each device."""
        others = [_entry(batch, dim, mesh) for dim in range(1, batch.ndim)]
        of_devices = _at(batch, mesh, axes, *others)
        of_pieces = of_devices.reshape(devices, pieces, -1, *batch.shape[1:]).swapaxes(0, 1)
        return _at(of_pieces, mesh, None, axes, None, *others)

    sums = _at(jnp.zeros(devices), mesh, axes), [zeros(*of) for of in start]
    (value, grads), _ = jax.lax.scan(add, sums, list(map(cut, rows)))
    return jnp.mean(value) / pieces, grads


def _entry(array: jax.Array, dim: int, mesh: AnyMesh) -> object:
    """How a dimension that isn't that of the rows stays sharded."""
    entry = jax.typeof(array).sharding.spec.partitions[dim] if mesh.explicit_axes else None
    return PartitionSpec.UNCONSTRAINED if entry is None and mesh.auto_axes else entry


def _at(array: jax.Array, mesh: AnyMesh, *spec: object) -> jax.Array:
    return keep([array], (NamedSharding(mesh, PartitionSpec(*spec)),))[0]


def _faults(rows: Leaves, mesh: AnyMesh, axes: Sequence[str], pieces: int) -> Iterator[Fault]:
    """Faults of a batch, and of the mesh."""
    request = f"accumulate(..., pieces={pieces}, axes={axes})"
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing:
        fix = f"axes= names those of the rows, of {', '.join(mesh.axis_names) or 'no mesh'}"
        yield because(f"the mesh has no axis {missing[0]!r}", fix, request)
        return
    parts = math.prod(mesh.shape[axis] for axis in axes) * pieces
    for i, array in enumerate(rows.arrays):
        if not array.shape or array.shape[0] % parts:
            reason = f"its first dimension can't be divided into {parts}: devices times pieces"
            fix = "use fewer pieces, or a batch of a multiple of them; close over other arrays"
            yield rows.at(i, because(reason, fix, request))
