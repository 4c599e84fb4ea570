"""Meshes that share no devices, and arrays on them: sending them, fetching them, knowing them."""

import functools
from contextlib import nullcontext
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ..._core.placement import AnyMesh, Placement, is_handle
from ..._core.tree import Kind, is_of_keys, split as split_tree
from ..._moving.links import (
    explained_errors,
    get_ready,
    open_links,
    transport as transport_for,
)
from ..._moving.processes import everybody, processes_at
from ..._moving.transfer import transfer as move_between

T = TypeVar("T")


def split(mesh: Mesh, axis_name: str, /) -> list[Mesh]:
    """Cuts a mesh along one of its axes into meshes that share no devices.

    **Arguments:**

    - `mesh`: the mesh.
    - `axis_name`: the axis, whose size is the number of meshes.

    **Returns:**

    A list of meshes with the other axes, and at least one axis: a mesh with a single axis is cut
    into meshes of one device, with that axis of size 1.

    **Raises:**

    `ValueError` if the mesh has no such axis.

    !!! Example

        ```python
        first, second = mylib.mpmd.split(mylib.make_mesh(stage=2, data=4), "stage")
        ```
    """
    if axis_name not in mesh.axis_names:
        axes = ", ".join(map(repr, mesh.axis_names))
        raise ValueError(f"the mesh has no axis {axis_name!r} to split along: its axes are {axes}")
    get_ready(mesh.devices.flat)
    position = mesh.axis_names.index(axis_name)
    alone = len(mesh.axis_names) == 1
    dims = [i for i in range(len(mesh.axis_names)) if alone or i != position]
    names = tuple(mesh.axis_names[i] for i in dims)
    types = tuple(mesh.axis_types[i] for i in dims)
    return [
        Mesh(np.take(mesh.devices, [i] if alone else i, position), names, axis_types=types)
        for i in range(mesh.devices.shape[position])
    ]


def transfer(tree: T, placement: PyTree[Placement], /, mesh: AnyMesh | None = None) -> T:
    """Sends the arrays of a PyTree to other devices, also to those of other processes.

    Source and target may share no, some, or all devices, may have different numbers of them, and
    may split the arrays differently. In several processes every process that has devices of either
    calls this, with the same tree: an array of other processes is a handle there, an array without
    local shards. Such handles are the results of `mylib.mpmd.jit`, of
    `mylib.filter_device_put` and of this function, where the process has no device of the
    target.

    It returns at once: what follows can be started while arrays are on their way. All processes
    make the same calls in the same order. A process receives each part of its shards once, even if
    several of its devices hold it. Can be differentiated outside of `jax.jit`: the cotangent goes
    back.

    `mylib.filter_device_put` does the same between devices of different processes. It differs
    for an array on devices of a single process that are also among the target's: it takes that for
    a value of its own in each process, this function for the same array in all of them.

    **Arguments:**

    - `tree`: any PyTree. Anything else than an array is returned as the same object.
    - `placement`, `mesh`: as in `mylib.filter_device_put`.

    **Returns:**

    A tree of the same structure; in processes without devices of an array's target that array is a
    handle.

    **Raises:**

    `mylib.PlacementError` before anything is sent, as `mylib.filter_device_put`.
    `mylib.mpmd.TransferError` if another process has not taken part in an earlier transfer
    within `MYLIB_EXCHANGE_TIMEOUT` seconds (300 by default), or has made another one in its place.
    Arrays that were to come then raise when their values are needed.

    !!! Example

        ```python
        first, second = mylib.mpmd.split(mylib.make_mesh(stage=2, data=4), "stage")
        x = mylib.filter_device_put(np.ones((8, 4)), P("data"), mesh=first)
        y = mylib.mpmd.transfer(x, P(None, "data"), mesh=second)
        ```
    """
    return move_between(tree, placement, mesh=mesh)


