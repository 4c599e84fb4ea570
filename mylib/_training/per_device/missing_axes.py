"""Errors about axis names that a mapped function uses and the mesh doesn't have.

May go once JAX raises a NameError for `psum` with check_vma=True, as it does without: 0.10.2 and
0.12.0 fail an assertion instead. No public issue is known.
"""

import traceback
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager

import jax

from ..._core.compat import names


@contextmanager
def unknown_named(name: str, axes: Collection[Hashable]) -> Iterator[None]:
    """If JAX checks types, `psum` over an unknown axis, or over one of `vmap`, raises an
    AssertionError without a message. This raises an error that names the axis instead, as other
    collectives do. `name` is the function's name, `axes` are those that it can use.
    """
    try:
        yield
    except AssertionError as error:
        unknown = [axis for axis in _axes_asked_for(error) if axis not in axes]
        if error.args or not unknown:
            raise
        raise NameError(
            f"{name} communicates over {', '.join(map(repr, unknown))}, which the mesh lacks: its "
            f"axes are {', '.join(map(repr, sorted(axes, key=str)))}. Over an axis of vmap, as "
            "BatchNorm does, JAX can't reduce where it checks types: pass check_vma=False to "
            "filter_shard_map, or use filter_jit, in which BatchNorm sees the whole batch"
        ) from error


def _axes_asked_for(error: AssertionError) -> list[Hashable]:
    """The `axis_name` of the function of `jax.lax` that has failed."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        asked = frame.f_locals.get(names.ARGUMENT_AXIS_NAME)
        if asked is not None and hasattr(jax.lax, frame.f_code.co_name):
            return list(asked) if isinstance(asked, list | tuple) else [asked]
    return []
