"""An extension of griffe, which reads the docstrings for the API pages.

A room `audit` has a function `audit`, imported from `audit.py` in it. Griffe takes a name that is
both for the module; here it becomes what Python finds. In place of a private base of a class its
own bases are shown.

Docstrings name public objects as `mylib.show`, which `help()` prints. On the site these are links.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe


class PublicNames(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for module in (pkg, *(x for x in pkg.modules.values() if not x.is_alias)):
            if not module.is_private:
                _with_functions(module, f"{pkg.name}.")
        _without_private_bases(pkg)
        for item in _objects(pkg):
            if item.docstring is not None:
                item.docstring.value = linked(item.docstring.value)


_API = Path(__file__).resolve().parent.parent / "docs" / "api"
SHOWN = {
    name
    for page in _API.glob("*.md")
    for name in re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
}
"""The objects on the API pages."""


def linked(docstring: str) -> str:
    """A docstring in which the names of public objects, and of their methods, are links."""

    def link(match: re.Match[str]) -> str:
        name = match[1]
        shown = name in SHOWN or name.rpartition(".")[0] in SHOWN
        return f"[`{name}`][]" if shown else match[0]

    # Not in examples.
    text, *others = re.split(r"(^ *```.*?^ *```)", docstring, flags=re.DOTALL | re.MULTILINE)
    parts = [text, *others]
    parts[::2] = [re.sub(r"(?<!\[)`(mylib(?:\.\w+)+)`", link, part) for part in parts[::2]]
    return "".join(parts)


def _objects(item: griffe.Object) -> Iterator[griffe.Object]:
    yield item
    for member in item.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _with_functions(module: griffe.Module, ours: str) -> None:
    for name, member in list(module.members.items()):
        if not member.is_alias or not member.target_path.startswith(ours):
            continue  # other packages' names can't be resolved
        if member.is_module and name in member.members:
            module.set_member(name, griffe.Alias(name, f"{member.canonical_path}.{name}"))


def _without_private_bases(module: griffe.Module) -> None:
    for cls in module.classes.values():
        if not cls.is_alias:
            own = [module.classes.get(str(base)) for base in cls.bases]
            cls.bases = [
                shown
                for base, private in zip(cls.bases, own, strict=True)
                for shown in (private.bases if private and str(base).startswith("_") else [base])
            ]
    for inner in module.modules.values():
        if not inner.is_alias:
            _without_private_bases(inner)
