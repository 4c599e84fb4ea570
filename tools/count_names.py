"""How readable `mylib` is, in figures: `python tools/count_names.py`.

Entries of the folder, arrows between folders, and how often `Any` and the name `x` stand in 1,000
lines of each room.
"""

import ast
from collections import Counter

from count_lines import PACKAGE, ROOT, by_room, here, room_of
from rooms import all_imports, arrows_between_folders

NAMES = ("Any", "x")


def counted(source: str) -> Counter[str]:
    """The uses of these names, and the parameters that are called so."""
    names: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        name = node.id if isinstance(node, ast.Name) else getattr(node, "arg", None)
        if name in NAMES and not isinstance(node, ast.keyword):
            names[name] += 1
    return names


def table(sources: list[tuple[str, str]]) -> list[str]:
    """One line a room, and the sum."""
    lines = {room: sum(n) for room, n in by_room(sources).items()}
    found: dict[str, Counter[str]] = {room: Counter() for room in lines}
    for path, source in sources:
        found[room_of(path)] += counted(source)
    lines["all"], found["all"] = sum(lines.values()), sum(found.values(), Counter[str]())
    told = [f"{'room':24}{'lines':>8}" + "".join(f"{f'{x} in 1,000':>16}" for x in NAMES)]
    for room, n in lines.items():
        cells = "".join(f"{1000 * found[room][x] / max(n, 1):16.0f}" for x in NAMES)
        told.append(f"{room:24}{n:8}{cells}")
    return told


def main() -> None:
    print("\n".join(table(list(here()))))
    entries = [x for x in (ROOT / PACKAGE).iterdir() if x.name != "__pycache__"]
    print(f"{len(entries)} entries of {PACKAGE}/")
    print(f"{len(arrows_between_folders(all_imports()))} arrows between folders")


if __name__ == "__main__":
    main()
