"""Lines of code, docstrings and comments by room of `mylib`: `python tools/count_lines.py`.

`--against REV` prints those of a commit first, `--at REV` those of a commit in place of the files
in this checkout.
"""

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "mylib"
sys.path.append(str(ROOT / "tests"))

from rooms import FLOORS  # noqa: E402

_SUFFIXES = (".py", ".pyi")
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


class Lines(NamedTuple):
    """`comments` have a line of their own; those behind code are part of it."""

    code: int = 0
    docstrings: int = 0
    comments: int = 0


def count(source: str) -> Lines:
    docstrings = {line for node in _docstrings(source) for line in _lines_of(node)}
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    return Lines(len(code), len(docstrings), len(comments - code - docstrings))


def _docstrings(source: str) -> Iterator[ast.expr]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                if isinstance(first.value.value, str):
                    yield first.value


def _lines_of(node: ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def by_room(sources: Iterable[tuple[str, str]]) -> dict[str, Lines]:
    """`sources` are paths below the root, with `/`, and their texts."""
    rooms: dict[str, Lines] = defaultdict(Lines)
    for path, source in sources:
        room = room_of(path)
        rooms[room] = Lines(*map(sum, zip(rooms[room], count(source), strict=True)))
    return dict(sorted(rooms.items()))


def room_of(path: str) -> str:
    """`_core/tree` of `mylib/_core/tree/leaves.py`; before there were folders, `_tree`."""
    parts = path.rpartition(".")[0].split("/")[1:]
    return "/".join(parts[: 2 if FLOORS.get(parts[0]) else 1])


def here() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / PACKAGE).rglob("*.py*")):
        if path.suffix in _SUFFIXES:
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def at(revision: str) -> Iterator[tuple[str, str]]:
    for path in _git("ls-tree", "-r", "--name-only", revision, f"{PACKAGE}/").splitlines():
        if path.endswith(_SUFFIXES):
            yield path, _git("show", f"{revision}:{path}")


def _git(*args: str) -> str:
    return subprocess.run(
        ["git", *args], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def table(now: Mapping[str, Lines], before: Mapping[str, Lines] | None = None) -> list[str]:
    """One line a room, and the sum; with `before`, both numbers and the difference of code."""
    rooms = sorted({*now, *(before or {})})
    lines = [f"{'room':24}" + "".join(f"{kind:>18}" for kind in Lines._fields)]
    for name in [*rooms, "all"]:
        cells = _cells(_of(now, name), _of(before, name) if before is not None else None)
        lines.append(f"{name:24}" + "".join(f"{cell:>18}" for cell in cells))
    return lines


def _of(rooms: Mapping[str, Lines], name: str) -> Lines:
    if name != "all":
        return rooms.get(name, Lines())
    return Lines(*map(sum, zip(*rooms.values(), strict=True)))


def _cells(now: Lines, before: Lines | None) -> list[str]:
    if before is None:
        return [str(n) for n in now]
    return [f"{old} {new - old:+} = {new}" for old, new in zip(before, now, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at", metavar="REV", help="a commit in place of this checkout")
    parser.add_argument("--against", metavar="REV", help="the commit to compare with")
    args = parser.parse_args()
    now = by_room(at(args.at) if args.at else here())
    before = by_room(at(args.against)) if args.against else None
    print("\n".join(table(now, before)))


if __name__ == "__main__":
    main()
