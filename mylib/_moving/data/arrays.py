"""Converts the leaves of a batch to arrays."""

from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..._core.tree import KeyPath, Kind, is_placed, kind_of, name_of


def copied(x: Any) -> Any:
    """Copies NumPy arrays that JAX can hold, because their source may overwrite them. Others, such
    as arrays of strings, are static, and stay the same objects.
    """
    return x.copy() if isinstance(x, np.ndarray) and kind_of(x) is Kind.HOST else x


def as_arrays(batch: PyTree[Any]) -> PyTree[Any]:
    """The batch with the arrays of other libraries as NumPy arrays."""
    return jtu.tree_map_with_path(_as_numpy, batch)


def _as_numpy(path: KeyPath, leaf: Any) -> Any:
    is_ours = isinstance(leaf, np.ndarray | np.generic) or is_placed(leaf)
    if is_ours or not hasattr(type(leaf), "__array__"):
        return leaf
    try:
        numbers = _values(leaf)
    except Exception as error:
        error.add_note(f"(raised by the {type(leaf).__name__} {name_of(path)} of the batch)")
        raise
    # A table of strings, for example, stays as it is.
    return numbers if is_placed(numbers) else leaf


def _values(array: Any) -> np.ndarray:
    try:
        return np.asarray(array)
    except TypeError as error:
        # PyTorch can't convert bfloat16, or memory of other devices, to NumPy. JAX can.
        if not hasattr(array, "__dlpack__"):
            raise
        try:
            compact = array.contiguous() if hasattr(array, "contiguous") else array
            return np.asarray(jax.dlpack.from_dlpack(compact))
        except (TypeError, BufferError, RuntimeError):
            raise error from None
