"""Finds processes that wait for each other in a circle.

A process that has waited for a while tells what it waits for, and how many calls of each lane it
has made, or can make, before that comes. Each waits for the one that it names, and that has not
made the call. If all made their calls in one order, there could be no circle: so a process may have
told its part long ago, and is right all the same.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

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


def circle_through(me: int, waiting: Mapping[int, Waiting]) -> list[int]:
    """Processes each of which waits for the next one, and the last for the first; as few as there
    can be, and none if there is no circle.
    """
    paths, seen = [[me]], set[int]()
    for path in paths:
        for process in _waited_for(path[-1], waiting):
            if process == me:
                first = path.index(min(path))
                return path[first:] + path[:first]
            if process not in seen:
                seen.add(process)
                paths.append([*path, process])
    return []


def _waited_for(process: int, waiting: Mapping[int, Waiting]) -> Iterator[int]:
    lane, number, *_ = waiting[process]
    for other in members(lane.partition("/")[2]):
        if other != process and other in waiting and waiting[other].done.get(lane, 0) < number:
            yield other


def described(circle: list[int], waiting: Mapping[int, Waiting]) -> str:
    steps = [
        f"process {process} for {waiting[process].what} {following}"
        for process, following in zip(circle, [*circle[1:], circle[0]], strict=True)
    ]
    return (
        f"processes wait for each other: {'; '.join(steps)}. Each gives what the one before it "
        f"waits for only after that. {IN_ORDER}"
    )
