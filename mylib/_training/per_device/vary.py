"""`vary`: marks arrays as different on each device."""

from collections.abc import Hashable, Sequence
from typing import TypeVar

from ..._core.placement import cast, manual_axes

T = TypeVar("T")


def vary(tree: T, axis_names: Hashable | Sequence[Hashable], /) -> T:
    """Marks a tree's arrays as varying between the devices, inside `shard_map`.

    No value changes and nothing is communicated. Only gradients change: JAX sums the gradients of
    arrays that are the same on all devices, and doesn't sum those of varying arrays.

    **Arguments:**

    - `tree`: any PyTree. Anything else than an array, such as a Python number, is returned as it
        is.
    - `axis_names`: a mesh axis, or several in a tuple.

    **Returns:**

    The tree, with its arrays also varying over these axes. With `check_vma=False`, which has no
    such types, the tree is unchanged.

    **Raises:**

    `ValueError` if one of `axis_names` is not split over here.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)

        @mylib.filter_shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        def gradient(w, x):
            own = jax.grad(lambda w: jnp.sum(w * x))(mylib.vary(w, "data"))
            return jax.lax.pmean(own, "data")

        assert gradient(1.0 * jnp.ones(()), jnp.arange(8.0)) == 3.5
        ```
    """
    axes = axis_names if isinstance(axis_names, tuple | list) else (axis_names,)
    manual = manual_axes()
    unknown = [axis for axis in axes if axis not in manual]
    if unknown:
        raise ValueError(
            f"vary: {', '.join(map(repr, unknown))} is not among the axes split over here; "
            + (f"there are {manual}" if manual else "there are none: call it in filter_shard_map")
        )
    return cast(tree, axes)
