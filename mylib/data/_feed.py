"""The thread that makes batches ahead of time.

It reads from the source and places what it has read. It knows nothing of the iterator that the
consumer has, so that this can be collected, which ends the thread.
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
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu

from .._placement import current_world
from .._processes import patience
from ._arrays import own
from ._channel import Channel
from ._request import Request
from ._settle import farewell, in_words, settle, settle_end
from ._share import Share, look_through

# How long a thread is waited for that was told to end. It may be in the midst of its source.
PATIENCE = 5.0


@dataclass
class Item:
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
        self._items: deque[Item] = deque()
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

    def put(self, item: Item) -> None:
        with self._changed:
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()

    def take(self, timeout: float) -> Item | None:
        """The next item, or None if there is none for so long."""
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

    def make(self) -> Item | None:
        """What comes next; None if it is a batch of which nothing is left."""
        share, ended = self._read()
        if share is None:
            settle_end(self._request.tail, self._channel.meet)
            return Item(is_last=True)
        settled = settle(share, self._channel.meet, self._compared, self._rows, ended)
        if settled is None:
            return Item(is_last=True)
        if settled.is_empty:
            return None
        if self._request.tail == "pad":
            self._rows = self._rows or settled.rows or 0
            self._nothing = None if self._request.is_alone else share.emptied()
        batch = settled.placed()
        if not self._request.may_alias:
            # What is not placed would be the source's own.
            batch = jtu.tree_map(own, batch)
        return Item(batch, state_of(self._source))

    def _read(self) -> tuple[Share | None, bool]:
        """This process's share of the next batch, and whether its source has ended. Then it is one
        without rows, if that is of use.
        """
        if self._has_ended:
            return self._nothing, True
        try:
            batch = next(self._source)
        except StopIteration:
            self._has_ended = True
            return self._nothing, True
        return look_through(batch, self._request), False


class Feed:
    """A thread, what it fills, and how to end it."""

    def __init__(self, source: Iterator[Any], request: Request, size: int, settings: "Settings"):
        alone = (jax.process_index(),)
        self.buffer = _Buffer(size)
        self.channel = Channel(alone if request.is_alone else request.processes)
        self._process = os.getpid()
        maker = _Maker(source, request, self.channel)
        self.thread = threading.Thread(
            target=settings.run,
            args=(_fill, maker, self.buffer, self.channel),
            name="mylib.data.prefetch",
            daemon=True,
        )
        try:
            self.thread.start()
        except RuntimeError as error:
            # There are too many.
            self.channel.fail(farewell(self.channel.me, error))
            self.channel.end()
            raise
        _feeds.add(self)

    def take(self) -> Item:
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
        if os.getpid() != self._process:
            # A copy, in a process that was forked off, where there is no thread.
            return
        self.buffer.close()
        self.channel.leave()
        if self.thread is not threading.current_thread():
            self.thread.join(PATIENCE)


_feeds: weakref.WeakSet[Feed] = weakref.WeakSet()


# Before JAX takes down what the threads use: it was imported earlier, so its turn comes later.
@atexit.register
def _stop_all() -> None:
    for feed in list(_feeds):
        feed.stop()


class Settings:
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
    try:
        while going and buffer.wait_for_room():
            going = _fill_one(maker, buffer, channel)
    finally:
        channel.end()


def _fill_one(maker: _Maker, buffer: _Buffer, channel: Channel) -> bool:
    """Puts the next item into the buffer, and keeps none of it. Whether there may be more."""
    item = _made(maker)
    if item is None:
        return True
    is_last = item.is_last
    try:
        if item.error is not None:
            channel.fail(farewell(channel.me, item.error))
    finally:
        buffer.put(item)
        # An error refers to this frame by its traceback.
        del item
    return not is_last


def _made(maker: _Maker) -> Item | None:
    try:
        return maker.make()
    except StopIteration as error:
        # To the loop it would mean the end.
        return Item(is_last=True, error=_caused_by(error))
    except BaseException as error:
        return Item(is_last=True, error=error)


def _caused_by(cause: BaseException) -> RuntimeError:
    error = RuntimeError("a batch could not be made")
    error.__cause__ = cause
    return error


@dataclass(frozen=True)
class NoState:
    """Why there is no state to go on from."""

    reason: str


def state_of(iterator: Any) -> Any:
    if not hasattr(iterator, "get_state"):
        return NoState(stateless(iterator, "get_state"))
    # Nobody may ever ask, so what is wrong is told to who does.
    try:
        state = iterator.get_state()
    except (TypeError, NotImplementedError) as error:
        # It has a source in turn that has none.
        return NoState(in_words(error))
    try:
        # It may go on writing to what it has returned.
        return copy.deepcopy(state)
    except Exception as error:
        # Whatever is in it may raise anything.
        kind = type(iterator).__name__
        return NoState(f"what get_state of a {kind} returns can't be copied: {in_words(error)}")


def stateless(iterator: Any, method: str) -> str:
    return (
        f"the source can't say where it is: a {type(iterator).__name__} has no {method}. Give one "
        "whose iterator has get_state and set_state, such as a grain.IterDataset"
    )
