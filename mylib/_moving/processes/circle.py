"""Finds processes that wait in a circle for arrays of each other.

A process that has waited for a while tells which call it waits for, and how many calls of each lane
it has made, or can make, before that array comes. It waits for those processes of the call that
have not made it. If all processes made their calls in one order, there could be no circle. So what
a process has told long ago can't make this raise by mistake.
"""

from collections.abc import Mapping
from typing import NamedTuple

from .coordination import Processes
from .groups import members
from .order import IN_ORDER


class Waiting(NamedTuple):
    """What a process has told: the lane and the number of the call that it waits for, what that is
    (the number of another process follows), and how many calls of each lane it has made.
    """

    lane: str
    number: int
    what: str
    done: Mapping[str, int]


def circle_before(me: int, waiting: Mapping[int, Waiting]) -> tuple[Processes, str] | None:
    """The processes of a circle that this process waits for, and the error; None without one."""
    groups = {x.lane: members(x.lane.partition("/")[2]) for x in waiting.values()}
    waits_for = {
        process: [
            other
            for other in groups[lane]
            if other != process and other in waiting and waiting[other].done.get(lane, 0) < number
        ]
        for process, (lane, number, *_) in waiting.items()
    }
    # A process that waits for no waiting process will go on.
    while not all(waits_for.values()):
        stuck = {process for process, others in waits_for.items() if others}
        waits_for = {p: [q for q in waits_for[p] if q in stuck] for p in stuck}
    if me not in waits_for:
        return None
    path = [me]
    while (following := waits_for[path[-1]][0]) not in path:
        path.append(following)
    circle = path[path.index(following) :]
    first = circle.index(min(circle))
    circle = circle[first:] + circle[:first]
    steps = [
        f"process {process} for {waiting[process].what} {other}"
        for process, other in zip(circle, [*circle[1:], circle[0]], strict=True)
    ]
    concerned = {other for process in circle for other in groups[waiting[process].lane]}
    return tuple(sorted(concerned)), (
        f"processes wait for each other: {'; '.join(steps)}. Each gives what the one before it "
        f"waits for only after that. {IN_ORDER}"
    )
