"""Finds what is wrong with a schedule: actions that are missing or misplaced, and deadlocks."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product

from ..._core.text import counted, in_short, some
from .actions import Action, Pass, needs
from .simulation import Row, simulate


def faults_of(stages: int, meshes: int, microbatches: int, rows: Sequence[Row]) -> list[str]:
    """Everything that is wrong, a line each."""
    sizes = {"stages": stages, "meshes": meshes, "microbatches": microbatches}
    faults = [f"{name}={size} must be at least 1" for name, size in sizes.items() if size < 1]
    if not faults and stages < meshes:
        faults.append(f"{stages} stages leave meshes without work: there are {meshes} meshes")
    if not faults and len(rows) != meshes:
        faults.append(f"there are {len(rows)} rows for {meshes} meshes")
    if faults:
        return faults
    return [*_misplaced(stages, meshes, microbatches, rows), *_deadlocks(stages, rows)]


def _misplaced(stages: int, meshes: int, microbatches: int, rows: Sequence[Row]) -> Iterator[str]:
    """Each stage must run each pass over each microbatch once, on its own mesh."""
    split = any(action.kind is Pass.WEIGHT for row in rows for action in row)
    kinds = [kind for kind in Pass if split or kind is not Pass.WEIGHT]
    for mesh, row in enumerate(rows):
        own = range(mesh, stages, meshes)
        expected = Counter(Action(*x) for x in product(kinds, own, range(microbatches)))
        found = Counter(row)
        if beyond := [str(action) for action in found - expected]:
            runs = f"stages {in_short(own)} over {counted(microbatches, 'microbatch')}"
            yield f"row {mesh} has {some(beyond)} too many: it runs {runs} once, counted from 0"
        if lacking := sorted(expected - found):
            yield f"row {mesh} lacks {some(list(map(str, lacking)))}"


def _deadlocks(stages: int, rows: Sequence[Row]) -> Iterator[str]:
    """Where each mesh stops, and what it waits for. What is missing altogether isn't waited for."""
    places = {action: mesh for mesh, row in enumerate(rows) for action in row}

    def needed(action: Action) -> list[Action]:
        return [x for x in needs(action, stages) if x in places]

    done = simulate(rows, needed, lambda action: 1.0, 0.0)
    finished = {action for line in done for _, _, action in line}
    for mesh, (row, line) in enumerate(zip(rows, done, strict=True)):
        if len(line) < len(row):
            stuck = row[len(line)]
            after = f"after {row[len(line) - 1]}" if line else "its first action"
            waits = [
                f"{x} of mesh {places[x]}" if places[x] != mesh else f"{x}, later in its own row"
                for x in needed(stuck)
                if x not in finished
            ]
            where = f"mesh {mesh} is stuck at {stuck} ({after})"
            yield f"deadlock: {where}, waiting for {' and for '.join(waits)}"
