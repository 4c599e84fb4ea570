"""How a call may be split: which dimensions of its operands and results are split alike."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

# The letters of an array's dimensions.
Letters = tuple[str, ...]
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Splits:
    """The letters of the dimensions of operands and results. Dimensions with the same letter are
    split alike. `parts` has the letters that may be split; a number of parts must divide theirs.
    All other dimensions are whole.
    """

    operands: tuple[Letters, ...]
    results: tuple[Letters, ...]
    parts: Mapping[str, int]

    def __hash__(self) -> int:
        return hash((self.operands, self.results))

    def __str__(self) -> str:
        sides = [", ".join(map(" ".join, side)) for side in (self.operands, self.results)]
        return " -> ".join(sides)

    @property
    def named(self) -> list[str]:
        """The letters that may be split, as they come in the results."""
        every = (letter for letters in (*self.results, *self.operands) for letter in letters)
        return [letter for letter in dict.fromkeys(every) if letter in self.parts]

    @property
    def whole(self) -> list[str]:
        every = (letter for letters in (*self.operands, *self.results) for letter in letters)
        return [letter for letter in dict.fromkeys(every) if letter not in self.parts]

    def without(self, whole: Sequence[str]) -> "Splits":
        """With these letters whole, too."""
        unknown = sorted(set(whole) - {*self.named, *self.whole})
        if unknown:
            raise UnfitDimsError(f'whole= has {unknown[0]!r}, and the letters are "{self}"')
        parts = {letter: count for letter, count in self.parts.items() if letter not in whole}
        return Splits(self.operands, self.results, parts)

    def under_vmap(self, size: int, are_mapped: Sequence[bool]) -> "Splits":
        """With a new first dimension of those operands that are mapped, and of all results."""
        new = next(x for x in _letters() if x not in {*self.parts, *self.whole})
        operands = (
            (new, *letters) if is_mapped else letters
            for letters, is_mapped in zip(self.operands, are_mapped, strict=True)
        )
        results = tuple((new, *letters) for letters in self.results)
        return Splits(tuple(operands), results, {**self.parts, new: size})


def _letters() -> Iterator[str]:
    yield from ascii_lowercase
    yield from (f"{letter}{number}" for number in range(1, 1000) for letter in ascii_lowercase)


class UnfitDimsError(Exception):
    """`dims=` doesn't fit the call. `opaque` makes a `TypeError` of it."""


def _parsed(dims: str) -> tuple[list[Letters], list[Letters], set[str]]:
    """The letters of operands and results in `dims=`, and those that are whole."""
    sides = dims.split("->")
    is_word = re.compile(r"[a-zA-Z_]\w*").fullmatch
    words = dims.replace("->", " ").replace(",", " ").split()
    if len(sides) != 2 or not all(map(is_word, words)):
        raise UnfitDimsError('write the letters of each array, as in "b t d, d -> b t"')
    operands, results = ([tuple(x.split()) for x in side.split(",")] for side in sides)
    in_results = {letter for letters in results for letter in letters}
    every = in_results | {letter for letters in operands for letter in letters}
    repeated = {x for letters in (*operands, *results) for x in letters if letters.count(x) > 1}
    return operands, results, (every - in_results) | repeated


def splits_of(dims: str, operands: Shapes, results: Shapes) -> Splits:
    """What `dims=` says of arrays of these shapes."""
    of_operands, of_results, are_whole = _parsed(dims)
    for side, letters, shapes in (
        ("arguments", of_operands, operands),
        ("results", of_results, results),
    ):
        if letters == [()] and not shapes:
            letters.clear()
        if [len(x) for x in letters] != [len(shape) for shape in shapes]:
            given = ", ".join(map(" ".join, letters))
            shown = ", ".join(map(str, shapes)) or "none"
            raise UnfitDimsError(f'"{given}" is not a letter for each dimension of {side} {shown}')
    sizes: dict[str, list[int]] = {}
    pairs = zip((*of_operands, *of_results), (*operands, *results), strict=True)
    for letters, shape in pairs:
        for letter, size in zip(letters, shape, strict=True):
            sizes.setdefault(letter, []).append(size)
    of_given = {letter for letters in of_operands for letter in letters}
    # A dimension of size 1 is broadcast. One that only a result has is made by the call.
    parts = {
        letter: math.gcd(*(x for x in found if x != 1))
        for letter, found in sizes.items()
        if letter not in are_whole and letter in of_given
    }
    parts = {letter: count for letter, count in parts.items() if count > 1}
    return Splits(tuple(of_operands), tuple(of_results), parts)


def named_by_letters(
    operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], parts: Mapping[int, int]
) -> Splits:
    """The same for dimensions that have numbers; those with equal ones are split alike."""
    names: dict[int, str] = {}
    letters = _letters()

    def name(number: int) -> str:
        if number not in names:
            names[number] = next(letters)
        return names[number]

    of_operands = tuple(tuple(map(name, x)) for x in operands)
    of_results = tuple(tuple(map(name, x)) for x in results)
    return Splits(of_operands, of_results, {names[x]: n for x, n in parts.items() if x in names})
