"""Numbers, sizes, lists and specs as text."""

import os
import re
from collections.abc import Iterable, Sequence

# A list of more numbers is written as ranges, and ends after as many of them.
_LONG = 8
# In texts of as many characters a reader sees the difference.
_GLANCE = 80


def counted(number: int, one: str, several: str = "") -> str:
    """`1 array`, `2 arrays`, `3 processes`."""
    if number == 1:
        return f"1 {one}"
    return f"{number} {several or one + ('es' if one.endswith(('s', 'ch', 'sh')) else 's')}"


def listed(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first `most` of them: `a, b and 5 more`, or `a; b; and 5 more`."""
    left = len(texts) - most
    text = separator.join(texts[:most])
    return f"{text}{separator.rstrip(', ')} and {left} more" if left > 0 else text


def some(texts: Sequence[str], separator: str = ", ") -> str:
    return listed(texts, 8, separator)


def more(left: int, what: str) -> list[str]:
    """The last line of a list, if some are `left` out: `and 2 more arrays`."""
    return [f"and {counted(left, f'more {what}')}"] if left > 0 else []


def in_short(numbers: Sequence[int]) -> str:
    """The numbers in their order: `0, 1, 5`, many as `0..511, 2048..2559`, and very many ranges as
    the first of them `and 4000 more`.
    """
    if len(numbers) <= _LONG:
        return ", ".join(map(str, numbers))
    runs = runs_of(numbers)
    text = ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in runs[:_LONG])
    left = sum(b - a + 1 for a, b in runs[_LONG:])
    return f"{text} and {left} more" if left else text


def apart(a: str, b: str) -> str:
    """The few words in which two long texts differ."""
    a, b = (re.sub(r"\[[^][]*\]", lambda m: m[0].replace(" ", ""), text) for text in (a, b))
    first = 1 + os.path.commonprefix([a, b]).rfind(" ")
    a, b, longest = a[first:], b[first:], max(len(a), len(b))
    end = 1 + os.path.commonprefix([a[::-1], b[::-1]]).rfind(" ")
    a, b = (text[: len(text) - end].strip() or "nothing" for text in (a, b))
    is_seen = first + longest <= _GLANCE or len(a) + len(b) > _GLANCE
    return "" if is_seen else f"; the first has {a}, the second {b}"


def abridged(text: str, most: int = 4000) -> str:
    """The beginning of a text that is too long for readers, and for other processes."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """The first and the last of the numbers that follow each other."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def show_bytes(size: float) -> str:
    """A size in the largest unit that makes the number at least 1: `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.2f} GiB" if abs(size) < 1024 else f"{size / 1024:.2f} TiB"


def show_time(seconds: float | None) -> str:
    """A time in seconds or milliseconds; nothing if it is unknown."""
    size, unit = (1, "s") if (seconds or 0) >= 0.9995 else (1e3, "ms")
    return "" if seconds is None else f"{seconds * size:.3g} {unit}"


def show_spec(spec: object) -> str:
    """A `PartitionSpec` as one writes it: `P('data')`."""
    return str(spec).replace("PartitionSpec", "P").replace(",)", ")")
