"""What the checks of all clients share. A check is a function that returns a PyTree of results."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

CHECKS: dict[str, Callable[[], Any]] = {}


def check(fun: Callable[[], Any]) -> Callable[[], Any]:
    """Its docstring is what the page "Works with" says of it."""
    CHECKS[fun.__name__] = fun
    return fun


def check_each(parameters: Sequence[str]) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    def register(fun: Callable[[str], Any]) -> Callable[[str], Any]:
        for parameter in parameters:
            CHECKS[f"{fun.__name__}[{parameter}]"] = lambda p=parameter: fun(p)
        return fun

    return register


def mesh(**axes: int) -> Mesh:
    """Axes are Auto: on Explicit ones `equinox.filter_shard` places nothing."""
    axes = axes or {"data": 8}
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds)


def shard(tree: Any, *spec: Any, over: Mesh | None = None) -> Any:
    """All arrays of a tree where one sharding says."""
    return eqx.filter_shard(tree, NamedSharding(over or mesh(), P(*spec)))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def well_conditioned(seed: int, size: int) -> np.ndarray:
    return normal(seed, size, size) / size + 2 * np.eye(size, dtype=np.float32)


def positive(seed: int, size: int) -> np.ndarray:
    root = normal(seed, size, size) / np.sqrt(size)
    return root @ root.T + np.eye(size, dtype=np.float32)


def assert_close(x: Any, y: Any, tolerance: float = 1e-3) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, tolerance, tolerance), x, y)


def where(tree: Any, patterns: dict[str, P], over: Mesh) -> Any:
    """Shardings by parts of paths, all else replicated: what to do without rules. `verbs.py` puts
    `mylib.rules.by_path` in its place.
    """

    def sharding(path: Any, x: Any) -> NamedSharding:
        name = ".".join(re.findall(r"\w+", jax.tree_util.keystr(path)))
        specs = [spec for pattern, spec in patterns.items() if f".{pattern}." in f".{name}."]
        return NamedSharding(over, specs[0] if specs else P())

    return jax.tree_util.tree_map_with_path(sharding, tree)


def abstract(tree: Any, patterns: dict[str, P], over: Mesh) -> Any:
    """What Orbax is asked for: shapes with shardings. Ours comes from `mylib.filter_shard`."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        tree,
        where(tree, patterns, over),
    )


def placed(batches: Iterable[Any], over: Mesh) -> Iterator[Any]:
    """Batches over the first axis of a mesh. `verbs.py` puts `mylib.data.prefetch` in its place."""
    sharding = NamedSharding(over, P(over.axis_names[0]))
    for batch in batches:
        yield eqx.filter_shard(jax.tree.map(np.asarray, batch), sharding)
