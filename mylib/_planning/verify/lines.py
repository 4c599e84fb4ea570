"""The first line of a program whose values differ from those of another program."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..._core.compat import names
from ..._core.lines import is_of_user
from .judge import differences_of, rounding_of
from .recorded import Runnable, ScanLoop, ValuePlace, ValueRecorder
from .rounding import Roundings

# How often the reference runs with other roundings.
_AGAIN = 4
# Places that compute nothing: arguments, and what enters or leaves a loop or a `shard_map`.
_PASSES = {"an argument", names.SCAN, names.SHARD_MAP}
# A reference doesn't have them.
_SENDS = names.COLLECTIVES | {names.SHARD_MAP, names.PVARY}

UNKNOWN = "the first line that differs isn't known"


def first_difference(ours: Runnable, reference: Runnable) -> str:
    """The first line of a step that computes other values than its reference, from values that
    both have; in words.
    """
    roundings = Roundings(reference.program)
    given = [(float(seed > 0), seed) for seed in range(1 + _AGAIN)]
    theirs = reference.recorded(given, roundings.call)
    mine = ours.recorded()
    if theirs is None or mine is None:
        return f"{UNKNOWN}: the step's values take too much memory"
    return _LineSearch(*mine, *theirs).told()


@dataclass(frozen=True)
class _Match:
    """A place of the reference whose value a place of the step has: in which iterations, and
    whether the devices only have parts of it that are to be added up or compared.
    """

    place: ValuePlace
    is_equal: np.ndarray
    is_part: bool


class _LineSearch:
    """The places of a step and of its reference, and the values of their runs.

    - `wanted`: the reference's values, with what rounding explains of each number.
    - `by_shape`: its places, by the shapes of their values.
    - `keys`: of all its places.
    - `matches`: for each place of the step those of the reference.
    - `at`: the iteration of each loop that is looked at.
    - `wrong`: results that aren't those of the reference, whatever else they are equal to.
    """

    def __init__(
        self,
        step: ValueRecorder,
        runs: Sequence[Sequence[np.ndarray]],
        reference: ValueRecorder,
        of_reference: Sequence[Sequence[np.ndarray]],
    ):
        self.step, self.reference = step, reference
        self.keys = {place.key for place in reference.places}
        self.wanted: dict[ValuePlace, tuple[np.ndarray, np.ndarray]] = {}
        self.by_shape: dict[tuple[int, ...], list[ValuePlace]] = defaultdict(list)
        for place, want, *others in zip(reference.kept, *of_reference, strict=True):
            rounding = rounding_of(want, others)
            # The runs are few.
            self.wanted[place] = want, rounding + np.median(rounding)
            self.by_shape[len(place.loops), *want.shape].append(place)
        pairs = zip(step.kept, runs[0], strict=True)
        self.matches = {place: [*self._matches(place, value)] for place, value in pairs}
        self.wrong: set[ValuePlace] = set()
        self.at: dict[ScanLoop, int] = {}
        for loop in dict.fromkeys(loop for place in step.kept for loop in place.loops):
            self.at[loop] = self._first_iteration(loop)

    def told(self) -> str:
        found = self._found()
        if found is None or not is_of_user(found.line.rpartition(":")[0]):
            return UNKNOWN
        is_part = found not in self.wrong and self._equal(found)
        by = ": each device has a part of it, which is used as if it were all" if is_part else ""
        return f"the first line that differs: {found}{by}"

    def _matches(self, place: ValuePlace, value: np.ndarray) -> Iterator[_Match]:
        loops = len(place.loops)
        for whole, is_part in _forms(place, value):
            is_plain = _is_plain(whole)
            for other in self.by_shape.get((loops, *whole.shape), ()):
                if is_plain and other.primitive != place.primitive:
                    continue
                want, rounding = self.wanted[other]
                near = differences_of(whole, want) <= rounding
                is_equal = near.reshape(*whole.shape[:loops], -1).all(-1)
                if is_equal.any():
                    yield _Match(other, np.asarray(is_equal), is_part)

    def _first_iteration(self, loop: ScanLoop) -> int:
        """The first in which a result of the body differs, or else the last."""
        for i in loop.order:
            self.at[loop] = i
            if not all(map(self._is_equal, loop.results)):
                return i
        return loop.order[-1]

    def _equal(self, place: ValuePlace) -> list[_Match]:
        """The values of the reference that a place has, in the iteration that is looked at."""
        (before, *_) = place.operands if place.primitive in _PASSES and place.mesh else [None]
        if before is not None and before.mesh is None:  # an argument of a `shard_map`
            return self._equal(before)
        at = tuple(self.at[loop] for loop in place.loops)
        found = [match for match in self.matches.get(place, ()) if match.is_equal[at]]
        # Where the reference computes the same here, another value of it is equal by chance.
        is_there = place.key in self.keys
        return [x for x in found if x.place.key == place.key] if is_there else found

    def _is_equal(self, place: ValuePlace | None) -> bool:
        if place is None or place not in self.matches:
            return True
        return place not in self.wrong and bool(self._equal(place))

    def _found(self) -> ValuePlace | None:
        """The first place whose value the reference doesn't have and can be shown to be wrong, or
        else the only line with such values.
        """
        pairs = [*zip(self.step.results, self.reference.results, strict=True)]
        self.wrong = {
            mine
            for mine, theirs in pairs
            if mine in self.matches and all(at.place is not theirs for at in self._equal(mine))
        }
        wrong = self._unequal([*self.wrong])
        order = [place for place in self.step.places if place in wrong]
        first = next((place for place in order if self._is_shown(place)), None)
        if first is None:
            found = (self._aligned(*pair) for pair in pairs if pair[0] in self.wrong)
            return next(filter(None, found), None)
        before = self._unequal(first.operands)
        blamed = [
            at for at in order if at in before or (at is first and (first.mesh or not before))
        ]
        if len({place.line for place in blamed}) != 1:
            return None
        return self._origin(blamed[0])

    def _origin(self, place: ValuePlace) -> ValuePlace | None:
        """Where a wrong value is made: the first value of the same function of which each device
        has a part, if it is made of that; None if it only enters or leaves a `shard_map`.
        """
        start = place
        while start.primitive not in names.COLLECTIVES and (part := self._part_in(place)):
            if start.primitive not in _PASSES and _function(part) != _function(start):
                break
            place, start = part, part
        lines = {x.line for x in self._unequal(place.operands)}
        return None if place.primitive in _PASSES or lines - {place.line} else place

    def _aligned(self, mine: ValuePlace | None, theirs: ValuePlace | None) -> ValuePlace | None:
        """The place of a wrong value from which on all operations are those of the reference."""
        while mine is not None and theirs is not None:
            before = self._unequal([mine])
            if len({place.line for place in before}) == 1:
                return next(x for x in self.step.places if x in before)
            wrong = [i for i, x in enumerate(mine.operands) if not self._is_equal(x)]
            if not wrong:
                return None
            i, others = wrong[0], {mine.operands[j] for j in wrong}
            if mine.primitive in _SENDS or self._averages(mine):
                mine = mine.operands[i]
            elif (mine.primitive, len(mine.operands)) == (theirs.primitive, len(theirs.operands)):
                mine, theirs = mine.operands[i], theirs.operands[i] if len(others) == 1 else None
            else:
                return None
        return None

    @staticmethod
    def _averages(place: ValuePlace) -> bool:
        """Whether it is the quotient in a `pmean`."""
        (x, *_) = place.operands or [None]
        return place.primitive == names.DIV and x is not None and x.primitive in _SENDS

    def _unequal(self, places: Sequence[ValuePlace | None]) -> set[ValuePlace]:
        """Places whose values the reference doesn't have, and all such places before them."""
        found: set[ValuePlace] = set()
        stack = list(places)
        while stack:
            place = stack.pop()
            if place is not None and place not in found and not self._is_equal(place):
                found.add(place)
                stack += place.operands
        return found

    def _is_shown(self, place: ValuePlace) -> bool:
        """Whether a value is wrong: the reference has another one at the same place, or from the
        same operands.
        """
        starts = all(map(self._is_equal, place.operands))
        if place.primitive in _PASSES:
            return starts and place.primitive == names.SHARD_MAP
        if starts and place.primitive in names.COLLECTIVES and self._part_in(place):
            return True
        return place.key in self.keys or (starts and self._has_same_operands(place))

    def _has_same_operands(self, place: ValuePlace) -> bool:
        equal = [None if x is None else [m.place for m in self._equal(x)] for x in place.operands]
        kind = place.primitive, len(place.loops), len(equal)

        def is_same(others: Sequence[ValuePlace | None]) -> bool:
            pairs = zip(others, equal, strict=True)
            return all(x is None if ys is None else x in ys for x, ys in pairs)

        return any(
            (x.primitive, len(x.loops), len(x.operands)) == kind
            and (is_same(x.operands) or is_same(x.operands[::-1]))
            for x in self.wanted
        )

    def _part_in(self, place: ValuePlace) -> ValuePlace | None:
        """An operand of which each device only has a part."""
        for value in place.operands:
            found = [] if value is None else self._equal(value)
            if found and all(match.is_part for match in found):
                return value
        return None


