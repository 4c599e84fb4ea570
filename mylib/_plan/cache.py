"""Plans on disk, beside the programs that JAX keeps in its compilation cache."""

import functools
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .._compat import compilation_cache
from .._errors import MylibWarning, warn
from .._lowered import replace_file, versions
from ..machines import Machine
from .fixes import ContradictionError, FixedParts
from .result import Plan
from .strategy import meshes
from .trace import TracedStep


def folder() -> Path | None:
    """Where JAX keeps programs, if it was told to, on a disk."""
    path = compilation_cache()
    return None if path is None or "://" in path else Path(path)


class CachedPlan:
    """A plan's file. Its name and its first line have a hash of all that the plan depends on."""

    def __init__(
        self,
        traced: TracedStep,
        target: Machine,
        fixed: FixedParts,
        axes: dict[str, int] | None,
        options: Sequence[Any],
    ):
        self._machine, self._layers = target, traced.layers
        directory = folder()
        self._path: Path | None = None
        if directory is not None:
            self._key = _hash(
                str(traced.jaxpr),
                [[(x.path, x.aval) for x in xs] for xs in (traced.leaves, traced.results)],
                (traced.step.names, traced.step.batch, [role.path for role in traced.called]),
                [f"{cls.__module__}:{cls.__qualname__}" for cls in traced.layers],
                (target.chip, target.hosts, target.shape, target.is_here, axes, *options),
                [*_fixes(traced, target, fixed, axes)],
                (versions(target.chip.platform), _sources()),
            )
            self._path = directory / f"mylib-plan-{self._key}.json"

    def read(self) -> Plan | None:
        """The plan, if there is one. A file that is damaged counts as none."""
        if self._path is None:
            return None
        try:
            head, _, text = self._path.read_text().partition("\n")
        except (OSError, UnicodeDecodeError):
            return None
        if head != self._head(text):
            return None
        return Plan.of(text, self._layers, self._machine)

    def write(self, plan: Plan) -> None:
        if self._path is None:
            return
        text = plan.as_text()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, f"{self._head(text)}\n{text}".encode())
        except OSError as error:
            warn(f"the plan isn't kept in {self._path}: {error}", MylibWarning)

    def _head(self, text: str) -> str:
        return f"{self._key} {_hash(text)}"


def _fixes(
    traced: TracedStep, target: Machine, fixed: FixedParts, axes: dict[str, int] | None
) -> Iterator[Any]:
    for sizes, _ in meshes(target, axes) if fixed != FixedParts() else ():
        try:
            yield fixed.on(traced, dict(sizes))
        except ContradictionError as error:
            yield str(error)


@functools.cache
def _sources() -> str:
    """A hash of this library's source, which changes while it is edited."""
    files = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return _hash(*(path.read_text() for path in files))


def _hash(*parts: Any) -> str:
    # Functions in a program are shown with their addresses.
    text = re.sub(r"0x[0-9a-f]+", "", "\0".join(map(str, parts)))
    return hashlib.sha256(text.encode()).hexdigest()
