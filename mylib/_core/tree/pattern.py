"""Patterns over the paths of leaves."""

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import jax.tree_util as jtu

from .leaves import KeyPath

# A part is plain or in brackets, where it may be quoted: `.layers[0]['a.b']`. Quotes and brackets
# inside brackets belong to a key such as `[('x', 1)]`.
_PART = re.compile(
    r"""\.?(?P<plain>[^.\[\]'"]+)
    | \[ (?P<quoted> '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" ) \]
    | \[ (?P<key>[^'"\[\]]+) \]
    | \[ (?P<other>(?!['"]).+?) \] (?=[.\[]|\Z)""",
    re.VERBOSE | re.DOTALL,
)
_PLAIN = re.compile(r"[^.\[\]'\"]+")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
# Separates the parts of a path for matching: no key contains it.
_MARK = "\0"


@lru_cache(maxsize=10_000)
def parts_in(text: str) -> tuple[str, ...]:
    """The keys of a path that is written as text, `model.layers[0]['a.b']`."""
    return tuple(
        ast.literal_eval(match["quoted"])
        if match["quoted"]
        else match["plain"] or match["key"] or match["other"]
        for match in _PART.finditer(text)
    )


@dataclass(frozen=True)
class Pattern:
    """Matches the end of a path. `*` matches anything within one part, `**` any number of parts."""

    text: str

    def __post_init__(self) -> None:
        parts = "".join(match[0] for match in _PART.finditer(self.text))
        if not parts or parts != self.text:
            raise ValueError(
                f"the pattern {self.text!r} is not a path: write parts with dots between them, as "
                "in 'layers.*.weight', and a key with dots or brackets in it as ['a.b']"
            )

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return parts_in(self.text)

    @cached_property
    def names_odd_keys(self) -> bool:
        """Whether it has keys whose `str` and `repr` may differ, so that the text in a path may be
        different from the key's.
        """
        matches = _PART.finditer(self.text)
        return any(match["other"] or not (match["key"] or "0").isdigit() for match in matches)

    def ends_as_it_stands(self, path: KeyPath) -> bool:
        """Whether `jax.tree_util.keystr(path)` ends with the literal text of the pattern."""
        return any(jtu.keystr(path[start:]) == self.text for start in range(len(path)))

    @cached_property
    def ends(self) -> Callable[[str], re.Match[str] | None]:
        """Whether the pattern matches the end of a path, given as `joined`."""
        return re.compile(self._regex + r"\Z", re.DOTALL).search

    @cached_property
    def matches(self) -> Callable[[str], re.Match[str] | None]:
        """Whether the pattern matches a whole path, given as `joined`."""
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
    """A pattern that matches these parts, with any numbers in place of theirs."""
    texts = (_NUMBER.sub("*", part) for part in parts)
    plain = (f".{text}" if _PLAIN.fullmatch(text) else f"[{text!r}]" for text in texts)
    return "".join(plain).removeprefix(".")


@lru_cache(maxsize=16384)  # rules ask for that of a leaf several times
def joined(parts: tuple[str, ...]) -> str:
    return "".join(_MARK + part for part in parts)
