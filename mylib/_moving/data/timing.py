"""Measures where the time of a loop over batches goes."""

import time
from dataclasses import dataclass

# The weight of earlier measurements at each new batch.
_MEMORY = 0.9


@dataclass(frozen=True)
class Timing:
    """Where the time of a loop over a `mylib.data.Prefetch` went, until its last batch, in
    seconds. `str` makes it a line for a progress bar.

    **Attributes:**

    - `batches`: the number of batches that the loop has had.
    - `total`: the time since it requested the first batch.
    - `waited`: the part of it spent waiting for batches; `last_waited`: waiting for the last one.
    - `idle`: how long the thread that makes batches was idle because its buffer was full.
    - `slower`: the current bottleneck, "loader" or "step".

    !!! Example

        ```python
        mesh = mylib.make_mesh(rows=8)
        with mylib.data.prefetch([np.ones(8)] * 3, P("rows"), mesh=mesh) as batches:
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
    """Measures the times of a `Timing`. As a context manager, it measures the wait for a batch."""

    def __init__(self) -> None:
        self._batches = 0
        self._begun: float | None = None
        self._asked = self._given = 0.0
        self._waited = self._last_waited = 0.0
        # The idle times of earlier threads, and of the current one.
        self._idle_before = self._idle = 0.0
        # The same with decaying weights: a first step that compiles should count little.
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
            # Zero before the first batch.
            max(0.0, self._given - (self._begun or 0.0)),
            self._waited,
            self._last_waited,
            self._idle_before + self._idle,
            "loader" if self._waited_lately > self._idle_lately else "step",
        )
