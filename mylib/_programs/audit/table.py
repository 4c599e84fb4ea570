"""The table of a report: equal collectives together, and folded where a terminal is narrow."""

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..._core.errors import folded
from ..._core.show import columns, united, width_of_stdout, width_of_table, wrapped
from ..._core.text import listed, show_bytes
from .attribution import UNKNOWN
from .entries import Collective

COLUMNS = ("times", "collective", "over", "bytes", "sent", "who", "pass", "what", "line")
_NARROW = ("times", "bytes", "sent", "what", "line")
_INDENT = "  "
_SHOWN = 3
_LEAST = 16  # the least characters of a line for names


class TableRow(NamedTuple):
    """Equal collectives, as text."""

    times: str
    kind: str
    over: str
    bytes: str
    dtype: str
    sent: str
    who: str
    notes: str
    source: str
    loop: str
    passes: str = ""
    what: str = ""

    def cells(self) -> tuple[str, ...]:
        """A cell for each of `COLUMNS`."""
        what = f"{self.what} ({self.notes})" if self.notes else self.what
        line = f"{self.source} {self.loop}".rstrip()
        size = f"{self.bytes} {self.dtype}"
        return self.times, self.kind, self.over, size, self.sent, self.who, self.passes, what, line

    def heading(self) -> str:
        """What is neither a number nor a name."""
        what = f"{self.kind} of {self.dtype} over {self.over}"
        return ", ".join(filter(None, (what, self.who, self.passes, self.notes, self.loop)))


def alike(collectives: Iterable[Collective]) -> list[list[Collective]]:
    """Groups collectives that differ only in their pass and in the names of what they move, and
    sorts them by kind and axes.
    """
    groups: dict[object, list[Collective]] = {}
    for c in collectives:
        names = bool(c.arrays), bool(c.gradients) or (c.primitive, c.scope)
        groups.setdefault((_without_names(c), names), []).append(c)
    return sorted(groups.values(), key=lambda group: (group[0].kind, group[0].axes or ()))


def _without_names(c: Collective) -> TableRow:
    """What equal collectives have in common; `times` only if they are unknown."""
    notes = {c.spelling: c.spelling, "overlapped": c.overlapped, "in a branch": c.sometimes}
    return TableRow(
        times="?" if c.times is None else "",
        kind=c.kind,
        over=over(c),
        bytes=show_bytes(c.bytes),
        dtype=c.dtype,
        sent=show_bytes(c.wire_bytes),
        who={True: "inserted", False: "written", None: "?"}[c.inserted],
        notes=", ".join(note for note, holds in notes.items() if holds),
        source=c.source,
        loop=f"in the loop of {c.loops[-1]}" if c.loops else "",
    )


def row_of(group: Sequence[Collective]) -> TableRow:
    row = _without_names(group[0])
    times = row.times or str(sum(c.times or 0 for c in group))
    passes = dict.fromkeys("?" if c.phase == UNKNOWN else c.phase for c in group)
    times = ("≤ " if group[0].sometimes else "") + times
    return row._replace(times=times, passes=", ".join(passes), what=what_of(group))


def over(c: Collective) -> str:
    return "?" if c.axes is None else ", ".join(c.axes)


def what_of(group: Sequence[Collective]) -> str:
    """The names of the arrays that equal collectives move."""
    moved = _in_braces([path for c in group for path in c.arrays])
    summed = _in_braces([path for c in group for path in c.gradients])
    if moved or summed:
        return moved or f"gradient of {summed}"
    return group[0].primitive + (f" in {group[0].scope}" if group[0].scope else "")


def folded_names(paths: Sequence[str]) -> str:
    """The names of leaves, those of equal layers together: `a[0..5].b, c and 2 more`."""
    return listed([*folded(paths)], _SHOWN)


def _in_braces(paths: Sequence[str]) -> str:
    """Those that differ in a single key are one, too: `a[0..5].{up, down}.weight`."""
    return listed(united(folded(paths)), _SHOWN)


def table(collectives: Iterable[Collective]) -> list[str]:
    """The lines of a table. On a terminal that is too narrow for it, what rows have in common is a
    line above them, the name of the model is told once, and names may take several lines.
    """
    groups, terminal = alike(collectives), width_of_stdout() - len(_INDENT)
    rows = [row_of(group) for group in groups]
    wide = [COLUMNS, *(row.cells() for row in rows)]
    # What the other columns leave of a line for names.
    others = [_NARROW, *((row.times, row.bytes, row.sent, "", row.source) for row in rows)]
    room = terminal - width_of_table(others) + len("what")
    if width_of_table(wide) <= terminal or room < _LEAST:
        return columns(wide, indent=_INDENT)
    paths = [path for group in groups for c in group for path in (*c.arrays, *c.gradients)]
    # The argument that most arrays are of, if several are.
    roots = Counter(match[0] for path in paths if (match := re.match(r"\w+(?=[.[])", path)))
    root = next((root for root, count in roots.most_common(1) if count > 1), "")
    cells: list[tuple[str, ...]] = [_NARROW]
    headings: dict[int, str] = {}
    below: dict[str, list[TableRow]] = {}
    for row in rows:
        below.setdefault(row.heading(), []).append(row)
    for heading, together in below.items():
        headings[len(cells)] = heading
        for row in together:
            what = re.sub(rf"\b{root}(?=[.[])", "", row.what) if root else row.what
            first, *more = textwrap.wrap(what, room) or [""]
            cells.append((row.times, row.bytes, row.sent, first, row.source))
            cells += [("", "", "", text, "") for text in more]
    lines = [f"{_INDENT}names without their first word are of {root}"] if root else []
    for i, line in enumerate(columns(cells, indent=_INDENT)):
        lines += wrapped([f"{_INDENT}{headings[i]}:"]) if i in headings else []
        lines.append(line)
    return lines
