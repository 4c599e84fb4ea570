"""What differs between the devices inside `shard_map`, as JAX's types have it."""

from collections.abc import Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from ._leaves import Kind, kind_of

T = TypeVar("T")
Axes = frozenset[Any]


def vary(tree: T, axis_names: Any, /) -> T:
    """Says of a tree's arrays that they differ between the devices, inside `shard_map`.

    No value changes and nothing is sent. What changes are gradients: of what is the same on
    all devices JAX adds them up over the devices, of what differs it doesn't.

    **Arguments:**

    - `tree`: any PyTree. What is not an array, a Python number for instance, comes back as the same
        object.
    - `axis_names`: a mesh axis, or several in a tuple.

    **Returns:**

    The tree, its arrays varying over these axes, too. With `check_vma=False`, where there are no
    such types, the tree as it was.

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))

        @mylib.filter_shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        def gradient(w, x):
            own = jax.grad(lambda w: jnp.sum(w * x))(mylib.vary(w, "data"))
            return jax.lax.pmean(own, "data")

        assert gradient(1.0 * jnp.ones(()), jnp.arange(8.0)) == 3.5
        ```
    """
    axes = axis_names if isinstance(axis_names, tuple | list) else (axis_names,)
    known = manual_axes()
    unknown = [axis for axis in axes if axis not in known]
    if unknown:
        raise ValueError(
            f"vary: {', '.join(map(repr, unknown))} is none of the axes that are split over here; "
            + (f"there are {known}" if known else "there are none: call it in filter_shard_map")
        )
    return cast(tree, axes)


def cast(tree: T, axes: Iterable[Any]) -> T:
    """`vary`, over axes that are there."""
    # In the same order in every process: else their programs differ.
    ordered = [axis for axis in manual_axes() if axis in frozenset(axes)]

    def cast_one(x: Any) -> Any:
        if kind_of(x) is Kind.STATIC:
            return x
        missing = tuple(axis for axis in ordered if axis not in varying(x))
        return jax.lax.pcast(jnp.asarray(x), missing, to="varying") if missing else x

    return jax.tree.map(cast_one, tree)


def manual_axes() -> tuple[Any, ...]:
    """The axes that the code around is given its part of, in the order of the mesh."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def varying(x: Any) -> Axes:
    """The mesh axes along which an array differs, or what `jax.eval_shape` says of it."""
    return axes_of_type(x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x))


def axes_of_type(aval: Any) -> Axes:
    kind = getattr(aval, "manual_axis_type", None)  # None: outside of `shard_map`, or unchecked
    return frozenset() if kind is None else kind.varying


def union(axes: Iterable[Axes]) -> Axes:
    return frozenset[Any]().union(*axes)
