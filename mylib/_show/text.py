"""Devices and tables as text, in colour where the terminal has it."""

import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .._text import runs_of

# Escape codes of terminals.
BOLD, DIM, RED, GREEN, YELLOW, BLUE = "1", "2", "31", "32", "33", "34"
# Light backgrounds under black text, as any theme of a terminal shows them.
_PASTELS = tuple(f"30;48;5;{code}" for code in (153, 223, 157, 218, 229, 183, 159, 216, 193, 225))
# How many runs of numbers are written.
_RUNS = 8


def number_of(device: Any) -> int:
    """The number of a device. Those of an abstract mesh are numbers themselves."""
    return device if isinstance(device, int) else device.id


def platform_of(device: Any) -> str:
    return "device" if isinstance(device, int) else device.platform


def show_numbers(devices: Iterable[Any]) -> str:
    """The numbers of devices: `0-3, 6`."""
    numbers = sorted(map(number_of, devices))
    texts = [
        f"{first}-{last}" if last - first > 1 else ", ".join(map(str, range(first, last + 1)))
        for first, last in runs_of(numbers)
    ]
    if len(texts) <= _RUNS:
        return ", ".join(texts)
    return f"{', '.join(texts[:2])}, ..., {texts[-1]} ({len(numbers)} devices)"


def show_devices(devices: Iterable[Any]) -> str:
    """Devices by platform: `cpu 0-7`. Strings are listed unchanged."""
    of_platform: dict[str, list[Any]] = {}
    texts: list[str] = []
    for device in devices:
        if isinstance(device, str):
            texts.append(device)
        else:
            of_platform.setdefault(platform_of(device), []).append(device)
    texts += [f"{name} {show_numbers(of)}" for name, of in of_platform.items()]
    return ", ".join(texts)


def show_device(device: Any) -> str:
    return show_devices([device])


Paint = Callable[[str, str], str]


def plain(text: str, code: str) -> str:
    return text


def coloured(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if code else text


def paint_for_stdout() -> Paint:
    """Colours text if the standard output is a terminal that has colours, and `NO_COLOR` isn't set
    (https://no-color.org).
    """
    terminal = sys.stdout is not None and sys.stdout.isatty()
    allowed = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return coloured if terminal and allowed else plain


_ASCII = str.maketrans("┌┬┐├┼┤└┴┘│─█…", "+++++++++|-#~")


def for_stdout(lines: Iterable[str]) -> str:
    """Lines as one text, without box characters if the standard output has none."""
    text = "\n".join(lines)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return text.translate(_ASCII)
    return text


def pastel(number: int) -> str:
    return _PASTELS[number % len(_PASTELS)]


def width_of(text: str) -> int:
    """How many columns of a terminal it takes: East Asian characters take two."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


def width_of_stdout() -> int | None:
    """The columns of the terminal; None if the standard output is none."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def columns(
    table: Sequence[Sequence[str]],
    paint: Paint = plain,
    code_of: Callable[[int, int], str] = lambda row, column: "",
    heading: int = 0,
    indent: str = "",
) -> list[str]:
    """A table's lines, with columns of equal width. `code_of(row, column)` is a cell's colour. On a
    terminal that is too narrow for it, each row is a paragraph below its cell of column `heading`.
    """
    widths = [max(map(width_of, column)) for column in zip(*table, strict=True)]
    terminal = width_of_stdout()
    width = len(indent) + sum(widths) + 2 * (len(widths) - 1)
    if terminal is not None and width > terminal:
        return _paragraphs(table, paint, code_of, terminal, heading)
    lines: list[str] = []
    for i, cells in enumerate(table):
        last = max((j for j, cell in enumerate(cells) if cell), default=0)
        padded = [x + " " * (widths[j] - width_of(x)) for j, x in enumerate(cells[:last])]
        texts = enumerate([*padded, cells[last]])
        lines.append(indent + "  ".join(paint(text, code_of(i, j)) for j, text in texts))
    return lines


_WORDS: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def wrapped(lines: Iterable[str]) -> list[str]:
    """Lines of words, folded at the terminal's width."""
    terminal = width_of_stdout()
    if terminal is None:
        return list(lines)
    folded: list[str] = []
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        folded += textwrap.wrap(line, terminal, subsequent_indent=indent, **_WORDS) or [line]
    return folded


# Columns that can't be told apart without their names.
_NAMED = (
    "bytes", "per device", "before", "after", "received", "computing", "exposed", "estimated",
    "times", "in flight", "waiting", "for device", "sent", "rate", "link", "a call", "idle",
    "between calls", "awaited", "modelled", "lost",
)  # fmt: skip


def _paragraphs(
    table: Sequence[Sequence[str]],
    paint: Paint,
    code_of: Callable[[int, int], str],
    width: int,
    heading: int,
) -> list[str]:
    header, *body = table
    lines: list[str] = []
    for i, cells in enumerate(body, 1):
        lines.append(paint(cells[heading], BOLD))
        line, used = " ", 1
        for j, text in enumerate(cells):
            text = f"{header[j]} {text}" if text and header[j] in _NAMED else text
            for piece in textwrap.wrap(text, width - 2, **_WORDS) if j != heading else ():
                if used + 2 + width_of(piece) > width and used > 1:
                    lines.append(line)
                    line, used = " ", 1
                line += " " + " " * (used > 1) + paint(piece, code_of(i, j))
                used += 1 + (used > 1) + width_of(piece)
        lines.append(line)
    return lines
