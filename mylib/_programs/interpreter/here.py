"""`run_here`: what a compiled program computes, on all of its devices."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Sharding
from jax.typing import ArrayLike

from ..._core.compat import text_with_constants
from ..._core.contexts import on_one_device
from ..._core.errors import AuditError, Fault, ReplicaError
from ..._core.tree import is_of_keys
from ..lowered import Compiled, call_with

# Copies are computed alike. Only sums that are added in another order may differ.
_SAME: dict[str, float] = {"rtol": 1e-9, "atol": 1e-12}


def run_here(compiled: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Computes in NumPy what a compiled program computes, on all of its devices. They need not be
    here: the program may be compiled for a machine of `mylib.machines`.

    What runs is the compiler's last text: optimised, divided over the devices, and scheduled. A
    fault of the compiler is in it. All floating-point numbers are float64, and roundings to other
    types are ignored, so that a right program differs from one device by about 1e-15, or 1e-8 where
    the compiler has folded constants in float32.

    Without a machine's speed: use small sizes. Kernels that a program only names, such as those of
    Pallas and cuDNN's attention, can't be computed.

    **Arguments:**

    - `compiled`: what `.lower(...).compile()` of a function of `mylib.filter_jit` or `jax.jit`
        returns.
    - `args`, `kwargs`: the arguments, whole: NumPy arrays, or `jax.Array`s wherever they are.
        Nothing is donated.

    **Returns:**

    The function's results, with whole NumPy arrays. Keys are arrays of their data.

    **Raises:**

    `mylib.errors.AuditError` with the opcode, the dtype, or the target of a custom call that it
    doesn't know how to compute. `mylib.errors.ReplicaError` if copies of a result differ.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)

        @mylib.filter_jit(in_shardings=P("data"), mesh=mesh)
        def total(x):
            return x.sum()

        shape = jax.ShapeDtypeStruct((16,), jnp.float32)
        compiled = total.lower(shape).compile()
        assert mylib.testing.run_here(compiled, np.arange(16.0)) == 120
        ```

        For 8 H100s only the mesh is another one:
        `mylib.machines.gpu("h100").mesh(data=8)`.
    """
    if isinstance(compiled, Compiled):
        with on_one_device(True):  # nothing is moved to the machine
            return call_with(compiled, _Here(compiled.compiled), args, kwargs)
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            f"run_here: a {type(compiled).__name__} is no compiled program of mylib.filter_jit or "
            "jax.jit. Give what .lower(...).compile() returns"
        )
    return _Here(compiled)(*args, **kwargs)


class _Here:
    """Stands in for a compiled program."""

    def __init__(self, compiled: jax.stages.Compiled):
        self._compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self._compiled
        leaves, structure = jtu.tree_flatten((args, kwargs))
        if structure != compiled.in_tree:
            raise TypeError(
                f"run_here: the program was compiled for other arguments: {compiled.in_tree}"
            )
        # Those that the program doesn't use have no sharding.
        shardings = jtu.tree_leaves(compiled.input_shardings, is_leaf=lambda x: x is None)
        infos = jtu.tree_leaves(compiled.in_avals)
        used = [
            (_numbers(x, info), sharding)
            for x, sharding, info in zip(leaves, shardings, infos, strict=True)
            if sharding is not None
        ]
        results = [(x.shape, x.sharding) for x in jtu.tree_leaves(compiled.out_info)]
        text = text_with_constants(compiled)
        return jtu.tree_unflatten(compiled.out_tree, run_text(text, used, results))


def run_text(
    text: str,
    arguments: Sequence[tuple[np.ndarray, Sharding]],
    results: Sequence[tuple[tuple[int, ...], Sharding]],
) -> list[np.ndarray]:
    """The whole results of a program's text. Arguments are whole, each with its sharding; results
    are given by their shapes and shardings.
    """
    # SciPy comes with it, which nothing else needs.
    from .interpreter import Interpreter

    interpreter = Interpreter(text)
    wanted = len(interpreter.entry.parameters)
    if wanted != len(arguments):
        raise AuditError(
            f"the program takes {wanted} arrays, and the function {len(arguments)}: pass arrays "
            "that it captures as arguments"
        )
    found = interpreter(*(_parts(x, sharding) for x, sharding in arguments))
    return [
        _whole(i, parts, shape, sharding)
        for i, (parts, (shape, sharding)) in enumerate(zip(found, results, strict=True))
    ]


def _numbers(x: ArrayLike, info: ShapedArray) -> np.ndarray:
    """An argument as the program takes it, before it is widened."""
    if np.shape(x) != info.shape:
        raise TypeError(
            f"run_here: an array of shape {np.shape(x)} is given for {info.str_short()}"
        )
    if is_of_keys(info):
        return np.asarray(jax.random.key_data(x))
    x = np.asarray(x)
    return x if jnp.issubdtype(info.dtype, jnp.inexact) else x.astype(info.dtype)


def _parts(x: np.ndarray, sharding: Sharding) -> np.ndarray:
    """The part of each device, in the order of the program."""
    x = x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
    return np.stack([x[index] for index in _indices(sharding, x.shape)])


def _whole(
    number: int, parts: np.ndarray, shape: tuple[int, ...], sharding: Sharding
) -> np.ndarray:
    """A result from its parts. Copies must be equal."""
    # Keys have a dimension for their data.
    whole = np.zeros((*shape, *parts.shape[1 + len(shape) :]), parts.dtype)
    indices = _indices(sharding, shape)
    for index, part in zip(indices, parts, strict=True):
        whole[index] = part
    for device, (index, part) in enumerate(zip(indices, parts, strict=True)):
        if not np.allclose(part, whole[index], equal_nan=True, **_SAME):
            reason = f"the copy of device {device} differs from another one's"
            name = f"result {number}"
            fix = "look for a sum that is missing, or for a fault of the compiler"
            raise ReplicaError([Fault(name, shape, str(sharding), reason, fix)])
    return whole


def _indices(sharding: Sharding, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    # JAX lists them in the order of the program's devices.
    return [index or () for index in sharding.devices_indices_map(shape).values()]
