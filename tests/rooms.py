"""Which room of mylib uses which, read from the imports.

python tests/rooms.py            prints the drawing
python tests/rooms.py --write    puts it into CONTRIBUTING.md
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mylib"
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- rooms -->\n", "<!-- end of rooms -->\n"

# From top to bottom. A room uses those below it only.
ORDER = (
    "__main__",
    "mylib_pytest",
    "testing",
    "mpmd",
    "_plan",
    "_verify",
    "contracts",
    "_watch",
    "data",
    "loops",
    "_per_device",
    "_matrices",
    "_fsdp",
    "_jit",
    "_interpreter",
    "_lowered",
    "_advice",
    "_audit",
    "_measured",
    "_show",
    "_transfer",
    "_links",
    "_processes",
    "rules",
    "_kernels",
    "_dims",
    "_placement",
    "_belongs",
    "_tree",
    "_products",
    "_known_faults",
    "machines",
    "_programs",
    "_meshes",
    "_watched",
    "_compat",
    "_errors",
    "_lines",
    "_text",
)


class Import(NamedTuple):
    file: str
    line: int
    room: str
    # The module that is imported, as parts below `mylib`: a room, and maybe what is inside it.
    target: tuple[str, ...]


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
            # `from .. import x`: the names are modules.
            names = [base] if len(base) > 1 else [(*base, alias.name) for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] == "mylib" and len(name) > 1:
                yield Import(file, node.lineno, parts[0], name[1:])
            elif name == ("mylib_pytest",):
                yield Import(file, node.lineno, parts[0], name)


def all_imports() -> list[Import]:
    found: list[Import] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        is_face = parts[-1] == "__init__"
        if parts == ("__init__",):
            continue  # the public names
        name = str(path.relative_to(ROOT))
        found += imports_in(path.read_text(), name, parts[:-1] if is_face else parts, is_face)
    plugin = ROOT / "mylib_pytest.py"
    found += imports_in(plugin.read_text(), plugin.name, ("mylib_pytest",), False)
    return found


def faults_of(imports: list[Import]) -> list[str]:
    """Imports that go up, and those that go past the face of another room."""
    faults: list[str] = []
    for x in imports:
        if x.target[0] == x.room:
            continue
        where = f"{x.file}:{x.line}"
        if x.room not in ORDER or x.target[0] not in ORDER:
            unknown = x.room if x.room not in ORDER else x.target[0]
            faults.append(f"{where}: {unknown} has no place in ORDER of tests/rooms.py")
        elif ORDER.index(x.target[0]) < ORDER.index(x.room):
            faults.append(f"{where}: {x.room} uses {x.target[0]}, which stands above it")
        elif len(x.target) > 1 and x.room != "mylib_pytest":
            inner = ".".join(x.target)
            faults.append(f"{where}: {inner} is inside another room; use mylib/{x.target[0]}")
    return faults


def circles() -> set[str]:
    """The files that import themselves by way of other files of their room, such as
    `_jit/dispatcher.py`. Imports for types alone count: who reads one file must read the others.
    """
    used: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for path in PACKAGE.rglob("*/*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        is_face = parts[-1] == "__init__"
        found = imports_in(path.read_text(), "", parts[:-1] if is_face else parts, is_face)
        used[parts] = {x.target[:2] for x in found if x.room == x.target[0]}

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
    used: dict[str, set[str]] = {room: set() for room in ORDER}
    for x in imports:
        if x.target[0] != x.room:
            used[x.room].add(x.target[0])
    return used


def drawing() -> str:
    used = arrows(all_imports())

    def reached(room: str) -> set[str]:
        return used[room].union(*(reached(other) for other in used[room]))

    lines = ["```mermaid", "graph TD"]
    for room in ORDER:
        # An arrow that follows from others is left out.
        implied = set[str]().union(*(reached(other) for other in used[room]))
        lines += [f"    {room} --> {other}" for other in ORDER if other in used[room] - implied]
    lines += ["```", "", "| room | what is there | uses |", "|---|---|---|"]
    for room in ORDER:
        uses = ", ".join(f"`{other}`" for other in ORDER if other in used[room])
        lines.append(f"| `{room}` | {_about(room)} | {uses} |")
    return "\n".join(lines) + "\n"


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
    candidates = [PACKAGE / room / "__init__.py", PACKAGE / f"{room}.py", ROOT / f"{room}.py"]
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
