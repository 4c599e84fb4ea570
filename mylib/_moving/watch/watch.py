"""`watch`: reports why a job hangs."""

from collections.abc import Iterator
from contextlib import contextmanager

from ..._core import watched as _watched
from ..._core.errors import in_words
from ..processes import everybody
from .lookout import Lookout
from .record import Record

# How many watches this process has entered: the same in all processes.
_entered = 0


class Watching:
    """A watch, returned by `mylib.watch`: a context manager.

    !!! Example

        ```python
        with mylib.watch(stuck_after=120) as watch:
            x = jnp.zeros(8) + 1
            with watch.paused():  # this may need longer
                print(x)
        ```
    """

    def __init__(self, limit: float, end: bool):
        self._limit = limit
        self._end = end
        self._record = Record()
        self._lookout: Lookout | None = None

    def __enter__(self) -> "Watching":
        global _entered
        if _watched.record is not None:
            raise RuntimeError(
                "another mylib.watch is active in this process: one watches all that it does. "
                "Leave it first, or use that one"
            )
        _entered += 1
        self._everybody = everybody()
        self._lookout = Lookout(self._record, self._limit, self._end, _entered)
        _watched.record = self._record
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _watched.record = None
        lookout, self._lookout = self._lookout, None
        if lookout is not None:
            lookout.stop("" if error is None else in_words(error))

    def step(self) -> None:
        """Counts a step of a loop whose programs are not known to mylib, such as those of
        `jax.jit`. All processes must count the same steps.
        """
        self._record.step(self._everybody)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surrounds what may take longer than `stuck_after`: the first step, an evaluation, a
        checkpoint. Other processes may wait for this one meanwhile.
        """
        if self._lookout is None:
            raise RuntimeError("this watch is not active: use it as a context manager")
        progress = self._lookout.progress
        progress.pauses += 1
        try:
            yield
        finally:
            progress.pauses -= 1


def watch(*, stuck_after: float, end: bool = False) -> Watching:
    """Watches a program, and reports why if it hangs.

    It is a context manager. Inside it each process remembers the last programs of
    `mylib.filter_jit`, `mylib.filter_shard_map` and `mylib.mpmd.jit`, placements and
    comparisons that it has started, and asks now and then which of them have ended. Nothing waits
    for devices, and no program is changed.

    If a process makes no progress for `stuck_after` seconds, and waits for no other one that does,
    one process logs a report (`logging`, "mylib", as an error): who has not made which call, who
    calls another program than the others, whose devices have not ended what, and the lines where
    they are. Compiling is progress.

    **Arguments:**

    - `stuck_after`: seconds: several times as long as the longest step.
    - `end`: whether the report ends all processes at once, with the status 87, so that a launcher
        can start the job again. What hangs can't run any `finally`. If False, the report is logged,
        and the program goes on waiting.

    **Returns:**

    A `mylib.Watching`, with the methods `step` and `paused`.

    **Raises:**

    `ValueError` if `stuck_after` isn't positive. Entering it raises `RuntimeError` if another watch
    is active.

    !!! Example

        ```python
        step = mylib.filter_jit(lambda x: x + 1)
        x = jnp.zeros(8)
        with mylib.watch(stuck_after=120, end=True) as watch:
            for _ in range(10):
                x = step(x)
            with watch.paused():
                print(x)  # or write a checkpoint
        ```
    """
    if not stuck_after > 0:
        raise ValueError(f"stuck_after={stuck_after!r}: give a number of seconds, more than 0")
    return Watching(float(stuck_after), end)
