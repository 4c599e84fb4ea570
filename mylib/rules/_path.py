"""`by_path`: placements by patterns over the paths of the leaves."""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jax.sharding import PartitionSpec

from .._errors import Fault
from .._leaves import Leaf
from .._placement import PASS, Placement, is_rule
from ._rule import Rule, answer, contradictions, fill, unused, why

# A part is written plainly, or in brackets, where it may also be quoted: `.layers[0]['a.b']`.
_PART = re.compile(
    r"""\.?(?P<plain>[^.\[\]'"]+) | \[(?P<quote>['"]?)(?P<key>.+?)(?P=quote)\]""", re.VERBOSE
)
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
        return tuple(m["plain"] or m["key"] for m in _PART.finditer(self.text))

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


def joined(parts: Sequence[str]) -> str:
    return "".join(_MARK + part for part in parts)


def by_path(patterns: Mapping[str, Placement], *, ordered: bool = False) -> Rule:
    """Chooses placements by the paths of the leaves.

    **A pattern is the end of a path, part by part, in which `*` stands for anything within one
    part and `**` for any number of whole parts.** The leaf `.blocks[3].mlp.layers[0].weight` is
    matched by `"weight"`, `"mlp.layers.0.weight"`, `"mlp.layers.*.weight"` and
    `"blocks.*.mlp.**"`, and by its own path as it stands.

    As a pattern is the end of a path, one that fits a model's weight fits its moments in an
    optimiser state, too. Leaves of rank 0 that no pattern matches, such as Adam's `count`, are
    replicated. On other leaves that no pattern matches the rule has no opinion: that is an error,
    unless another rule follows, as in `by_path(...) | replicated()`.

    **Arguments:**

    - `patterns`: a mapping from patterns to placements, or to rules for the leaves that match. A
        `PartitionSpec` that is too long for one of the leaves (a factored moment, of lower rank
        than its weight) is no opinion on that leaf.
    - `ordered`: whether the first of several patterns that match wins. By default patterns that
        match the same leaf must agree.

    **Returns:**

    A [`mylib.rules.Rule`][]. These are errors when it is used: a pattern that matches nothing, two
    patterns that match the same leaf and disagree, a spec too long for every leaf that it is for.

    !!! Example

        ```python
        mesh = jax.make_mesh((4, 2), ("data", "model"))
        model = eqx.nn.MLP(8, 8, 64, 1, key=jax.random.key(0))
        rule = mylib.rules.by_path(
            {"layers.0.weight": P("model"), "layers.1.weight": P(None, "model"), "bias": P()}
        )
        model = mylib.filter_shard(model, rule, mesh=mesh)
        ```
    """
    return ByPath(tuple((Pattern(text), value) for text, value in patterns.items()), ordered)


@dataclass(frozen=True, repr=False)
class ByPath(Rule):
    patterns: tuple[tuple[Pattern, Any], ...]
    ordered: bool

    def __call__(self, leaf: Leaf) -> Any:
        value = self._value(leaf)
        if is_rule(value):
            return answer(value, leaf)
        return PASS if _is_too_long(value, leaf) else value

    def why(self, leaf: Leaf) -> str:
        matching = self._matching(leaf)
        if not matching:
            return (
                "no pattern matches; a leaf of rank 0" if leaf.ndim == 0 else "no pattern matches"
            )
        pattern, value = matching[0]
        told = f"pattern {pattern.text!r}"
        return f"{told}: {why(value, leaf)}" if is_rule(value) else told

    def fill(self, leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
        value = self._value(leaf)
        return fill(value, leaf, spec) if is_rule(value) else super().fill(leaf, spec)

    def contradictions(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        found: list[Fault] = []
        for leaf in leaves:
            matching = self._matching(leaf)
            if not self.ordered and any(value != matching[0][1] for _, value in matching):
                found.append(_conflict(leaf, matching))
        for rule, asked in self._nested(leaves):
            found += contradictions(rule, asked)
        return found

    def unused(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        if all(leaf.ndim == 0 for leaf in leaves):
            return []  # an optimiser state with nothing but a counter in it
        paths = [joined(leaf.parts) for leaf in leaves]
        found: list[Fault] = []
        for pattern, value in self.patterns:
            matched = [leaf for leaf, path in zip(leaves, paths, strict=True) if pattern.ends(path)]
            found += _unused(pattern, value, matched, leaves)
        for rule, asked in self._nested(leaves):
            found += unused(rule, asked)
        return found

    def _nested(self, leaves: Sequence[Leaf]) -> Iterable[tuple[Any, list[Leaf]]]:
        """The rules among the values, each with the leaves that it decides about."""
        nested: dict[int, tuple[Any, list[Leaf]]] = {}
        if any(is_rule(value) for _, value in self.patterns):
            for leaf in leaves:
                value = self._value(leaf)
                if is_rule(value):
                    nested.setdefault(id(value), (value, []))[1].append(leaf)
        return nested.values()

    def _matching(self, leaf: Leaf) -> list[tuple[Pattern, Any]]:
        path = joined(leaf.parts)
        return [(pattern, value) for pattern, value in self.patterns if pattern.ends(path)]

    def _value(self, leaf: Leaf) -> Any:
        path = joined(leaf.parts)
        for pattern, value in self.patterns:
            if pattern.ends(path):
                return value
        return PartitionSpec() if leaf.ndim == 0 else PASS

    def __repr__(self) -> str:
        patterns = ", ".join(f"{pattern.text!r}: {value!r}" for pattern, value in self.patterns)
        return f"by_path({{{patterns}}}{', ordered=True' if self.ordered else ''})"


def _is_too_long(value: Any, leaf: Leaf) -> bool:
    return isinstance(value, PartitionSpec) and len(value) > leaf.ndim


def _conflict(leaf: Leaf, matching: Sequence[tuple[Pattern, Any]]) -> Fault:
    return Fault(
        leaf.name,
        leaf.shape,
        "by_path: " + ", ".join(f"{pattern.text!r} says {value}" for pattern, value in matching),
        "these patterns all match, and disagree",
        "make them narrower, or write ordered=True and put the one that shall win first",
    )


def _unused(
    pattern: Pattern, value: Any, matched: Sequence[Leaf], leaves: Sequence[Leaf]
) -> Iterator[Fault]:
    request = f"by_path: {pattern.text!r}"
    if not matched:
        known = _spellings(pattern, leaves)
        close = difflib.get_close_matches(".".join(pattern.parts), known, 1, 0.5)
        yield Fault(
            "",
            None,
            request,
            f"the pattern matches none of the {len(leaves)} leaves",
            f"did you mean {close[0]!r}?"
            if close
            else f"paths end like these: {', '.join(map(repr, known[:4]))}",
        )
    elif all(_is_too_long(value, leaf) for leaf in matched):
        longest = max(matched, key=lambda leaf: leaf.ndim)
        yield Fault(
            longest.name,
            longest.shape,
            f"{request}: {value}",
            f"the spec has {len(value)} entries, and no leaf that the pattern matches so many "
            "dimensions",
            f"give at most {longest.ndim}",
        )


def _spellings(pattern: Pattern, leaves: Sequence[Leaf]) -> list[str]:
    """The ends of the paths, as long as `pattern`, written as patterns."""
    count = len(pattern.parts)
    return list(dict.fromkeys(spelled(leaf.parts[-count:]) for leaf in leaves))


def spelled(parts: Sequence[str]) -> str:
    """A pattern that matches these parts, and others in which numbers differ."""
    return ".".join("*" if part.isdigit() else part for part in parts)
