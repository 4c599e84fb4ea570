"""`to_global`: the shares that the processes have of a batch, as arrays over all of them."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import PyTree

from .._errors import Fault, PlacementError
from .._placement import AnyMesh, Placement
from .._processes import meeting
from ._request import Tail, request_of
from ._settle import settle, settle_failure
from ._share import look_through

# What has been compared once, number by number.
_compared: set[str] = set()


def to_global(
    batch: PyTree[Any],
    placement: PyTree[Placement],
    /,
    *,
    mesh: AnyMesh | None = None,
    tail: Tail = "error",
    arrays: Sequence[str] = (),
    may_alias: bool | None = None,
    check: bool | None = None,
) -> PyTree[Any]:
    """Makes global arrays of the share of a batch that each process has.

    Arrays whose first dimension is split over processes consist of the rows of all of them: each
    gives those that [`mylib.data.reader_shard`][] names. All other arrays are given whole by every
    process, which have to agree. In a single process this is [`mylib.filter_shard`][].

    **Arguments:**

    - `batch`: any PyTree. Arrays of other libraries, such as PyTorch's, are arrays here. What is
        not an array comes back as the same object.
    - `placement`: where the global arrays go, as in [`mylib.filter_shard`][].
    - `mesh`: what a `PartitionSpec` refers to; by default the mesh of `jax.set_mesh`.
    - `tail`: what becomes of a batch whose rows can't be split evenly: "error"; "drop", which
        leaves off the last of them; or "pad", which fills up with zeros, and gives a mask with
        every batch. With the last two, processes may have different numbers of rows: all drop, or
        fill up, to the same number.
    - `arrays`: names of Python numbers that are to be arrays, on all devices; patterns as in
        [`mylib.rules.by_path`][]. Other numbers are static: a compiled step is compiled again when
        they change.
    - `may_alias`: if True, the arrays may share memory with the batch, which saves a copy. Nothing
        may be written to the batch any more.
    - `check`: processes compare what the arrays are and where they go, in every batch, on the host;
        and, of what more than one process gives, the numbers: by default in the first batch of a
        kind, always if True. If False, they compare nothing.

    **Returns:**

    The batch with global arrays. If `tail` is "pad", a pair of that and a mask: True for each row
    that was given, False for what was filled up, split as the rows are.

    **Raises:**

    [`mylib.PlacementError`][] in all processes, before anything has moved, naming every leaf that
    can't be placed, or differs where it should not. `RuntimeError`, if another process has failed;
    `TimeoutError`, if it does not come.

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))
        batch = {"x": np.ones((60, 4)), "lr": 0.1}
        batch, mask = mylib.data.to_global(
            batch, P("data"), mesh=mesh, tail="pad", arrays=["lr"]
        )
        assert batch["x"].shape == (64, 4) and mask.sum() == 60
        ```
    """
    request = request_of(placement, mesh, tail, arrays, may_alias, check)
    meet = meeting("to_global", request.processes)
    try:
        share = look_through(batch, request)
    except Exception as error:
        if not request.is_alone:
            settle_failure(error, tail, meet)
        raise
    settled = settle(share, meet, _compared)
    assert settled is not None
    if settled.is_empty:
        reason, mend = "all rows are left off", "leave out such a batch, or write tail='pad'"
        raise PlacementError([Fault("", None, "tail='drop'", reason, mend)])
    return settled.placed()
