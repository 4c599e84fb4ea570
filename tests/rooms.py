"""Which room of mylib uses which, read from the imports.

python tests/rooms.py            prints the drawing
python tests/rooms.py --write    puts it into docs/internals.md
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mylib"
PAGE = ROOT / "docs" / "internals.md"
BEGIN, END = "<!-- rooms -->\n", "<!-- end of rooms -->\n"

# The folders of mylib with their rooms, from top to bottom: a room uses only those below it.
FLOORS = {
    "_testing": (),  # one room
    "_planning": ("plan", "verify"),
    "_training": (
        "elastic",
        "mpmd",
        "loops",
        "per_device",
        "matrices",
        "fsdp",
        "jit",
        "advice",
        "on_demand",
    ),
    "_programs": (
        *("contracts", "interpreter", "lowered", "audit", "measured", "machines", "elementwise"),
    ),
    "_moving": ("watch", "data", "transfer", "several", "links", "processes"),
    "_core": (
        *("show", "rules", "kernels", "dims", "placement", "belongs", "tree", "products"),
        *("known_faults", "jaxprs", "meshes", "watched", "compat", "errors", "lines"),
        *("status", "text", "contexts", "stubs"),
    ),
}
# The folders that a folder may use.
USES = {
    "_testing": {"_planning", "_training", "_programs", "_moving", "_core"},
    "_planning": {"_training", "_programs", "_moving", "_core"},
    "_training": {"_programs", "_moving", "_core"},
    "_programs": {"_core"},
    "_moving": {"_core"},
    "_core": set[str](),
}
# The one file of `_training` that may import `_programs`.
GATE = "mylib/_training/on_demand.py"
# What stands outside of the floors, and may use every room.
TOP = ("__init__", "__main__", "mylib_pytest")


ORDER = [f"{floor}.{room}".rstrip(".") for floor in FLOORS for room in FLOORS[floor] or [""]]


class Import(NamedTuple):
    file: str
    line: int
    room: str
    # The module that is imported, as parts below `mylib`: a floor, a room, and maybe what is in it.
    target: tuple[str, ...]


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module: `_core.tree` of `_core/tree/leaves.py`; a face's own name."""
    return ".".join(parts[: 2 if FLOORS.get(parts[0]) else 1])


def imports_in(source: str, file: str, parts: tuple[str, ...], is_face: bool) -> Iterator[Import]:
    """The imports of mylib's own modules. `parts` is the module's name below `mylib`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base: tuple[str, ...] = ()
            if node.level:
                package = ("mylib", *(parts if is_face else parts[:-1]))
                base = package[: len(package) - node.level + 1]
            base += tuple((node.module or "").split(".")) if node.module else ()
            # Of a package without names of its own: the names are modules.
            is_open = len(base) == 1 or (len(base) == 2 and bool(FLOORS.get(base[1])))
            names = [(*base, alias.name) for alias in node.names] if is_open else [base]
        else:
            continue
        for name in names:
            if name[0] == "mylib" and len(name) > 1:
                yield Import(file, node.lineno, room_of(parts), name[1:])
            elif name == ("mylib_pytest",):
                yield Import(file, node.lineno, room_of(parts), name)


def all_imports() -> list[Import]:
    found: list[Import] = []
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = path.relative_to(ROOT).as_posix()
        is_face = parts[-1] == "__init__" and len(parts) > 1
        found += imports_in(path.read_text(), name, parts[:-1] if is_face else parts, is_face)
    plugin = ROOT / "mylib_pytest.py"
    found += imports_in(plugin.read_text(), plugin.name, ("mylib_pytest",), False)
    return found


def faces() -> set[str]:
    """The public modules."""
    return {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}


def names_in(face: ModuleType) -> list[str]:
    """What users may import from `mylib` or from a public module."""
    return getattr(face, "__all__", [name for name in vars(face) if not name.startswith("_")])


def faults_of(imports: list[Import]) -> list[str]:
    """Imports that go up, that go past a room's `__init__.py`, or that name a public module."""
    return [fault for x in imports if (fault := _fault_of(x, room_of(x.target)))]


