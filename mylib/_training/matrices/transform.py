"""What is asked of an optimiser."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
from jaxtyping import PyTree

# Weights, gradients, updates or states; or their shapes and dtypes.
Tree: TypeAlias = PyTree[jax.Array | jax.ShapeDtypeStruct]


class Transform(NamedTuple):
    """An optimiser, as Optax's: two functions."""

    init: Callable[..., Any]
    update: Callable[..., Any]
