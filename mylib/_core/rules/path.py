"""`by_path`: chooses placements by patterns over the paths of leaves."""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from ..errors import Fault, because
from ..placement import PASS, Placement, is_rule, trimmed
from ..text import counted, show_spec
from ..tree import Leaf, Pattern, joined, name_of, spelled
from .rule import Rule, as_rule, leaves_by_rule


def by_path(patterns: Mapping[str, Placement], *, ordered: bool = False) -> Rule:
    """Chooses placements by the paths of the leaves.

    **A pattern matches the end of a path. In it `*` matches anything within one part, and `**` any
    number of parts.** The leaf `.blocks[3].mlp.layers[0].weight` is matched by `"weight"`,
    `"mlp.layers.0.weight"`, `"mlp.layers.*.weight"`, `"blocks.*.mlp.**"`, and its own path. Write
    keys that contain dots or brackets in brackets and quotes: `"['a.b'].weight"`.

    As a pattern matches the end of a path, a pattern for a model's weight also matches its moments
    in an optimiser state. Unmatched leaves of rank 0, such as Adam's `count`, are replicated. For
    other unmatched leaves the rule returns PASS, which raises an error unless another rule follows,
    as in `by_path(...) | replicated()`.

    **Arguments:**

    - `patterns`: a mapping from patterns to placements, or to rules for the leaves that match. A
        `PartitionSpec` that is too long for a leaf (a factored moment, of lower rank than its
        weight) is not used for it.
    - `ordered`: whether the first matching pattern wins. By default all patterns that match a leaf
        must agree.

    **Returns:**

    A `mylib.rules.Rule`. Using it raises if a pattern matches nothing, if two patterns that
    match a leaf disagree, or if a spec is too long for all its leaves.

    **Raises:**

    `TypeError` if `patterns` is no mapping from strings.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=4, model=2)
        model = eqx.nn.MLP(8, 8, 64, 1, key=jax.random.key(0))
        rule = mylib.rules.by_path(
            {
                "layers.0.weight": P("model"),
                "layers.1.weight": P(None, "model"),
                "bias": P(),
            }
        )
        model = mylib.filter_shard(model, rule, mesh=mesh)
        ```
    """
    if not isinstance(patterns, Mapping):
        raise TypeError(f"by_path takes a mapping from patterns to placements, not {patterns!r}")
    odd = [key for key in patterns if not isinstance(key, str)]
    if odd:
        raise TypeError(f"by_path: {odd[0]!r} is no pattern; write the end of a path, 'layers.0'")
    return ByPath(tuple((Pattern(text), _value(v)) for text, v in patterns.items()), ordered)


def _value(placement: Any) -> Any:
    return as_rule(placement) if is_rule(placement) else placement


# The most paths, and path ends, that a misspelt pattern is compared with.
_MANY = 200


