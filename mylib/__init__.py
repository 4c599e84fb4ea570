"""Puts the arrays of any PyTree where they belong, and keeps them there.

Examples in docstrings take these names for granted:

    import equinox as eqx, jax, jax.numpy as jnp, mylib, numpy as np, optax
    from jax import Array
    from jax.sharding import NamedSharding, PartitionSpec as P
    from jaxtyping import Float
"""

import sys as _sys
from importlib import import_module as _import_module

from ._core.stubs import names_listed_in as _names_listed_in, on_first_use as _on_first_use

__version__ = "0.1.0"

# The public names stand in `__init__.pyi`, each with its module, which is imported when the name is
# first used: https://scientific-python.org/specs/spec-0001/
_MODULES = _names_listed_in(f"{__file__.rpartition('.')[0]}.pyi")
__all__ = sorted(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__ = _on_first_use(globals(), _MODULES)
# They must be made before JAX compiles anything, and JAX itself is not imported here.
if "jax" in _sys.modules:
    _import_module("._core.contexts", __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
