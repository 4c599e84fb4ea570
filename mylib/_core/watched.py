"""Where other rooms tell `mylib.watch` what this process starts and waits for.

Without a watch `record` is None, and all that they do is look at it.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Recorder(Protocol):
    """The record of a watch."""

    def started(self, call: object, memo: list[Any], arrays: Sequence[object]) -> None:
        """A program has been started, and will make these arrays. What must be found out only once
        for each trace is kept in `memo`.
        """
        ...

    def placed(self, arrays: Sequence[object]) -> None:
        """Transfers of these arrays have been started."""
        ...

    def waiting(
        self, kind: str, what: str, processes: tuple[int, ...]
    ) -> AbstractContextManager[None]:
        """This thread waits here for these processes. Every process must reach this wait the same
        number of times, unless `kind` is empty.
        """
        ...


record: Recorder | None = None


def waits(
    kind: str, about: Callable[..., tuple[str, tuple[int, ...]]]
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Marks a function that waits. `about` takes its arguments, and returns what it waits for, and
    the processes that come.
    """

    def marked(fun: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(fun)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> T:
            if record is None:
                return fun(*args, **kwargs)
            with record.waiting(kind, *about(*args, **kwargs)):
                return fun(*args, **kwargs)

        return recorded

    return marked
