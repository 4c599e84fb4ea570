"""`to_global`: makes arrays over all processes from each process's share of a batch."""

from typing import Any

from jaxtyping import PyTree

from ..._core.errors import PlacementError, because
from ..._core.placement import AnyMesh, Placement
from ..processes import CommonCall, meeting
from .agreement import settle, settle_failure
from .request import Tail, request_of
from .share import look_through

# The kinds of batches whose numbers have been compared once.
_compared: set[str] = set()


def to_global(
    batch: PyTree[Any],
    placement: PyTree[Placement],
    /,
    mesh: AnyMesh | None = None,
    *,
    tail: Tail = "error",
    may_alias: PyTree[bool | None] = None,
    check: bool | None = None,
) -> PyTree[Any]:
    """Makes global arrays from each process's share of a batch.

    Arrays whose first dimension is split over processes are put together from the rows of all
    processes: each passes the rows that `mylib.data.reader_shard` names. All other arrays must
    be passed whole, and equal, by every process. In a single process this is
    `mylib.filter_shard`.

    **Arguments:**

    - `batch`: any PyTree. Arrays of other libraries, such as PyTorch's, are arrays here. Anything
        else is returned as the same object.
    - `placement`: where the global arrays go, as in `mylib.filter_shard`.
    - `mesh`: the mesh for a `PartitionSpec`; by default the mesh of `jax.set_mesh`.
    - `tail`: what to do with a batch whose rows can't be split evenly: "error"; "drop" the last
        rows; or "pad" with zeros, and return a mask with every batch. With the last two, processes
        may have different numbers of rows: all drop rows, or pad, to the same number.
    - `may_alias`: if True, the arrays may share memory with the batch, which saves a copy. You must
        not write to the batch any more. It may be a PyTree prefix of the batch.
    - `check`: processes compare shapes, dtypes and targets of every batch, on the host. They also
        compare the numbers that more than one process passes: by default in the first batch of a
        kind, always if True. If False, they compare nothing.

    **Returns:**

    The batch with global arrays. If `tail` is "pad", a pair of the batch and a mask, split as the
    rows are: True for each given row, False for padding.

    **Raises:**

    `mylib.PlacementError` in all processes, before anything has moved, naming every leaf that
    can't be placed, or that should be equal in several processes and isn't. `RuntimeError` if
    another process has failed; `TimeoutError` if it does not take part.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        batch = {"x": np.ones((60, 4)), "name": "train"}
        batch, mask = mylib.data.to_global(batch, P("data"), mesh=mesh, tail="pad")
        assert batch["x"].shape == (64, 4) and mask.sum() == 60
        ```
    """
    request = request_of(placement, mesh, tail, may_alias, check)
    meet = meeting("to_global", request.processes)
    with CommonCall(lambda: () if request.is_alone else request.processes):
        try:
            share = look_through(batch, request)
        except Exception as error:
            if not request.is_alone:
                settle_failure(error, tail, meet)
            raise
        settled = settle(share, meet, _compared)
    assert settled is not None
    if settled.is_empty:
        reason, fix = "all rows are dropped", "leave out such a batch, or write tail='pad'"
        raise PlacementError([because(reason, fix, "tail='drop'")])
    return settled.placed()
