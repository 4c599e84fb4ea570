"""Patterns over the paths of leaves."""

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.tree_util as jtu

from .leaves import KeyPath

# A part is written plainly, or in brackets, where it may also be quoted: `.layers[0]['a.b']`. What
# is quoted or in brackets inside of brackets is part of a key such as `[('x', 1)]`.
_PART = re.compile(
    r"""\.?(?P<plain>[^.\[\]'"]+)
    | \[ (?P<quoted> '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" ) \]
    | \[ (?P<key>[^'"\[\]]+) \]
    | \[ (?P<other>(?!['"]).+?) \] (?=[.\[]|\Z)""",
    re.VERBOSE | re.DOTALL,
)
_PLAIN = re.compile(r"[^.\[\]'\"]+")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# Stands in front of every part of a path when it is matched: no key has it.
_MARK = "\0"


@dataclass(frozen=True)
class Pattern:
    """The end of a path, part by part, in which `*` stands for anything within one part and `**`
    for any number of whole parts.
    """

    text: str

    def __post_init__(self) -> None:
        at = 0
        for match in _PART.finditer(self.text):
            if match.start() != at:
                break
            at = match.end()
        if not self.text or at != len(self.text):
            raise ValueError(
                f"the pattern {self.text!r} is not a path: write parts with dots between them, as "
                "in 'layers.*.weight', and a key with dots or brackets in it as ['a.b']"
            )

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return tuple(
            ast.literal_eval(match["quoted"])
            if match["quoted"]
            else match["plain"] or match["key"] or match["other"]
            for match in _PART.finditer(self.text)
        )

    @cached_property
    def names_odd_keys(self) -> bool:
        """Whether there are keys in it of which the text in a path may be another than their own,
        as `str` and `repr` differ.
        """
        matches = _PART.finditer(self.text)
        return any(match["other"] or not (match["key"] or "0").isdigit() for match in matches)

    def ends_as_it_stands(self, path: KeyPath) -> bool:
        """Whether the pattern is, letter by letter, the end of what JAX writes for `path`."""
        return any(jtu.keystr(path[start:]) == self.text for start in range(len(path)))

    @cached_property
    def ends(self) -> Callable[[str], Any]:
        """Whether the pattern is the end of a path, given as `joined`."""
        return re.compile(self._regex + r"\Z", re.DOTALL).search

    @cached_property
    def matches(self) -> Callable[[str], Any]:
        """Whether the pattern is the whole of a path, given as `joined`."""
        return re.compile(self._regex, re.DOTALL).fullmatch

    @property
    def _regex(self) -> str:
        return "".join(map(_part_regex, self.parts))


def _part_regex(part: str) -> str:
    anything = f"[^{_MARK}]*"
    if part == "**":
        return f"(?:{_MARK}{anything})*"
    return _MARK + anything.join(map(re.escape, part.split("*")))


def spelled(parts: Sequence[str]) -> str:
    """A pattern that matches these parts, and others in which numbers differ."""
    texts = (_NUMBER.sub("*", part) for part in parts)
    plain = (f".{text}" if _PLAIN.fullmatch(text) else f"[{text!r}]" for text in texts)
    return "".join(plain).removeprefix(".")


def joined(parts: Sequence[str]) -> str:
    return "".join(_MARK + part for part in parts)
