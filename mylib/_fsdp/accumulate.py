"""`accumulate`: gradients of a batch in pieces, with weights that are gathered once, and gradients
that are summed over the devices once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._errors import Fault, PlacementError, because
from .._jit import expect
from .._placement import (
    AnyMesh,
    Placement,
    Target,
    current_world,
    decide,
    in_own_dtypes,
    on_one_device,
)
from .._tree import Leaves, split
from ..rules import replicated
from .explicit_axes import on_auto_axes
from .fully_shard import check_dtypes, faults_of_weights
from .gather import Route, gather_weights, keep, summed

T = TypeVar("T")


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
    dtype: Any = None,
    reduce_dtype: Any = None,
) -> tuple[jax.Array, T]:
    """The loss and gradients of a batch, computed in pieces one after the other. Weights are
    gathered once, and gradients are summed over the devices once, after the last piece.

    Each device holds all weights in `dtype`, and its own sums of all gradients. Where that is too
    much, call [`mylib.fully_shard`][] in the loss and add the gradients of the pieces in a loop: it
    gathers each layer and sums its gradient in each piece.

    **Arguments:**

    - `loss`: a function of the model and a piece of the batch. It returns a number that is a mean
        over rows. It must not call `fully_shard`, nor constrain anything over `axes`; what its
        layers recompute is up to it ([`mylib.filter_checkpoint`][]).
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

    [`mylib.PlacementError`][], naming every leaf that can't be placed as requested, or can't be
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
    check_dtypes(dtype, reduce_dtype, name="accumulate")
    if on_one_device.value:
        return eqx.filter_value_and_grad(loss)(model, batch)
    if in_own_dtypes.value:
        dtype = reduce_dtype = None
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    weights, rows, world = split(model), split(batch), current_world()
    decisions = [decide(weights, placement, mesh, world) for placement in (kept, used)]
    over = decisions[0].mesh or world.mesh
    faults = [*faults_of_weights(weights, decisions), *_faults(rows, over, axes, pieces)]
    if faults:
        raise PlacementError(faults)
    kept_at, used_at = (tuple(decision.targets) for decision in decisions)
    expect(weights.arrays, kept_at)
    route = Route(kept_at, used_at, dtype)
    gathered, _ = gather_weights(weights.arrays, route)
    trained = [i for i, x in enumerate(gathered) if eqx.is_inexact_array(x)]

    def of_piece(arrays: list[Any], piece: list[Any]) -> Any:
        replaced = dict(zip(trained, arrays, strict=True))
        values = [replaced.get(i, x) for i, x in enumerate(gathered)]
        return loss(weights.join(values), rows.join(piece))

    route, arrays = route.part(trained), [gathered[i] for i in trained]
    types = [jax.typeof(weights.arrays[i]) for i in trained]
    start = [
        (x.shape, reduce_dtype or x.dtype, at) for x, at in zip(types, route.used, strict=True)
    ]
    value, sums = _sums(of_piece, arrays, rows.arrays, start, (over, axes, pieces))
    grads: list[Any] = [None] * len(gathered)
    for i, x in zip(trained, _means(sums, route, types, pieces), strict=True):
        grads[i] = x
    return value, weights.fill(grads)


def _means(sums: list[Any], route: Route, types: Sequence[Any], pieces: int) -> list[Any]:
    """Of the devices' sums; placed as the weights are, whose types these are."""

    def run(sums: list[Any], _: list[Any]) -> list[Any]:
        return summed(route, types, [jnp.sum(x, 0) / (len(x) * pieces) for x in sums])

    # The type of a sum would ask for it on each device; like this it is a reduce-scatter.
    on_auto = on_auto_axes(run, types) if current_world().mesh.explicit_axes else run
    return on_auto(sums, [])


def _sums(
    of_piece: Callable[[list[Any], list[Any]], Any],
    arrays: list[Any],
    rows: list[Any],
    start: Sequence[tuple[tuple[int, ...], Any, Target | None]],
    where: tuple[AnyMesh, Sequence[str], int],
) -> tuple[jax.Array, list[Any]]:
    """The mean of `of_piece` over all pieces and devices, and the sums of each device's gradients.
    `start` are their shapes, dtypes, and where the weights are used.
    """
    mesh, axes, pieces = where
    devices = math.prod(mesh.shape[axis] for axis in axes)
    # Of each device by itself: nothing is summed over the devices.
    on_each = jax.vmap(jax.value_and_grad(of_piece), in_axes=(None, 0), spmd_axis_name=axes)

    def add(total: Any, piece: list[Any]) -> tuple[Any, None]:
        new = on_each(arrays, piece)
        return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, new), None

    def zeros(shape: tuple[int, ...], dtype: Any, at: Target | None) -> Any:
        spec = at.spec if isinstance(at, NamedSharding) else PartitionSpec()
        return _at(jnp.zeros((devices, *shape), dtype), mesh, axes, *spec)

    def cut(x: Any) -> Any:
        """Rows in pieces, and of each piece those of each device."""
        others = [_entry(x, dim, mesh) for dim in range(1, x.ndim)]
        x = _at(x, mesh, axes, *others).reshape(devices, pieces, -1, *x.shape[1:])
        return _at(x.swapaxes(0, 1), mesh, None, axes, None, *others)

    sums = _at(jnp.zeros(devices), mesh, axes), [zeros(*x) for x in start]
    (value, grads), _ = jax.lax.scan(add, sums, [cut(x) for x in rows])
    return jnp.mean(value) / pieces, grads


def _entry(x: Any, dim: int, mesh: AnyMesh) -> Any:
    """How a dimension that isn't that of the rows stays sharded."""
    entry = jax.typeof(x).sharding.spec.partitions[dim] if mesh.explicit_axes else None
    return PartitionSpec.UNCONSTRAINED if entry is None and mesh.auto_axes else entry


def _at(x: Any, mesh: AnyMesh, *spec: Any) -> Any:
    return keep([x], (NamedSharding(mesh, PartitionSpec(*spec)),))[0]


def _faults(rows: Leaves, mesh: AnyMesh, axes: Sequence[str], pieces: int) -> Iterator[Fault]:
    """Faults of a batch, and of the mesh."""
    request = f"accumulate(..., pieces={pieces}, axes={axes})"
    missing = [axis for axis in axes if axis not in mesh.shape]
    if missing:
        fix = f"axes= names those of the rows, of {', '.join(mesh.axis_names) or 'no mesh'}"
        yield because(f"the mesh has no axis {missing[0]!r}", fix, request)
        return
    parts = math.prod(mesh.shape[axis] for axis in axes) * pieces
    for i, x in enumerate(rows.arrays):
        if not x.shape or x.shape[0] % parts:
            reason = f"its first dimension can't be divided into {parts}: devices times pieces"
            fix = "use fewer pieces, or a batch of a multiple of them; close over other arrays"
            yield rows.at(i, because(reason, fix, request))
