"""Devices and tables as text, in colour where the terminal has it."""

import itertools
import os
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..text import runs_of

# Escape codes of terminals.
BOLD, DIM, RED = "1", "2", "31"
# Light backgrounds under black text, as any theme of a terminal shows them.
_PASTELS = tuple(f"30;48;5;{code}" for code in (153, 223, 157, 218, 229, 183, 159, 216, 193, 225))
# How many runs of numbers are written.
_RUNS = 8


def number_of(device: Any) -> int:
    """The number of a device. Those of an abstract mesh are numbers themselves."""
    return device if isinstance(device, int) else device.id


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
    """Devices by platform: `cpu 0-7`."""
    of_platform: dict[str, list[Any]] = {}
    for device in devices:
        of_platform.setdefault(getattr(device, "platform", "device"), []).append(device)
    return ", ".join(f"{name} {show_numbers(of)}" for name, of in of_platform.items())


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


def width_of_stdout() -> int:
    """The columns of the terminal. If the standard output is none, as many as a text has."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if terminal else sys.maxsize


def columns(table: Sequence[Sequence[str]], paint: Paint = plain, indent: str = "") -> list[str]:
    """The lines of a table and its header, with columns of equal width. On a terminal that is too
    narrow for it, the widest columns are folded, and the last one may stand below the others.
    """
    header, *rows = _rows(table, width_of_stdout() - len(indent))
    lines = [*(paint(line, BOLD) for line in header), *itertools.chain(*rows)]
    return [indent + line for line in lines]


def fits(table: Sequence[Sequence[str]]) -> bool:
    """Whether the terminal is wide enough for a table."""
    return width_of_table(table) <= width_of_stdout()


def width_of_table(table: Sequence[Sequence[str]]) -> int:
    return _wide(_widest(table))


def _widest(table: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(width_of, cells)) for cells in zip(*table, strict=True)]


def _wide(widths: Sequence[int]) -> int:
    """The width of a table with columns of these widths."""
    return sum(widths) + 2 * (len(widths) - 1)


# A last column that needs more stands below the others, rather than to be narrower than this.
_LAST = 24


def _rows(table: Sequence[Sequence[str]], room: int) -> list[list[str]]:
    """The lines of each row."""
    wanted = _widest(table)
    widths = wanted if _wide(wanted) <= room else _narrowed(wanted, table, room)
    if len(widths) > 2 and (_wide(widths) > room or widths[-1] < _LAST < wanted[-1]):
        others = _rows([cells[:-1] for cells in table], room)
        below = [_folded(cells[-1], room - 4) for cells in table]
        return [
            [*lines, *(f"    {text}" for text in texts if text)]
            for lines, texts in zip(others, below, strict=True)
        ]
    rows: list[list[str]] = []
    for cells in table:
        folded = [_folded(cell, width) for cell, width in zip(cells, widths, strict=True)]
        lines = itertools.zip_longest(*folded, fillvalue="")
        rows.append(["  ".join(map(_padded, texts, widths)).rstrip() for texts in lines])
    return rows


def _padded(text: str, width: int) -> str:
    return text + " " * (width - width_of(text))


def _narrowed(widths: list[int], table: Sequence[Sequence[str]], room: int) -> list[int]:
    """Widths that fit the room, if any do: the widest column becomes narrower, and so on."""
    widths = list(widths)
    least = _widest([[max(_folded(cell, 0), key=width_of) for cell in cells] for cells in table])
    while _wide(widths) > room and widths != least:
        wider = [j for j, width in enumerate(widths) if width > least[j]]
        widths[max(wider, key=widths.__getitem__)] -= 1
    return widths


BEFORE_KEY = r"(?<=[\w\]}])(?=\.(?!py\b)[a-zA-Z_{]|\[')"
"""Where a path of keys may be folded, but not the name of a file."""
_FOLD = re.compile(rf"(?<= )|{BEFORE_KEY}")


def _folded(cell: str, width: int) -> list[str]:
    """A cell's lines, folded between words and before the keys of a path."""
    if width_of(cell) <= width:
        return [cell]
    lines = [""]
    for piece in _FOLD.split(cell):
        if lines[-1].strip() and width_of(lines[-1] + piece.rstrip()) > width:
            lines.append("  ")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def wrapped(lines: Iterable[str]) -> list[str]:
    """Lines of words, folded at the terminal's width."""
    room, folded = width_of_stdout(), list[str]()
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        words = textwrap.TextWrapper(
            room, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        folded += [line] if width_of(line) <= room else words.wrap(line)
    return folded
