"""Where the time of a loop over batches goes."""

import time
from dataclasses import dataclass

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


class Clock:
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
