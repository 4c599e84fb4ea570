"""Programs that were compiled before, read from files."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .jit import Jitted

if TYPE_CHECKING:
    from .lowered import Compiled


def load_compiled(
    path: str | os.PathLike[str],
    fun: Callable[..., Any],
    /,
    *args: Any,
    check: bool = True,
    **kwargs: Any,
) -> "Compiled":
    """Loads a program that `save` of a compiled function has written, without compiling it.

    The function is traced and lowered, which takes seconds where compiling takes minutes. That
    shows whether the file is for this function, these arguments and this machine.

    **Arguments:**

    - `path`: the file.
    - `fun`: the function, as [`mylib.filter_jit`][] has made it.
    - `args`, `kwargs`: what it will be called with: arrays, or `jax.ShapeDtypeStruct`s with the
        shardings that the arrays will have.
    - `check`: whether the file must be of the function's present code. With False only the arrays
        that it takes and returns, the versions and the devices are compared.

    **Returns:**

    The compiled function, as from `fun.lower(...).compile()`.

    **Raises:**

    [`mylib.SavedProgramError`][], before anything is loaded, if the file is damaged or something
    else, or its program is for another machine, other versions, arguments or code. All differences
    are listed.

    !!! Example

        ```python
        import pathlib, tempfile

        @mylib.filter_jit
        def double(x):
            return 2 * x

        x = jax.ShapeDtypeStruct((8,), jnp.float32)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "double.mylib")
            double.lower(x).compile().save(path)
            compiled = mylib.load_compiled(path, double, x)
        print(compiled(jnp.ones(8)))
        ```
    """
    if not isinstance(fun, Jitted):
        raise TypeError(
            f"load_compiled is given {fun!r}, not a function of mylib.filter_jit: pass the one "
            "whose program was saved"
        )
    return fun.lower(*args, **kwargs).load(path, check)
