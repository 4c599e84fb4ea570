"""Warns of donated arrays that could not be reused, and of an old model that could be donated."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import jax
import jax.tree_util as jtu

from .._errors import DonationWarning, warn
from .._text import show_bytes, some
from .._tree import Arrays, outlined


def about_not_taken(name: str, donated: Arrays, find_names: Callable[[], Sequence[str]]) -> None:
    """Warns of donated arrays that are still there after the call."""
    left = [isinstance(x, jax.Array) and not x.is_deleted() for x in donated]
    if any(left):
        pairs = zip(find_names(), donated, strict=True)
        texts = [f"{path} {tuple(x.shape)}" for path, x in compress(pairs, left)]
        warn(
            f"Some donated buffers were not usable: {name} was given {some(texts)}. It does not "
            "use them, or returns nothing of the same shape, dtype and sharding that could reuse "
            "their memory.",
            DonationWarning,
        )


def about_spared(
    name: str, donate: str, args: Sequence[Any], result: Any, parameter: Callable[[int], str]
) -> None:
    """Warns if only the first argument is not donated, and the function returns a new version of it
    and of others: a model and an optimiser's state.
    """
    returned = result if isinstance(result, tuple) else ()
    if len(args) < 2 or len(returned) < 2:
        return
    first, *others = map(_form_of, args)
    forms = list(map(_form_of, returned))
    if jtu.treedef_is_leaf(first[0]) or first not in forms:
        return
    forms.remove(first)
    states = [parameter(i) for i, x in enumerate(others, 1) if x[1] and x in forms]
    if states:
        model = parameter(0)
        size = sum(x.nbytes for x in outlined(args[0])[0])
        warn(
            f"{name} returns a new {model}, and donate={donate!r} keeps the old one beside it: "
            f"{show_bytes(size)} in all. Write donate={(model, *states)!r}, or "
            f"donate={tuple(states)!r} if the old one is still needed.",
            DonationWarning,
        )


def _form_of(tree: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """The structure of a tree, and the shapes and dtypes of its arrays."""
    arrays, outline = outlined(tree)
    return outline.treedef, [(x.shape, x.dtype) for x in arrays]
