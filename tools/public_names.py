"""An extension of griffe, which reads the docstrings for the API pages.

`mylib.audit` is a function, imported from `mylib/_audit/audit.py`. Griffe takes a name that is both
for the module; here it becomes what Python finds.
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
