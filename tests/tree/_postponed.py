"""Modules whose annotations are text until somebody asks for them, as in much code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import equinox as eqx
from jax import Array
from jaxtyping import Float

if TYPE_CHECKING:
    from somewhere import Unknown


class Postponed(eqx.Module):
    weight: Float[Array, "out in"]
    bias: Float[Array, "out"] | None
    parts: list[Float[Array, "rows"]]


class WithUnknownName(eqx.Module):
    weight: Float[Array, "out in"]
    other: Unknown
    nonsense: "this is, no annotation"