def fetch(tree: T, /) -> T:
    """Brings arrays to every process, as NumPy arrays: a loss, for instance.

    All processes must call this, also those that hold the arrays. It waits for the values.

    **Arguments:**

    - `tree`: any PyTree. Anything else than a `jax.Array` is returned as the same object.

    **Returns:**

    A tree of the same structure, with NumPy arrays in place of the `jax.Array`s, and keys as keys.

    **Raises:**

    `mylib.mpmd.TransferError` if a process that holds an array does not send it, because it
    made no such call, for instance.

    !!! Example

        ```python
        first, second = mylib.mpmd.split(mylib.make_mesh(stage=2, data=4), "stage")
        loss = mylib.mpmd.jit(lambda x: x.sum(), mesh=second)(np.ones(8))
        print(mylib.mpmd.fetch(loss))
        ```
    """
    leaves = split_tree(tree)
    sent = [i for i, x in enumerate(leaves.arrays) if _must_travel(leaves.kinds[i], x)]
    arrays = list(leaves.arrays)
    everywhere = move_between([arrays[i] for i in sent], _one_device_each()) if sent else []
    for i, x in zip(sent, everywhere, strict=True):
        arrays[i] = x
    with explained_errors(everybody()) if sent else nullcontext():
        return leaves.join(
            _value(x) if kind is Kind.DEVICE else x
            for x, kind in zip(arrays, leaves.kinds, strict=True)
        )


def _must_travel(kind: Kind, x: Any) -> bool:
    """A text that is the same in all processes."""
    if jax.process_count() == 1 or kind is not Kind.DEVICE or not x.committed:
        return False
    return not (x.is_fully_replicated and len(processes_at(x.sharding)) == jax.process_count())


@functools.cache
def _one_device_each() -> NamedSharding:
    first: dict[int, Any] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.array(list(first.values())), ("process",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec())


def _value(x: jax.Array) -> Any:
    local = x if x.is_fully_addressable else x.addressable_data(0)
    return jax.block_until_ready(local) if is_of_keys(local) else jax.device_get(local)


def is_remote(x: Any, /) -> bool:
    """Whether an array is a handle: one that has no shards in this process.

    **Arguments:**

    - `x`: anything. What is not a `jax.Array` is not remote, nor is a value inside of `jax.jit`.

    **Returns:**

    True or False.

    !!! Example

        ```python
        mylib.mpmd.is_remote(jnp.ones(3))  # False
        ```
    """
    return is_handle(x)


def initialize(*args: Any, address: str = "127.0.0.1", **kwargs: Any) -> None:
    """`jax.distributed.initialize`, and the address at which this process gives arrays to others.

    Transfers between processes on one host need no call: without it, they use the address below,
    and a free port. Other hosts can reach a process only if it gives another address here.

    **Arguments:**

    - `address`: the address of this host at which the other processes reach this one, such as
        `"10.0.0.7"`, or a name that stands for one; `"127.0.0.1"` accepts connections of the same
        host only. Anyone who can reach it can ask for arrays, so give one of a private network.
    - `args`, `kwargs`: those of `jax.distributed.initialize`.

    **Returns:**

    Nothing.

    **Raises:**

    As `jax.distributed.initialize`. `ValueError` if the address is not one of this host.
    `RuntimeError` after the first transfer between processes.

    !!! Example

        ```python
        # At the start of each process, on hosts of a cluster:
        # mylib.mpmd.initialize(address=socket.gethostbyname(socket.gethostname()))
        ```
    """
    open_links(address)
    jax.distributed.initialize(*args, **kwargs)


def transport() -> str:
    """How arrays travel between the processes.

    **Returns:**

    `"none"` with a single process, where `jax.device_put` moves them. `"links"` for connections of
    JAX's transfer server. `"program"` if this JAX has no such server, or if the environment
    variable `MYLIB_TRANSPORT` is `program`: then the processes of source and target run one program
    together.

    !!! Example

        ```python
        print(mylib.mpmd.transport())  # none
        ```
    """
    if jax.process_count() == 1:
        return "none"
    return transport_for(jax.devices()[0].platform)
