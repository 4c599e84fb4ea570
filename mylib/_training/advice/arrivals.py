"""Warns of arrays that arrive elsewhere than `fully_shard` and `by_matrix` keep them."""

from collections.abc import Callable, Mapping, Sequence

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from ..._core.compat import value_under
from ..._core.errors import PlacementWarning, folded, warn
from ..._core.placement import bytes_on_each, same_axes
from ..._core.text import show_bytes, show_spec
from ..._core.tree import Arrays


def about_arrivals(
    name: str,
    arrays: Arrays,
    find_names: Callable[[], Sequence[str]],
    kept: Mapping[int, NamedSharding],
) -> None:
    """Warns of weights among the arrays that the function `name` is given that have arrived
    otherwise than they are kept. `kept` is by position.
    """
    differing: dict[str, list[int]] = {}
    held = expected = 0
    for i, sharding in kept.items():
        array = value_under(arrays[i])
        # The compiler chooses where uncommitted arrays arrive, and takes `kept`.
        if not isinstance(array, jax.Array) or isinstance(array, Tracer) or not array.committed:
            continue
        keeps, arrived = _for_comparing(sharding, array.sharding), array.sharding
        if keeps is not None and not arrived.is_equivalent_to(keeps, array.ndim):
            how = f"{_show(arrived)} instead of {_show(keeps)}"
            differing.setdefault(how, []).append(i)
            held += bytes_on_each(arrived, array.shape, array.dtype)
            expected += bytes_on_each(keeps, array.shape, array.dtype)
    if differing:
        names = find_names()
        folds = {how: folded([names[i] for i in where]) for how, where in differing.items()}
        texts = (f"{', '.join(fold)}: {how}" for how, fold in folds.items())
        cost = f"Each device holds {show_bytes(held)} of them instead of {show_bytes(expected)}"
        warn(
            f"{name} is given arrays that are not where they are kept: "
            f"{'; '.join(texts)}. {cost if held > expected else 'Each call moves them'}. Place "
            "them as `kept` before the first call, or give in_shardings and out_shardings; for a "
            "state of by_matrix a rule or None, as its init has placed it.",
            PlacementWarning,
        )


def _for_comparing(kept: NamedSharding, arrived: Sharding) -> NamedSharding | None:
    """`kept` over the devices of `arrived` and in its memory, or None if they are unknown."""
    mesh = kept.mesh
    if isinstance(mesh, AbstractMesh):
        if not isinstance(arrived, NamedSharding) or not same_axes(arrived.mesh, mesh):
            return None
        mesh = arrived.mesh
    return NamedSharding(mesh, kept.spec, memory_kind=arrived.memory_kind)


def _show(sharding: Sharding) -> str:
    return show_spec(sharding.spec if isinstance(sharding, NamedSharding) else sharding)
