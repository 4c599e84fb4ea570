"""Assertions about where arrays are, and that processes hold the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from .._agreement import checksum
from .._errors import Fault
from .._exchange import everybody, everybodys_faults, meeting
from .._leaves import Kind, name_of, split
from .._move import not_there
from .._placement import Placement, resolve_leaves
from .._replicas import check_replicas
from .._target import AnyMesh, sharding_of
from .._world import current_world


def assert_placed(
    tree: PyTree[Any], placement: PyTree[Placement], /, *, mesh: AnyMesh | None = None
) -> None:
    """Asserts that the arrays of a tree are where [`mylib.filter_shard`][] would put them, so that
    it would move nothing. An array that is replicated is not where a sharded one should be.

    **Arguments:**

    - `tree`, `placement`, `mesh`: as of [`mylib.filter_shard`][].

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))
        batch = mylib.filter_shard({"x": np.zeros((16, 4))}, P("data"), mesh=mesh)
        mylib.testing.assert_placed(batch, P("data"), mesh=mesh)
        ```
    """
    leaves = split(tree)
    targets = resolve_leaves(leaves, placement, mesh, current_world())
    wanted = [i for i, target in enumerate(targets) if target is not None]
    on_devices = [i for i in wanted if leaves.kinds[i] is Kind.DEVICE]
    away = not_there(leaves.arrays, leaves.kinds, targets, on_devices)
    wrong = [i for i in wanted if i in away or i not in on_devices]
    if wrong:
        lines: list[str] = []
        for i in wrong:
            x, target = leaves.arrays[i], targets[i]
            assert target is not None
            name = f"{name_of(leaves.paths[i])} {tuple(x.shape)}"
            lines.append(f"  {name}\n    is at: {_place(x)}\n    wanted: {sharding_of(target)}")
        raise AssertionError("not where they should be:\n" + "\n".join(lines))


def _place(x: Any) -> str:
    match x:
        case np.ndarray() | np.generic():
            return "no device: it is a NumPy array"
        case Tracer():
            return "no known place: it is traced"
        case jax.ShapeDtypeStruct():
            return "no device: it has no values"
        case _:
            return f"{x.sharding}{'' if x.committed else ' (uncommitted)'}"


def assert_same_everywhere(tree: PyTree[Any], /) -> None:
    """Asserts that all processes hold the same: structure, shapes, dtypes, and all numbers, to the
    bit; if not, it fails in all of them.

    **Arguments:**

    - `tree`: any PyTree. Arrays that only this process has are compared with the other processes'
        own, arrays over several processes by [`mylib.check_replicas`][]. Of what isn't an array,
        numbers, strings and None are compared, and the types of all else. All processes must call
        this.

    !!! Example

        ```python
        mylib.testing.assert_same_everywhere({"step": 3, "weight": jnp.ones(4)})
        ```
    """
    all_of_them = everybody()
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    facts = {name_of(path): _said_of(x) for path, x in paths}
    meet = meeting("assert_same_everywhere", all_of_them)
    faults = everybodys_faults(meet, [], {all_of_them: facts})
    if faults:
        raise AssertionError("\n".join(map(_line, faults)))
    check_replicas(tree)


def _said_of(x: Any) -> str:
    kind = split(x).kinds
    if not kind or isinstance(x, jax.ShapeDtypeStruct):
        return repr(x) if x is None or isinstance(x, int | float | complex | str) else str(type(x))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return f"{x.dtype}{list(x.shape)} at {x.sharding}"
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return f"keys of {jax.random.key_impl(x)}, {_said_of(jax.random.key_data(x))}"
    return f"{x.dtype}{list(x.shape)}, checksum {checksum([np.asarray(x)], x.dtype)}"


def _line(fault: Fault) -> str:
    return f"{fault.path}: {fault.reason}"
