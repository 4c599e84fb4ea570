"""`prefetch`: transfers the next batches while a step runs."""

import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from numbers import Integral
from typing import Any, NoReturn

from jaxtyping import PyTree

from ..._core.lines import line_of_caller
from ..._core.placement import AnyMesh, Placement
from .agreement import in_words
from .feed import PATIENCE, Feed, NoState, Settings, state_of, stateless
from .request import BatchRequest, Tail, request_of
from .timing import Clock, Timing


class Prefetch(Iterator[Any]):
    """Batches made ahead of time, returned by `mylib.data.prefetch`: an iterator, and a context
    manager that closes it. `len()` is the source's.

    !!! Example

        ```python
        mesh = mylib.make_mesh(rows=8)
        arrays = [np.full((16, 4), i, np.float32) for i in range(3)]
        with mylib.data.prefetch(arrays, P("rows"), mesh=mesh) as batches:
            assert len(batches) == 3
            total = sum(float(batch.sum()) for batch in batches)
        ```
    """

    def __init__(self, source: Iterable[Any], request: BatchRequest, buffer: int):
        self._source: Any = source
        self._request = request
        self._size = buffer
        self._settings = Settings()
        self._process = os.getpid()
        self._iterator: Any = None
        self._feed: Feed | None = None
        self._is_over = self._is_lost = False
        self._taking = threading.Lock()
        self._state: Any = None
        self._clock = Clock()

    def __iter__(self) -> "Prefetch":
        return self

    def __next__(self) -> Any:
        self._check_process()
        # Several threads may share the batches.
        with self._taking:
            return self._next()

    def _next(self) -> Any:
        if self._is_lost:
            raise RuntimeError("set_state has failed, so the position of the source is unknown")
        if self._is_over:
            raise StopIteration
        with self._clock:
            feed = self._feed or self._start()
            if self._is_over:
                # Closed meanwhile by another thread, which could not see this feed yet.
                feed.stop()
            item = feed.take()
        if item.is_last:
            self._end()
            error, item = item.error or StopIteration(), None
            try:
                raise error
            finally:
                # Its traceback refers to this frame.
                del error
        self._state = item.state
        self._clock.count(feed.buffer.idle)
        return item.batch

    def __len__(self) -> int:
        if self._source is None:
            raise TypeError("batches that have been closed have no len()")
        return len(self._source)

    def __bool__(self) -> bool:
        # Whether or not the source has a length.
        return True

    def __reduce__(self) -> NoReturn:
        raise TypeError("prefetched batches can't be copied or pickled: call prefetch again")

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread, and drops the batches that are ready. If the thread is reading from its
        source, it ends when that returns.
        """
        self._end()
        self._iterator = self._source = None

    @property
    def timing(self) -> Timing:
        """Where the loop's time has gone so far, as a `mylib.data.Timing`."""
        return self._clock.timing()

    def get_state(self) -> Any:
        """The state of the source after the loop's last batch, even if more has been read since:
        the result of `get_state` of the source's iterator, as grain's iterators have it. Each
        process has its own.
        """
        state = state_of(self._iterated()) if self._feed is None else self._state
        if isinstance(state, NoState):
            raise TypeError(state.reason)
        return state

    def set_state(self, state: object) -> None:
        """Continues after the batch at which `mylib.data.Prefetch.get_state` returned `state`.
        With several processes, all must call it.
        """
        self._check_process()
        iterator = self._iterated()
        if not hasattr(iterator, "set_state"):
            raise TypeError(stateless(iterator, "set_state"))
        self._end()
        self._is_lost = True
        if self._feed is not None and self._feed.thread.is_alive():
            raise TimeoutError(
                f"the source is still reading after {PATIENCE:g} s, so its state can't be set. "
                "Try again"
            )
        iterator.set_state(state)
        self._feed, self._is_over, self._is_lost = None, False, False
        self._clock.restart()

    def _start(self) -> Feed:
        try:
            iterator = self._iterated()
            self._state = state_of(iterator)
        except BaseException as error:
            # The thread reports it to the other processes, and raises it in order.
            iterator = _raising(error)
            self._state = NoState(f"the source could not start: {in_words(error)}")
        self._feed = Feed(iterator, self._request, self._size, self._settings)
        # When this is garbage collected; `_stop_all` does it when Python exits.
        weakref.finalize(self, self._feed.stop).atexit = False
        return self._feed

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "these batches and their thread belong to the process that this one was forked "
                "from: call mylib.data.prefetch in each process"
            )

    def _end(self) -> None:
        self._is_over = True
        if self._feed is not None:
            self._feed.stop()

    def _iterated(self) -> Any:
        # In the consumer's thread, usually the main one, because some sources start processes.
        if self._iterator is None:
            if self._source is None:
                raise ValueError("these batches have been closed")
            self._iterator = iter(self._source)
        return self._iterator


