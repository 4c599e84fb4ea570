"""Runs a schedule on paper: when each mesh would do what, and where it would wait forever."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from .actions import Action

Row: TypeAlias = Sequence[Action]
# A start, an end, and what is done in between.
Timed: TypeAlias = tuple[float, float, Action]


def simulate(
    rows: Sequence[Row],
    needs: Callable[[Action], Iterable[Action]],
    duration: Callable[[Action], float],
    send: float,
) -> list[list[Timed]]:
    """The actions each mesh has done once none can continue: its whole row, unless it is stuck."""
    ends: dict[Action, tuple[float, int]] = {}
    done: list[list[Timed]] = [[] for _ in rows]
    moved = True
    while moved:
        moved = False
        for mesh, row in enumerate(rows):
            free = done[mesh][-1][1] if done[mesh] else 0.0
            for action in row[len(done[mesh]) :]:
                needed = list(needs(action))
                if not ends.keys() >= set(needed):
                    break
                inputs = [ends[x] for x in needed]
                start = max([free, *(end if at == mesh else end + send for end, at in inputs)])
                free = start + duration(action)
                done[mesh].append((start, free, action))
                ends.setdefault(action, (free, mesh))
                moved = True
    return done
