"""Names of a module that are imported when they are first used.

A module lists them once, for type checkers: in its stub (`.pyi`), or below `if TYPE_CHECKING`.
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def names_listed_in(file: str) -> dict[str, str]:
    """The names that a file imports `as` themselves, each with its module, relative as it is
    written.
    """
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            listed = [alias.name for alias in node.names if alias.name == alias.asname]
            found |= {name: "." * node.level + (node.module or name) for name in listed}
    return found


def on_first_use(space: dict[str, object], modules: dict[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of the module that has these globals."""
    package = str(space["__package__"])

    def imported(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {space['__name__']!r} has no attribute {name!r}")
        module = import_module(modules[name], package)
        space[name] = module if modules[name] == f".{name}" else getattr(module, name)
        return space[name]

    return imported
