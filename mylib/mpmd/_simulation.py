"""Runs a schedule on paper: when each mesh would do what, and where it would wait forever."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from ._actions import Action

Row: TypeAlias = Sequence[Action]
# A start, an end, and what is done in between.
Timed: TypeAlias = tuple[float, float, Action]


def simulate(
    rows: Sequence[Row],
    needs: Callable[[Action], Iterable[Action]],
    duration: Callable[[Action], float],
    send: float,
) -> list[list[Timed]]:
    """What each mesh has done once none can continue: all of its row, unless it is stuck."""
    ends: dict[Action, tuple[float, int]] = {}
    done: list[list[Timed]] = [[] for _ in rows]

    def start_of(action: Action, mesh: int) -> float | None:
        """When its mesh is free and all that it needs is there; None while something is not."""
        start = done[mesh][-1][1] if done[mesh] else 0.0
        for needed in needs(action):
            if needed not in ends:
                return None
            end, other = ends[needed]
            start = max(start, end if other == mesh else end + send)
        return start

    moved = True
    while moved:
        moved = False
        for mesh, row in enumerate(rows):
            while len(done[mesh]) < len(row):
                action = row[len(done[mesh])]
                start = start_of(action, mesh)
                if start is None:
                    break
                end = start + duration(action)
                done[mesh].append((start, end, action))
                ends.setdefault(action, (end, mesh))
                moved = True
    return done


def idle_share(lines: Sequence[Sequence[Timed]]) -> float:
    """The fraction of the time in which meshes are idle, on average."""
    busy = sum(end - start for line in lines for start, end, _ in line)
    whole = len(lines) * max(line[-1][1] for line in lines)
    # Sums of floats may differ in the last digit.
    return max(0.0, 1 - busy / whole)