@dataclass(frozen=True, repr=False)
class ByPath(Rule):
    patterns: tuple[tuple[Pattern, Any], ...]
    ordered: bool

    def __call__(self, leaf: Leaf) -> Any:
        value = self._value(leaf)
        return value(leaf) if isinstance(value, Rule) else value

    def why(self, leaf: Leaf) -> str:
        pattern, value = next(self._matching(leaf), (None, None))
        if pattern is None:
            return "no pattern matches" + ("" if leaf.ndim else "; a leaf of rank 0")
        match = f"pattern {pattern.text!r}"
        return f"{match}: {value.why(leaf)}" if isinstance(value, Rule) else match

    def fill(self, leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
        value = self._value(leaf)
        return value.fill(leaf, spec) if isinstance(value, Rule) else super().fill(leaf, spec)

    def contradictions(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        faults: list[Fault] = []
        if not self.ordered:
            for leaf in leaves:
                matching = list(self._matching(leaf))
                if any(not _same(value, matching[0][1]) for _, value in matching):
                    faults.append(_conflict(leaf, matching))
        return [*faults, *super().contradictions(leaves)]

    def _unmatched(self, leaves: Sequence[Leaf]) -> Iterator[Fault]:
        matched: dict[Pattern, list[Leaf]] = {pattern: [] for pattern, _ in self.patterns}
        for leaf in leaves:
            for pattern, _ in self._ending(leaf):
                matched[pattern].append(leaf)
        for pattern, value in self.patterns:
            yield from _unused(pattern, value, matched[pattern], leaves)

    def _parts(self, leaves: Sequence[Leaf]) -> Iterable[tuple[Rule, Sequence[Leaf]]]:
        if not any(isinstance(value, Rule) for _, value in self.patterns):
            return ()
        values = ((self._value(leaf), leaf) for leaf in leaves)
        return leaves_by_rule((value, leaf) for value, leaf in values if isinstance(value, Rule))

    def _ending(self, leaf: Leaf) -> Iterator[tuple[Pattern, Any]]:
        """The patterns that match the end of its path, and their values."""
        path = joined(leaf.parts)
        for pair in self.patterns:
            pattern = pair[0]
            if pattern.ends(path) or (
                pattern.names_odd_keys and pattern.ends_as_it_stands(leaf.path)
            ):
                yield pair

    def _matching(self, leaf: Leaf) -> Iterator[tuple[Pattern, Any]]:
        """The patterns whose values fit."""
        return (pair for pair in self._ending(leaf) if not _is_too_long(pair[1], leaf))

    def _value(self, leaf: Leaf) -> Any:
        values = (value for _, value in self._matching(leaf))
        return next(values, PASS if leaf.ndim else PartitionSpec())

    def __repr__(self) -> str:
        patterns = ", ".join(
            f"{pattern.text!r}: {show_spec(value)}" for pattern, value in self.patterns
        )
        return f"by_path({{{patterns}}}{', ordered=True' if self.ordered else ''})"


def _is_too_long(value: Any, leaf: Leaf) -> bool:
    return isinstance(value, PartitionSpec) and len(value) > leaf.ndim


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, PartitionSpec) and isinstance(b, PartitionSpec):
        a, b = (s.update(partitions=trimmed(s.partitions)) for s in (a, b))
    return a == b


def _conflict(leaf: Leaf, matching: Sequence[tuple[Pattern, Any]]) -> Fault:
    said = ", ".join(f"{pattern.text!r} gives {show_spec(value)}" for pattern, value in matching)
    reason = "these patterns all match, and disagree"
    fix = "make them narrower, or write ordered=True and put the one that should win first"
    return Fault(name_of(leaf.path), leaf.shape, f"by_path: {said}", reason, fix)


def _unused(
    pattern: Pattern, value: Any, matched: Sequence[Leaf], leaves: Sequence[Leaf]
) -> Iterator[Fault]:
    request = f"by_path: {pattern.text!r}"
    if not matched:
        fix = suggestion(pattern, leaves)
        if any(map(is_in_a_state, leaves)):
            fix += " If it is for a weight without a state, place the state along with its model"
        reason = f"the pattern matches none of the {len(leaves)} leaves"
        yield because(reason, fix, request)
    elif all(_is_too_long(value, leaf) and not is_in_a_state(leaf) for leaf in matched):
        longest = max(matched, key=lambda leaf: leaf.ndim)
        reason = (
            f"the spec has {len(value)} entries, but matching leaves have at most "
            f"{counted(longest.ndim, 'dimension')}"
        )
        fix = f"give at most {longest.ndim}"
        yield Fault(
            name_of(longest.path), longest.shape, f"{request}: {show_spec(value)}", reason, fix
        )


def is_in_a_state(leaf: Leaf) -> bool:
    """Whether the leaf is in an optimiser state (a named tuple in optax), where moments may be
    factored, and weights may be missing.
    """
    return any(issubclass(owner, tuple) for owner, _ in leaf.owners)


def suggestion(pattern: Pattern, leaves: Sequence[Leaf]) -> str:
    """Similar names, for a pattern that matches nothing."""
    # The intended pattern may match the middle of a path: maps each piece of a path with the length
    # of `pattern` to the pattern that continues from there.
    meant: dict[str, str] = {}
    count, paths = len(pattern.parts), dict.fromkeys(leaf.parts for leaf in leaves)
    for path in paths:
        for start in reversed(range(max(1, len(path) - count + 1))):
            # Limited, because comparing texts is slow.
            if len(meant) < _MANY:
                meant.setdefault(spelled(path[start : start + count]), spelled(path[start:]))
    close = difflib.get_close_matches(spelled(pattern.parts), meant, 1, 0.5)
    if close:
        return f"did you mean {meant[close[0]]!r}?"
    ends = dict.fromkeys(spelled(path[-count - 1 :]) for path in paths)
    return f"paths end like these: {', '.join(map(repr, [*ends][:4]))}"
