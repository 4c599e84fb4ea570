"""The arguments whose gradients a collective sums or moves."""

from collections.abc import Sequence
from dataclasses import replace

from ..._core.belongs import Owners
from ..._core.tree import parts_in
from .entries import ProgramArray


def gradients_among(
    updated: Sequence[str], returned: Sequence[ProgramArray], parameters: Sequence[ProgramArray]
) -> tuple[str, ...]:
    """The paths of the arguments that are `updated`, without those of an optimiser's state, which
    belong to others of them; and of those whose gradients are `returned`.
    """
    keys = {path: parts_in(path)[1:] for path in updated}
    owners = Owners({path: key for path, key in keys.items() if key})
    own = [path for path, key in keys.items() if not owners.of(key, outside=True).all]
    found = [path for result in returned for path in _argument(result, parameters)]
    return tuple(dict.fromkeys(own + found))


def _argument(result: ProgramArray, parameters: Sequence[ProgramArray]) -> list[str]:
    """The argument that has a result's path in its tree; of single arrays the one that has its
    shape and axes. Nothing if there are several.
    """
    path = parts_in(result.path)
    tails = {argument: parts_in(argument.path)[1:] for argument in parameters}
    ends = {one: tail for one, tail in tails.items() if path[len(path) - len(tail) :] == tail}
    longest = max(map(len, ends.values()), default=0)
    found = [
        one.path
        for one, tail in ends.items()
        if len(tail) == longest and (tail or replace(one, path="") == replace(result, path=""))
    ]
    return found if len(found) == 1 else []
