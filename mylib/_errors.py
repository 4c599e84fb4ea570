"""The errors that name every leaf whose placement can't be had, or whose copies differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a request.

    **Attributes:**

    - `path`: the leaf, as text; empty where the fault is not one leaf's.
    - `shape`: the leaf's shape, or None.
    - `request`: what was asked of it.
    - `reason`: why that can't be done.
    - `mend`: what to write instead.
    """

    path: str
    shape: tuple[int, ...] | None
    request: str
    reason: str
    mend: str


class PlacementError(ValueError):
    """A request that can't be carried out. It names every faulty leaf, and is raised before
    anything has been moved, donated or compiled.

    **Attributes:**

    - `faults`: a tuple of [`mylib.Fault`][].
    """

    _beginning: ClassVar[str] = "can't place"
    _request: ClassVar[str] = "asked for"

    def __init__(self, faults: Sequence[Fault]):
        self.faults: tuple[Fault, ...] = tuple(faults)
        super().__init__(_describe(self.faults, self._beginning, self._request))

    def __reduce__(self) -> tuple[type["PlacementError"], tuple[tuple[Fault, ...]]]:
        return type(self), (self.faults,)


class ReplicaError(PlacementError):
    """Copies that should be equal differ. It names every array of which they do.

    **Attributes:**

    - `faults`: a tuple of [`mylib.Fault`][].
    """

    _beginning: ClassVar[str] = "the copies differ of"
    _request: ClassVar[str] = "it is placed as"


def _describe(faults: Sequence[Fault], beginning: str, requested: str) -> str:
    # Leaves that share a fault share its explanation.
    alike: dict[tuple[str, str, str], list[str]] = {}
    for fault in faults:
        shape = "" if fault.shape is None else f" {fault.shape}"
        named = alike.setdefault((fault.request, fault.reason, fault.mend), [])
        named += [fault.path + shape] if fault.path else []
    # Of one leaf several things can be wrong; of the whole tree, too, and of no leaf by itself.
    count = len({name for named in alike.values() for name in named})
    what = f"{count} {'leaf' if count == 1 else 'leaves'}" if count else "the tree"
    lines = [f"{beginning} {what}:"]
    for (request, reason, mend), named in alike.items():
        lines += [f"  {name}" for name in named]
        lines += [f"    {requested}: {request}"]
        lines += [f"    but {reason}"]
        lines += [f"    instead: {mend}"]
    return "\n".join(lines)
