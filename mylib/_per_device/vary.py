"""`vary`: says of arrays that they differ between the devices."""

from typing import Any, TypeVar

from .._placement import cast, manual_axes

T = TypeVar("T")


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
