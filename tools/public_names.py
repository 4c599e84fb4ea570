"""An extension of griffe, which reads the docstrings for the API pages.

`mylib.audit` is a function, imported from `mylib/_audit/audit.py`. Griffe takes a name that is both
for the module; here it becomes what Python finds. In place of a private base of a class its own
bases are shown.
"""

from typing import Any

import griffe


class PublicNames(griffe.Extension):
    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        for name, member in list(pkg.members.items()):
            if not member.is_alias or not member.target_path.startswith(f"{pkg.name}."):
                continue  # other packages' names can't be resolved
            if member.is_module and name in member.members:
                pkg.set_member(name, griffe.Alias(name, f"{member.canonical_path}.{name}"))
        _without_private_bases(pkg)


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