def _raising(error: BaseException) -> Iterator[Any]:
    try:
        raise error
        yield
    finally:
        # Its traceback refers to this frame.
        del error


def prefetch(
    source: Iterable[Any],
    placement: PyTree[Placement],
    /,
    mesh: AnyMesh | None = None,
    *,
    buffer: int = 2,
    tail: Tail = "error",
    may_alias: PyTree[bool | None] = None,
    check: bool | None = None,
) -> Prefetch:
    """Iterates over the batches of a loader, and makes the next ones global arrays while the step
    runs.

    A thread reads from the source, copies, and starts the transfers, as `mylib.data.to_global`
    does. It starts when the first batch is requested.

    Errors of the source are raised in order. Several processes keep in step: if one of them fails,
    ends early, or leaves its loop, the others raise an error at the same batch, and do not wait
    forever.

    **Arguments:**

    - `source`: any iterable of batches: a generator, a list, a `torch.utils.data.DataLoader`, a
        `grain` data set. With several processes each reads its share, see
        `mylib.data.reader_shard`.
    - `placement`, `mesh`, `may_alias`: as in `mylib.data.to_global`. The settings of
        `jax.set_mesh` and `jax.enable_x64` at this call are used, for the source too. Numeric NumPy
        arrays that are not placed are copied, as a source may fill the same buffer again, except
        those with `may_alias=True`. Arrays of strings, dates or objects are returned as the same
        objects: a source must make new ones for each batch.
    - `buffer`: the most batches that are ready or being made, besides the one that the loop has.
    - `tail`: as in `mylib.data.to_global`. "pad" fills up to the rows of the first batch, so
        that no step is compiled again; then every batch is a pair of the batch and its mask. If the
        sources of some processes end before others, "pad" continues until the last one, and "drop"
        ends with the first.
    - `check`: as in `mylib.data.to_global`. If False, the processes do not keep in step.

    **Returns:**

    A `mylib.data.Prefetch`, an iterator. Its thread ends, and its batches are dropped, when it
    is closed, when its `with` block ends, or when it is garbage collected after an error or a
    `break`.

    **Raises:**

    `ValueError` if `buffer` is less than 1. The iterator raises the source's own errors at the
    batch where they happened, and `mylib.PlacementError` for batches that can't be placed.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        loader = ({"x": np.full((16, 4), i, np.float32)} for i in range(3))
        with mylib.data.prefetch(loader, P("data"), mesh=mesh) as batches:
            for batch in batches:
                print(batch["x"].sharding, batches.timing)
        ```
    """
    if not isinstance(source, Iterable) and not hasattr(source, "__getitem__"):
        raise TypeError(f"prefetch: {source!r} is no iterable of batches")
    if not isinstance(buffer, Integral) or buffer < 1:
        raise ValueError(f"buffer={buffer!r}: give a number of batches, at least 1")
    request = request_of(placement, mesh, tail, may_alias, check)
    # Identifies the loop, so that processes can check that they are in the same one.
    return Prefetch(source, replace(request, loop=line_of_caller()), int(buffer))
