"""Errors about axis names that a mapped function uses and the mesh doesn't have.

May go once JAX raises a NameError for `psum` with check_vma=True, as it does without: 0.10.2 and
0.12.0 fail an assertion instead. No public issue is known.
"""

import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from .._compat import names


@contextmanager
def unknown_named(name: str, axes: Collection[Any]) -> Iterator[None]:
    """If JAX checks types, `psum` over an unknown axis, or over one of `vmap`, raises an
    AssertionError without a message. This raises an error that names the axis instead, as other
    collectives do. `name` is the function's name, `axes` are those that it can use.
    """
    try:
        yield
    except AssertionError as error:
        asked, around = _axes_asked_for(error)
        mapped = [axis for axis in asked if axis in around]
        unknown = [axis for axis in asked if axis not in axes and axis not in around]
        if error.args or not (mapped or unknown):
            raise
        if mapped:
            raise NotImplementedError(
                f"{name} reduces over {', '.join(map(repr, mapped))}, an axis of vmap, as "
                "BatchNorm does. JAX can't do this where it checks types: pass check_vma=False to "
                "filter_shard_map, or use filter_jit, in which BatchNorm sees the whole batch"
            ) from error
        raise NameError(
            f"{name} communicates over {', '.join(map(repr, unknown))}, and there is no such axis: "
            f"those of the mesh are {', '.join(map(repr, sorted(axes, key=str)))}"
        ) from error


def _axes_asked_for(error: AssertionError) -> tuple[list[Any], list[Any]]:
    """The `axis_name` of the function of `jax.lax` that has failed, and those of each `vmap` around
    it.
    """
    around: list[Any] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        inside = frame.f_globals.get("__name__", "").startswith("jax.")
        if not inside or names.ARGUMENT_AXIS_NAME not in frame.f_locals:
            continue
        asked = frame.f_locals[names.ARGUMENT_AXIS_NAME]
        axes = list(asked) if isinstance(asked, list | tuple) else [asked]
        if hasattr(jax.lax, frame.f_code.co_name):
            return axes, around
        around += axes
    return [], []
