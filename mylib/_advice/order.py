"""Warns of a model that is given where a batch is placed."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
from jax.sharding import NamedSharding, PartitionSpec

from .._errors import WrongArgumentWarning, warn
from .._text import show_spec

# Modules may be split like batches, such as those of an ensemble, so only names tell.
_BATCHES = ("batch", "x", "y", "inputs", "targets", "tokens", "labels", "images", "data")


def about_order(name: str, placement: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Warns if a parameter with the name of a batch, and the `placement` of one, is given what can
    be called, so that each of its arrays would be split.
    """
    for parameter in _BATCHES:
        asked, x = placement.get(parameter), arguments.get(parameter)
        spec = asked.spec if isinstance(asked, NamedSharding) else asked
        if isinstance(spec, PartitionSpec) and isinstance(x, eqx.Module) and callable(x):
            given = ", ".join(f"{key}: {type(value).__name__}" for key, value in arguments.items())
            warn(
                f"{name} is given a {type(x).__name__} as {parameter}, and in_shardings splits all "
                f"of its arrays as {show_spec(spec)}. Are the arguments in another order than the "
                f"parameters? It was given ({given}).",
                WrongArgumentWarning,
            )
