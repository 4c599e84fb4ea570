"""Converts the leaves of a batch to arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .._errors import Fault, because
from .._tree import KeyPath, Kind, Pattern, is_placed, joined, kind_of, name_of, parts_of


def copied(x: Any) -> Any:
    """Copies NumPy arrays that JAX can hold, because their source may overwrite them. Others, such
    as arrays of strings, are static, and stay the same objects.
    """
    return x.copy() if isinstance(x, np.ndarray) and kind_of(x) is Kind.HOST else x


def as_arrays(batch: Any, named: Sequence[Pattern]) -> tuple[Any, set[int], list[Fault]]:
    """Converts arrays of other libraries, arrays of foreign byte order, and the Python numbers that
    are `named` to NumPy arrays. Returns the batch, the positions of those numbers, and the faults
    of the names.
    """
    paths_and_leaves, treedef = jtu.tree_flatten_with_path(batch)
    paths = [path for path, _ in paths_and_leaves]
    leaves = [_as_numpy(path, x) for path, x in paths_and_leaves]
    numbers: set[int] = set()
    faults: list[Fault] = []
    for pattern in named:
        matching = [i for i, x in enumerate(paths) if pattern.ends(joined(parts_of(x)))]
        if not matching:
            fix = f"its leaves are {', '.join(map(name_of, paths[:8]))}"
            reason = "no leaf of the batch has that name"
            faults.append(because(reason, fix, _request(pattern)))
        for i in matching:
            if not is_placed(leaves[i]):
                numbers.add(i)
                leaves[i] = _as_array(leaves[i], pattern, paths[i], faults)
    return jtu.tree_unflatten(treedef, leaves), numbers, faults


def _as_array(x: Any, pattern: Pattern, path: KeyPath, faults: list[Fault]) -> Any:
    # Also subclasses, such as members of an IntEnum.
    number: Any = next((kind for kind in (bool, int, float, complex) if isinstance(x, kind)), None)
    if number is None:
        reason, fix = f"it is a {type(x).__name__}, not a number", "name Python numbers"
        faults.append(Fault(name_of(path), None, _request(pattern), reason, fix))
        return x
    try:
        with np.errstate(over="raise"):
            return np.asarray(number(x), jax.dtypes.canonicalize_dtype(np.result_type(number)))
    except (OverflowError, FloatingPointError) as error:
        fix = "give a NumPy array of the dtype that you mean"
        faults.append(Fault(name_of(path), (), _request(pattern), str(error), fix))
        return x


def _request(pattern: Pattern) -> str:
    return f"arrays={pattern.text!r}"


def _as_numpy(path: KeyPath, x: Any) -> Any:
    if is_placed(x) or not hasattr(type(x), "__array__"):
        return x
    try:
        y = _natively(x) if isinstance(x, np.ndarray | np.generic) else _values(x)
    except Exception as error:
        error.add_note(f"(raised by the {type(x).__name__} {name_of(path)} of the batch)")
        raise
    # A table of strings, for example, stays as it is.
    return y if is_placed(y) else x


def _natively(x: Any) -> Any:
    # Arrays read from files may have a foreign byte order. NumPy's StringDType has none.
    if x.dtype.isnative:
        return x
    native = x.dtype.newbyteorder("=")
    return x.astype(native) if is_placed(np.empty(0, native)) else x


def _values(x: Any) -> np.ndarray:
    try:
        return np.asarray(x)
    except TypeError as error:
        # PyTorch can't convert bfloat16, or memory of other devices, to NumPy. JAX can.
        if not hasattr(x, "__dlpack__"):
            raise
        try:
            compact = x.contiguous() if hasattr(x, "contiguous") else x
            return np.asarray(jax.dlpack.from_dlpack(compact))
        except (TypeError, BufferError, RuntimeError):
            raise error from None
