"""`prefetch`: batches that are on their way while the step before them runs.

A thread reads from the source and places what it has read. It knows nothing of the iterator that
the consumer has, so that this can be collected, which ends the thread.
"""

import atexit
import contextvars
import copy
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jaxtyping import PyTree

from .._exchange import Processes, patience
from .._placement import Placement
from .._target import AnyMesh
from .._world import current_world
from ._channel import Channel
from ._settle import settle, settle_end, settle_failure
from ._share import Request, Share, Tail, look_through, request_of

# How long a thread is waited for that was told to end. It may be in the midst of its source.
_PATIENCE = 5.0
# How much of what was measured counts for the next batch.
_MEMORY = 0.9


@dataclass(frozen=True)
class Timing:
    """Where the time of a loop over a [`mylib.data.Prefetch`][] went, until it had its last batch,
    in seconds. As text, it is a line for a progress bar.

    **Attributes:**

    - `batches`: how many the loop has had.
    - `total`: since it asked for the first.
    - `waited`: how long of that it waited for batches; `last_waited`: for the last of them.
    - `idle`: how long the thread that makes batches had nothing to do, its buffer being full.
    - `slower`: which of the two the other has waited for lately, "loader" or "step".

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))
        with mylib.data.prefetch([np.ones(8)] * 3, P("data"), mesh=mesh) as batches:
            for batch in batches:
                print(batches.timing)
        ```
    """

    batches: int
    total: float
    waited: float
    last_waited: float
    idle: float
    slower: str

    def __str__(self) -> str:
        share = self.waited / self.total if self.total else 0.0
        return (
            f"batch {self.batches}: waited {self.waited:.2f} of {self.total:.2f} s for data "
            f"({share:.1%}), the {self.slower} is slower"
        )


@dataclass
class _Item:
    """What comes next: a batch, and where the source is after it; or, as the last item, why there
    are no more.
    """

    batch: Any = None
    state: Any = None
    is_last: bool = False
    error: BaseException | None = None


