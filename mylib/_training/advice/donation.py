"""Warns of donated arrays that could not be reused."""

from collections.abc import Callable, Sequence
from itertools import compress

import jax

from ..._core.errors import DonationWarning, warn
from ..._core.text import some
from ..._core.tree import Arrays


def about_not_taken(name: str, donated: Arrays, find_names: Callable[[], Sequence[str]]) -> None:
    """Warns of donated arrays that are still there after the call."""
    left = [isinstance(array, jax.Array) and not array.is_deleted() for array in donated]
    if any(left):
        pairs = zip(find_names(), donated, strict=True)
        texts = [f"{path} {tuple(array.shape)}" for path, array in compress(pairs, left)]
        warn(
            f"Some donated buffers were not usable: {name} was given {some(texts)}. It does not "
            "use them, or returns nothing of the same shape, dtype and sharding that could reuse "
            "their memory.",
            DonationWarning,
        )
