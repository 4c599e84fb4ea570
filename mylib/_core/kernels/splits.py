"""How a call may be split: which dimensions of its operands and results are split alike."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from string import ascii_lowercase
from typing import Protocol

# The letters of an array's dimensions.
Letters = tuple[str, ...]


class Shaped(Protocol):
    """An array, or its type."""

    @property
    def shape(self) -> tuple[int, ...]: ...


Arrays = Sequence[Shaped]


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
    def letters(self) -> dict[str, None]:
        """All letters, as they come in the results and then in the operands."""
        return dict.fromkeys(chain(*self.results, *self.operands))

    @property
    def named(self) -> list[str]:
        """The letters that may be split."""
        return [letter for letter in self.letters if letter in self.parts]

    def without(self, whole: Sequence[str]) -> "Splits":
        """With these letters whole, too."""
        unknown = sorted(set(whole).difference(self.letters))
        if unknown:
            raise UnfitDimsError(f'whole= has {unknown[0]!r}, and the letters are "{self}"')
        parts = {letter: count for letter, count in self.parts.items() if letter not in whole}
        return Splits(self.operands, self.results, parts)

    def shapes_of_results(
        self, whole: Arrays, parts: Arrays, results: Arrays
    ) -> list[tuple[int, ...]]:
        """Of parts, by the operands, their parts, and the results of all."""
        counts: dict[str, int] = {}
        for letters, array, part in zip(self.operands, whole, parts, strict=True):
            sizes = zip(letters, array.shape, part.shape, strict=True)
            counts.update((letter, n // m) for letter, n, m in sizes if n > 1)
        return [
            tuple(
                n // counts.get(x, 1) if n > 1 else n for x, n in zip(names, y.shape, strict=True)
            )
            for names, y in zip(self.results, results, strict=True)
        ]

    def under_vmap(self, size: int, are_mapped: Sequence[bool]) -> "Splits":
        """With a new first dimension of those operands that are mapped, and of all results."""
        new = next(x for x in _letters() if x not in self.letters)
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

    keyword = "dims"


def _parsed(dims: str) -> tuple[list[Letters], list[Letters], set[str]]:
    """The letters of operands and results in `dims=`, and those that are whole."""
    sides = dims.split("->")
    is_word = re.compile(r"[a-zA-Z_]\w*").fullmatch
    words = dims.replace("->", " ").replace(",", " ").split()
    if len(sides) != 2 or not all(map(is_word, words)):
        raise UnfitDimsError('write the letters of each array, as in "b t d, d -> b t"')
    operands, results = ([tuple(x.split()) for x in side.split(",")] for side in sides)
    repeated = {x for letters in (*operands, *results) for x in letters if letters.count(x) > 1}
    return operands, results, {*chain(*operands)}.difference(*results) | repeated


def splits_of(dims: str, operands: Arrays, results: Arrays) -> Splits:
    """What `dims=` says of these arrays."""
    of_operands, of_results, are_whole = _parsed(dims)
    sizes: dict[str, list[int]] = {}
    for side, of_side, arrays in (
        ("arguments", of_operands, operands),
        ("results", of_results, results),
    ):
        if of_side == [()] and not arrays:
            of_side.clear()
        if [*map(len, of_side)] != [len(array.shape) for array in arrays]:
            given = ", ".join(map(" ".join, of_side))
            shown = ", ".join(str(array.shape) for array in arrays) or "none"
            raise UnfitDimsError(f'"{given}" is not a letter for each dimension of {side} {shown}')
        for letters, array in zip(of_side, arrays, strict=True):
            for letter, size in zip(letters, array.shape, strict=True):
                sizes.setdefault(letter, []).append(size)
    # A dimension of size 1 is broadcast. One that only a result has is made by the call.
    parts = {
        letter: math.gcd(*(size for size in sizes[letter] if size != 1))
        for letter in chain(*of_operands)
        if letter not in are_whole
    }
    parts = {letter: count for letter, count in parts.items() if count > 1}
    return Splits(tuple(of_operands), tuple(of_results), parts)


def named_by_letters(
    operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], parts: Mapping[int, int]
) -> Splits:
    """The same for dimensions that have numbers; those with equal ones are split alike."""
    names = dict(zip(dict.fromkeys(chain(*operands, *results)), _letters(), strict=False))
    of_operands, of_results = (
        tuple(tuple(names[number] for number in array) for array in side)
        for side in (operands, results)
    )
    return Splits(of_operands, of_results, {names[x]: n for x, n in parts.items() if x in names})