class _Buffer:
    """Batches that are ready, no more than `size`, between one thread and another."""

    def __init__(self, size: int):
        self._size = size
        self._items: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._idle = 0.0
        self._idle_since: float | None = None

    def wait_for_room(self) -> bool:
        """Whether another batch is wanted; waits until that is known."""
        with self._changed:
            self._idle_since = time.perf_counter()
            # With a limit: `close` may be called by the collection of garbage in this very thread,
            # after a look and before waiting.
            while not self._changed.wait_for(self._has_room, timeout=1.0):
                pass
            self._idle, self._idle_since = self._idle_now(), None
            return not self._closed

    def _has_room(self) -> bool:
        return self._closed or len(self._items) < self._size

    def put(self, item: _Item) -> None:
        with self._changed:
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()

    def take(self, timeout: float) -> _Item | None:
        """The next item, or None if there is none for so long."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items or self._closed, timeout):
                return None
            self._changed.notify_all()
            return self._items.popleft() if self._items else _Item(is_last=True)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    @property
    def idle(self) -> float:
        with self._changed:
            return self._idle_now()

    def _idle_now(self) -> float:
        since = self._idle_since
        return self._idle + (0.0 if since is None else time.perf_counter() - since)


class _Maker:
    """Makes batches of what a source gives, one by one, in step with the other processes."""

    def __init__(self, source: Iterator[Any], request: Request, channel: Channel):
        self._source = source
        self._request = request
        self._channel = channel
        self._compared: set[str] = set()
        self._has_ended = False
        # By what the last batches are filled up: the rows of the first one, and, where the source
        # has ended, all that had no rows in the last.
        self._rows = 0
        self._nothing: Share | None = None

    def make(self) -> _Item | None:
        """What comes next; None if it is a batch of which nothing is left."""
        share, ended = self._read()
        if share is None:
            settle_end(self._request.tail, self._channel.meet)
            return _Item(is_last=True)
        settled = settle(share, self._channel.meet, self._compared, self._rows, ended)
        if settled is None:
            return _Item(is_last=True)
        if settled.is_empty:
            return None
        if self._request.tail == "pad":
            self._rows = self._rows or settled.rows or 0
            self._nothing = share.with_rows(0)
        return _Item(settled.placed(), _state_of(self._source))

    def _read(self) -> tuple[Share | None, bool]:
        """This process's share of the next batch, and whether its source has ended. Then it is one
        without rows, if that is of use.
        """
        if self._has_ended:
            return self._nothing, True
        try:
            try:
                batch = next(self._source)
            except StopIteration:
                self._has_ended = True
                return self._nothing, True
            return look_through(batch, self._request), False
        except BaseException as error:
            settle_failure(error, self._request.tail, self._channel.meet)
            raise


class _Feed:
    """A thread, what it fills, and how to end it."""

    def __init__(self, source: Iterator[Any], request: Request, size: int, settings: "_Settings"):
        alone = (jax.process_index(),)
        self.buffer = _Buffer(size)
        self.channel = Channel(alone if request.is_alone else request.processes)
        maker = _Maker(source, request, self.channel)
        self.thread = threading.Thread(
            target=settings.run,
            args=(_fill, maker, self.buffer, self.channel),
            name="mylib.data.prefetch",
            daemon=True,
        )
        self.thread.start()
        _feeds.add(self)

    def take(self) -> _Item:
        begun, limit = time.monotonic(), patience()
        while True:
            item = self.buffer.take(timeout=1.0)
            if item is not None:
                return item
            if self.channel.waited(begun) > limit:
                raise TimeoutError(
                    f"{self.channel.missing()} did not come within {limit:g} s with the next "
                    "batch. All processes have to begin their loops in the same order. If a loader "
                    "is slow, set MYLIB_EXCHANGE_TIMEOUT to more seconds"
                )

    def stop(self) -> None:
        self.buffer.close()
        self.channel.leave()
        if self.thread is not threading.current_thread():
            self.thread.join(_PATIENCE)


_feeds: weakref.WeakSet[_Feed] = weakref.WeakSet()
# How often a loop has begun, by its line and its processes, which so know if they mean the same.
_begun: Counter[tuple[str, Processes]] = Counter()


# Before JAX takes down what the threads use: it was imported earlier, so its turn comes later.
@atexit.register
def _stop_all() -> None:
    for feed in list(_feeds):
        feed.stop()


class _Settings:
    """Those of the thread that this is made in, for another one."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        # JAX keeps these for each thread.
        self._mesh = current_world().devices
        self._wide = jax.dtypes.canonicalize_dtype("float64") == "float64"

    def run(self, fun: Callable[..., None], *args: Any) -> None:
        mesh = nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)
        with jax.enable_x64(self._wide), mesh:
            self._context.run(fun, *args)


def _fill(maker: _Maker, buffer: _Buffer, channel: Channel) -> None:
    going = True
    while going and buffer.wait_for_room():
        going = _make_one(maker, buffer)
    channel.end()


def _make_one(maker: _Maker, buffer: _Buffer) -> bool:
    """Puts the next item into the buffer, and keeps none of it. Whether there may be more."""
    try:
        item = maker.make()
    except StopIteration as error:
        # To the loop it would mean the end.
        item = _Item(is_last=True, error=RuntimeError("a batch could not be made"))
        assert item.error is not None
        item.error.__cause__ = error
    except BaseException as error:
        item = _Item(is_last=True, error=error)
    if item is None:
        return True
    buffer.put(item)
    return not item.is_last


@dataclass(frozen=True)
class _NoState:
    """Why there is no state to go on from."""

    reason: str


def _state_of(iterator: Any) -> Any:
    if not hasattr(iterator, "get_state"):
        return _NoState(_stateless(iterator, "get_state"))
    try:
        state = iterator.get_state()
    except (TypeError, NotImplementedError) as error:
        # It has a source in turn that has none. Nobody may ever ask.
        return _NoState(str(error))
    # It may go on writing to what it has returned.
    return copy.deepcopy(state)


