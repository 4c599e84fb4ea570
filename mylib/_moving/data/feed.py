"""A thread that makes batches ahead of time.

It reads from the source and places the batches. It has no reference to the consumer's iterator, so
that this can be garbage collected, which ends the thread.
"""

import atexit
import contextvars
import copy
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax

from ..._core.placement import current_world
from ..._core.watched import waits
from ..processes import patience
from .agreement import farewell, in_words, settle, settle_end
from .arrays import copied
from .channel import Channel
from .request import BatchRequest
from .share import Share, look_through

# Seconds to wait for a thread to end. It may be reading from its source.
PATIENCE = 5.0


@dataclass
class Item:
    """A batch, with the state of the source after it; or, as the last item, the reason why there
    are no more.
    """

    batch: Any = None
    state: Any = None
    is_last: bool = False
    error: BaseException | None = None


class _BatchQueue:
    """Passes finished batches from one thread to another, at most `size` at a time."""

    def __init__(self, size: int):
        self._size = size
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._idle = 0.0
        self._idle_since: float | None = None

    def wait_for_room(self) -> bool:
        """Waits for room for another batch; False if the buffer has been closed."""
        with self._changed:
            self._idle_since = time.perf_counter()
            # With a timeout: garbage collection in this very thread may call `close` between the
            # check and the wait.
            while not self._changed.wait_for(self._has_room, timeout=1.0):
                pass
            self._idle, self._idle_since = self.idle, None
            return not self._closed

    def _has_room(self) -> bool:
        return self._closed or len(self._items) < self._size

    def put(self, item: Item) -> None:
        with self._changed:
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()

    def take(self, timeout: float) -> Item | None:
        """The next item, or None after the timeout."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items or self._closed, timeout):
                return None
            self._changed.notify_all()
            return self._items.popleft() if self._items else Item(is_last=True)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    @property
    def idle(self) -> float:
        with self._changed:
            since = self._idle_since
            return self._idle + (0.0 if since is None else time.perf_counter() - since)


@dataclass
class _Maker:
    """Makes batches from a source, one by one, in step with the other processes."""

    source: Iterator[Any]
    request: BatchRequest
    channel: Channel
    compared: set[str] = field(default_factory=set)
    has_ended: bool = False
    # Last batches are padded to the number of rows of the first one.
    rows: int = 0
    # After the end of the source, the last share without its rows, for others that go on.
    nothing: Share | None = None

    def make(self) -> Item | None:
        """The next item; None for a batch without any rows left."""
        share = self._read()
        if share is None:
            settle_end(self.request.tail, self.channel.meet)
            return Item(is_last=True)
        settled = settle(share, self.channel.meet, self.compared, self.rows, self.has_ended)
        if settled is None:
            return Item(is_last=True)
        if settled.is_empty:
            return None
        if self.request.tail == "pad":
            self.rows = self.rows or settled.rows or 0
            self.nothing = None if self.request.is_alone else share.of_rows(0, own=copied)
        # Leaves that are not placed would otherwise still belong to the source.
        return Item(settled.placed(own=True), state_of(self.source))

    def _read(self) -> Share | None:
        """This process's share of the next batch. After the end of the source it has no rows; it is
        None if it isn't needed.
        """
        if not self.has_ended:
            try:
                batch = next(self.source)
            except StopIteration:
                self.has_ended = True
            else:
                return look_through(batch, self.request)
        return self.nothing


class Feed:
    """A thread, its buffer, and the way to end it."""

    def __init__(
        self, source: Iterator[Any], request: BatchRequest, size: int, settings: "Settings"
    ):
        alone = (jax.process_index(),)
        self.buffer = _BatchQueue(size)
        self.channel = Channel(alone if request.is_alone else request.processes)
        self._process = os.getpid()
        maker = _Maker(source, request, self.channel)
        self.thread = threading.Thread(
            target=settings.run,
            args=(_fill, maker, self.buffer),
            name="mylib.data.prefetch",
            daemon=True,
        )
        self.thread.start()
        _feeds.add(self)

    @waits("batches", lambda feed: ("the loader's next batch", feed.channel.processes))
    def take(self) -> Item:
        begun, limit = time.monotonic(), patience()
        while True:
            item = self.buffer.take(timeout=1.0)
            if item is not None:
                return item
            if self.channel.waited(begun) > limit:
                raise TimeoutError(
                    f"{self.channel.missing()} did not come within {limit:g} s with the next "
                    "batch. All processes must begin their loops in the same order. If a loader "
                    "is slow, set MYLIB_EXCHANGE_TIMEOUT to more seconds"
                )

    def stop(self) -> None:
        if os.getpid() != self._process:
            # A copy in a forked process, which has no such thread.
            return
        self.buffer.close()
        self.channel.leave()
        if self.thread is not threading.current_thread():
            self.thread.join(PATIENCE)


_feeds: weakref.WeakSet[Feed] = weakref.WeakSet()


# Runs before JAX shuts down: it was imported earlier, so its handlers run later.
@atexit.register
def _stop_all() -> None:
    for feed in list(_feeds):
        feed.stop()


class Settings:
    """Copies the JAX settings of this thread to another one."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        # JAX keeps these per thread.
        self._mesh = current_world().devices
        self._wide = jax.dtypes.canonicalize_dtype("float64") == "float64"

    def run(self, fun: Callable[..., None], *args: object) -> None:
        mesh = nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)
        with jax.enable_x64(self._wide), mesh:
            self._context.run(fun, *args)


def _fill(maker: _Maker, buffer: _BatchQueue) -> None:
    try:
        while buffer.wait_for_room() and _fill_one(maker, buffer):
            pass
    finally:
        maker.channel.end()


def _fill_one(maker: _Maker, buffer: _BatchQueue) -> bool:
    """Puts the next item into the buffer, without keeping a reference. Returns whether there may be
    more.
    """
    item = _made(maker)
    if item is None:
        return True
    is_last = item.is_last
    try:
        if item.error is not None:
            maker.channel.fail(farewell(maker.channel.me, item.error))
    finally:
        buffer.put(item)
        # An error's traceback refers to this frame.
        del item
    return not is_last


def _made(maker: _Maker) -> Item | None:
    try:
        return maker.make()
    except StopIteration as error:
        # A loop would take it as its end.
        caused = RuntimeError("a batch could not be made")
        caused.__cause__ = error
        return Item(is_last=True, error=caused)
    except BaseException as error:
        return Item(is_last=True, error=error)


@dataclass(frozen=True)
class NoState:
    """The reason why there is no state to resume from."""

    reason: str


def state_of(iterator: Any) -> Any:
    if not hasattr(iterator, "get_state"):
        return NoState(stateless(iterator, "get_state"))
    try:
        # The source may go on writing to the returned object.
        return copy.deepcopy(iterator.get_state())
    except Exception as error:
        # Its own source may have no state, or the objects in it may raise anything. The state may
        # never be needed, so that is raised only when it is asked for.
        kind = type(iterator).__name__
        return NoState(f"the state of a {kind} can't be saved: {in_words(error)}")


def stateless(iterator: object, method: str) -> str:
    return (
        f"the source has no position to save: a {type(iterator).__name__} has no {method}. Give a "
        "source whose iterator has get_state and set_state, such as a grain.IterDataset"
    )