def _function(place: ValuePlace) -> str:
    return place.line.partition(" ")[2]


def _forms(place: ValuePlace, value: np.ndarray) -> Iterator[tuple[np.ndarray, bool]]:
    """The whole arrays that a value may stand for, and whether the devices have parts that are to
    be added up or compared.
    """
    forms, loops = [(value, False)], len(place.loops)
    if place.mesh is not None:
        sizes, around = place.mesh.axes.values(), place.mesh.loops
        value = np.moveaxis(value, around, 0)
        forms = [(value.reshape(*sizes, *value.shape[1:]), False)]
        for axis in reversed(range(len(sizes))):
            forms = [y for x, is_part in forms for y in _joined(x, axis, axis + loops, is_part)]
    yield from forms


def _joined(
    x: np.ndarray, axis: int, start: int, is_part: bool
) -> Iterator[tuple[np.ndarray, bool]]:
    """Without an axis of devices; `start` is then the first dimension of the value."""
    (first, *others) = np.moveaxis(x, axis, 0)
    is_same = not any(map(np.any, (differences_of(first, other) for other in others)))
    if is_same:
        yield first, is_part
    for dim in range(start, x.ndim - 1):
        y = np.moveaxis(x, axis, dim)
        yield y.reshape(*y.shape[:dim], -1, *y.shape[dim + 2 :]), is_part
    for join in () if is_same else (np.max, np.min, *((np.sum, np.mean) * (x.dtype != bool))):
        with np.errstate(over="ignore", invalid="ignore"):
            yield join(x, axis=axis), True


def _is_plain(value: np.ndarray) -> bool:
    """Whether it is filled with one whole number, as many values are by chance."""
    if value.dtype == bool:
        return value.size == 1
    first = value.reshape(-1)[0]
    return bool((value == first).all() and first == np.round(first))
