"""Spans of time: how much of them there is, and how much within others."""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

# A start and an end.
Span = tuple[float, float]


class Spans:
    """The union of some spans."""

    def __init__(self, spans: Iterable[Span]):
        self._starts: list[float] = []
        self._ends: list[float] = []
        for start, end in sorted(spans):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)
        lengths = (end - start for start, end in zip(self._starts, self._ends, strict=True))
        self._before = [0.0, *accumulate(lengths)]

    def _until(self, time: float) -> float:
        """How much of it is before this time."""
        i = bisect_right(self._starts, time)
        return self._before[i] - max(0.0, self._ends[i - 1] - time) if i else 0.0

    def outside(self, start: float, end: float) -> float:
        """How much of another span is outside of it."""
        return max(0.0, end - start) - (self._until(max(start, end)) - self._until(start))