def _fault_of(x: Import, used: str) -> str | None:
    where = f"{x.file}:{x.line}"
    if used == x.room:
        return None
    if x.room in faces() or x.room in TOP:
        # The pytest plugin starts before the package may be imported.
        inside = x.room != "mylib_pytest" and len(x.target) > len(used.split("."))
        return f"{where}: {'.'.join(x.target)} is inside a room; use {used}" if inside else None
    if used in faces() or used in TOP:
        return f"{where}: {x.room} uses {used}, which is for users; use the room that has it"
    for room in (x.room, used):
        if room not in ORDER:
            return f"{where}: {room} has no place in FLOORS of tests/rooms.py"
    floor, below = x.room.split(".")[0], used.split(".")[0]
    if floor != below and below not in USES[floor]:
        return f"{where}: {floor} knows nothing of {below}"
    if ORDER.index(used) < ORDER.index(x.room):
        return f"{where}: {x.room} uses {used}, which stands above it"
    if (floor, below) == ("_training", "_programs") and x.file != GATE:
        return f"{where}: {below} is imported by {GATE} alone, when it is first needed"
    if len(x.target) > len(used.split(".")):
        return f"{where}: {'.'.join(x.target)} is inside another room; use {used}"
    return None


def circles() -> set[str]:
    """The files that import themselves by way of other files of their room, such as
    `jit/dispatcher.py`. Imports for types alone count: who reads one file must read the others.
    """
    used: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for path in PACKAGE.rglob("*/*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        is_face = parts[-1] == "__init__"
        found = imports_in(path.read_text(), "", parts[:-1] if is_face else parts, is_face)
        used[parts] = {x.target[: len(parts)] for x in found if x.room == room_of(x.target)}

    def reached(file: tuple[str, ...]) -> set[tuple[str, ...]]:
        seen, left = set[tuple[str, ...]](), [file]
        while left:
            new = used.get(left.pop(), set[tuple[str, ...]]()) - seen
            seen |= new
            left += new
        return seen

    return {f"{'/'.join(file)}.py" for file in used if file in reached(file)}


# Lines of a function, without its signature and its docstring: lists of options are no code.
LONGEST = 40


def long_functions(source: str) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[ast.get_docstring(node) is not None :]
            if body and (body[-1].end_lineno or 0) - body[0].lineno + 1 > LONGEST:
                found.append(node.name)
    return found


def arrows(imports: list[Import]) -> dict[str, set[str]]:
    """The rooms that each room uses."""
    used: dict[str, set[str]] = {room: set() for room in ORDER}
    for x in imports:
        if x.room in used and room_of(x.target) != x.room:
            used[x.room].add(room_of(x.target))
    return used


def arrows_between_folders(imports: list[Import]) -> set[tuple[str, str]]:
    pairs = {
        (room.split(".")[0], other.split(".")[0])
        for room, others in arrows(imports).items()
        for other in others
    }
    return {(floor, below) for floor, below in pairs if floor != below}


def drawing() -> str:
    imports = all_imports()
    used, pairs = arrows(imports), arrows_between_folders(imports)
    lines = ["```mermaid", "graph TD"]
    # An arrow that follows from others is left out.
    lines += [
        f"    {floor} --> {below}"
        for floor in FLOORS
        for below in FLOORS
        if (floor, below) in pairs
        and not any((floor, x) in pairs and (x, below) in pairs for x in FLOORS)
    ]
    lines += ["```", ""]
    for floor in FLOORS:
        lines += [f"`{floor}/`: {_about(floor)}", ""]
        if FLOORS[floor]:
            lines += ["| room | contents | uses |", "|---|---|---|"]
        for room in FLOORS[floor]:
            name = f"{floor}.{room}"
            uses = ", ".join(f"`{x.split('.')[-1]}`" for x in ORDER if x in used[name])
            lines.append(f"| `{room}` | {_about(f'{floor}/{room}')} | {uses} |")
        lines += [""] if FLOORS[floor] else []
    return "\n".join(lines).rstrip("\n") + "\n"


def defined_twice(source: str) -> list[str]:
    """The functions, classes and values of a module that a later definition replaces."""
    names: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            is_overload = "overload" in map(ast.unparse, node.decorator_list)
            names += [] if is_overload else [node.name]
        elif isinstance(node, ast.Assign):
            names += [x.id for x in node.targets if isinstance(x, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return [name for name, count in Counter(names).items() if count > 1]


def _about(room: str) -> str:
    candidates = [PACKAGE / room / "__init__.py", PACKAGE / f"{room}.py"]
    path = next(path for path in candidates if path.exists())
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def page_with(text: str) -> str:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{text}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page_with(drawing()))
    else:
        print(drawing())