class Prefetch(Iterator[Any]):
    """Batches that are made ahead of time, as [`mylib.data.prefetch`][] returns them: an iterator,
    and a context that closes it. It has the length of its source.
    """

    def __init__(self, source: Iterable[Any], request: Request, buffer: int, site: str):
        self._source: Any = source
        self._site = site
        self._request = request
        self._size = buffer
        self._settings = _Settings()
        self._iterator: Any = None
        self._feed: _Feed | None = None
        self._is_over = self._is_lost = self._is_closed = False
        self._taking = threading.Lock()
        self._state: Any = None
        self._clock = _Clock()

    def __iter__(self) -> "Prefetch":
        return self

    def __next__(self) -> Any:
        # Several threads may share the batches.
        with self._taking:
            return self._next()

    def _next(self) -> Any:
        if self._is_lost:
            raise RuntimeError("set_state has failed, and nobody knows where the source is")
        if self._is_over:
            raise StopIteration
        with self._clock:
            feed = self._feed or self._start()
            if self._is_over:
                # Closed meanwhile by who could not see the thread yet.
                feed.stop()
            item = feed.take()
        if item.is_last:
            self._end()
            # Not kept, as it refers to this frame by its traceback.
            error, item = item.error or StopIteration(), None
            raise error
        self._state = item.state
        self._clock.count(feed.buffer.idle)
        return item.batch

    def __len__(self) -> int:
        if self._is_closed:
            raise TypeError("batches that have been closed have no len()")
        return len(self._source)

    def __bool__(self) -> bool:
        # Whether or not the source has a length.
        return True

    def __reduce__(self) -> Any:
        raise TypeError("batches that are on their way can't be copied: make them anew")

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread, and lets go of the batches that are ready. A thread in the midst of its
        source ends when that returns.
        """
        self._end()
        self._is_closed = True
        self._iterator = self._source = None

    @property
    def timing(self) -> Timing:
        """Where the time of the loop has gone so far, a [`mylib.data.Timing`][]."""
        return self._clock.timing()

    def get_state(self) -> Any:
        """Where the source was after the batch that the loop had last, whatever has been read
        since: what `get_state` of the source's iterator, as those of grain have it, said then. Each
        process has its own.
        """
        state = _state_of(self._iterated()) if self._feed is None else self._state
        if isinstance(state, _NoState):
            raise TypeError(state.reason)
        return state

    def set_state(self, state: Any) -> None:
        """Goes on after the batch at which [`mylib.data.Prefetch.get_state`][] has returned this
        state. In several processes, all of them have to.
        """
        iterator = self._iterated()
        if not hasattr(iterator, "set_state"):
            raise TypeError(_stateless(iterator, "set_state"))
        self._end()
        self._is_lost = True
        if self._feed is not None and self._feed.thread.is_alive():
            raise TimeoutError(
                f"the source has not come back within {_PATIENCE:g} s: it can't be told to go on "
                "from elsewhere. Try again"
            )
        iterator.set_state(state)
        self._feed, self._is_over, self._is_lost = None, False, False
        self._clock.restart()

    def _start(self) -> _Feed:
        iterator = self._iterated()
        self._state = _state_of(iterator)
        loop = self._site, self._request.processes
        _begun[loop] += 1
        request = replace(self._request, loop=f"{self._site}, begun {_begun[loop]} times")
        self._feed = _Feed(iterator, request, self._size, self._settings)
        # When this is collected; for the end of Python there is `_stop_all`.
        weakref.finalize(self, self._feed.stop).atexit = False
        return self._feed

    def _end(self) -> None:
        self._is_over = True
        if self._feed is not None:
            self._feed.stop()

    def _iterated(self) -> Any:
        # In the consumer's thread, which mostly is the main one: some sources start processes.
        if self._iterator is None:
            if self._is_closed:
                raise ValueError("these batches have been closed")
            self._iterator = iter(self._source)
        return self._iterator


def _stateless(iterator: Any, method: str) -> str:
    return (
        f"the source can't say where it is: a {type(iterator).__name__} has no {method}. Give one "
        "whose iterator has get_state and set_state, such as a grain.IterDataset"
    )


class _Clock:
    """What is measured for a `Timing`. As a context, it measures how long a batch is waited for."""

    def __init__(self) -> None:
        self._batches = 0
        self._begun: float | None = None
        self._asked = self._given = 0.0
        self._waited = self._last_waited = 0.0
        # Of threads that have ended, and of the one that makes batches now.
        self._idle_before = self._idle = 0.0
        # The same, but that what was long ago counts less: a first step that compiles says little.
        self._waited_lately = self._idle_lately = 0.0

    def __enter__(self) -> None:
        self._asked = time.perf_counter()
        self._begun = self._begun or self._asked

    def __exit__(self, *error: object) -> None:
        self._given = time.perf_counter()
        self._waited += self._given - self._asked

    def restart(self) -> None:
        self._idle_before, self._idle = self._idle_before + self._idle, 0.0

    def count(self, idle: float) -> None:
        self._batches += 1
        self._last_waited = self._given - self._asked
        self._waited_lately = _MEMORY * self._waited_lately + self._last_waited
        self._idle_lately = _MEMORY * self._idle_lately + idle - self._idle
        self._idle = idle

    def timing(self) -> Timing:
        return Timing(
            self._batches,
            # Not before the first batch has come.
            max(0.0, self._given - (self._begun or 0.0)),
            self._waited,
            self._last_waited,
            self._idle_before + self._idle,
            "loader" if self._waited_lately > self._idle_lately else "step",
        )


def prefetch(
    source: Iterable[Any],
    placement: PyTree[Placement],
    /,
    *,
    mesh: AnyMesh | None = None,
    buffer: int = 2,
    tail: Tail = "error",
    arrays: Sequence[str] = (),
    may_alias: bool | None = None,
    check: bool | None = None,
) -> Prefetch:
    """Goes over the batches of a loader, and makes the next ones global arrays while the step runs.

    A thread reads from the source, copies, and starts the transfers, as
    [`mylib.data.to_global`][] does. It begins when the first batch is asked for.

    What goes wrong in the source is raised at its place in the order. Several processes keep in
    step: if one of them fails, ends early, or leaves its loop, the others get an error there, and
    do not wait for ever.

    **Arguments:**

    - `source`: any iterable of batches: a generator, a list, a `torch.utils.data.DataLoader`, a
        `grain` data set; in several processes of the share of each, see
        [`mylib.data.reader_shard`][].
    - `placement`, `mesh`, `arrays`, `may_alias`: as in [`mylib.data.to_global`][]. The mesh of
        `jax.set_mesh` and `jax.enable_x64` are, for the source too, those of this call. With
        `may_alias=True` a source may not fill the same buffer again.
    - `buffer`: how many batches there may be beyond the one that the loop has, ready or being made.
    - `tail`: as in [`mylib.data.to_global`][]. "pad" fills up to the rows of the first batch, so
        that no step is compiled again; then every batch is a pair of the batch and its mask. "pad"
        and "drop" also say what is to be done when the sources of some processes end before
        others: fill up until the last, or end with the first.
    - `check`: as in [`mylib.data.to_global`][]. If False, the processes do not keep in step.

    **Returns:**

    A [`mylib.data.Prefetch`][], an iterator. Closing it, leaving its `with` block, or, after an
    error or a `break`, letting go of it, ends its thread and lets go of what was ready.

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))
        loader = ({"x": np.full((16, 4), i, np.float32)} for i in range(3))
        with mylib.data.prefetch(loader, P("data"), mesh=mesh) as batches:
            for batch in batches:
                print(batch["x"].sharding, batches.timing)
        ```
    """
    if buffer < 1:
        raise ValueError(f"buffer={buffer}: one batch at least has to be on its way")
    request = request_of(placement, mesh, tail, arrays, may_alias, check)
    caller = traceback.extract_stack(limit=2)[0]
    return Prefetch(source, request, buffer, f"{Path(caller.filename).name}:{caller.lineno}")
