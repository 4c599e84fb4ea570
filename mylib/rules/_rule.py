"""What a rule is, beside a callable: how it explains itself, and how two of them combine."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from .._errors import Fault
from .._leaves import Leaf
from .._placement import PASS, faults_of, is_rule
from .._target import axes_in, axis_names, entries_of, with_entries

AnyRule = Callable[[Leaf], Any]


class Rule:
    """A rule of `mylib.rules`. Like any rule it is a callable from [`mylib.Leaf`][] to a placement
    or [`mylib.rules.PASS`][], and every verb takes it in the place of a placement. Beyond that it
    can be combined with others, and says why it answers as it does.

    - `a | b`: the first that has an opinion. What `a` passes on, `b` is asked about.
    - `a & b`: `b` shards what `a` leaves whole. Where `a` answers with a `PartitionSpec`, `b` may
        shard the dimensions that are None there, over axes that are not used there; where `a` has
        no opinion, `b` answers. Other answers of `a` (a sharding, a device, None) stand as they
        are.

    `&` binds tighter than `|`, as everywhere in Python. Either side may be a plain function, as
    long as the other is not. Your own rules need not be of this class.
    """

    @abstractmethod
    def __call__(self, leaf: Leaf) -> Any:
        """The placement of `leaf`, or PASS."""

    def why(self, leaf: Leaf) -> str:
        """Why the rule answers so for `leaf`; [`mylib.explain`][] shows it."""
        return repr(self)

    def faults(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        """What is wrong with the rule, given all the leaves that it was asked about."""
        return [*self.contradictions(leaves), *self.unused(leaves)]

    def contradictions(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        """What is wrong with its answers for these leaves."""
        return ()

    def unused(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        """Which of its parts say something of none of these leaves. In `a | b`, `b` is asked about
        those, too, that `a` has taken: what is overruled is not misspelt.
        """
        return ()

    def fill(self, leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
        """`spec` with more of its dimensions sharded: the right-hand side of `&`."""
        return _merge(leaf, spec, answer(self, leaf))

    def __or__(self, other: AnyRule) -> "Rule":
        return FirstOf((self, other)) if is_rule(other) else NotImplemented

    def __ror__(self, other: AnyRule) -> "Rule":
        return FirstOf((other, self)) if is_rule(other) else NotImplemented

    def __and__(self, other: AnyRule) -> "Rule":
        return Both(self, other) if is_rule(other) else NotImplemented

    def __rand__(self, other: AnyRule) -> "Rule":
        return Both(other, self) if is_rule(other) else NotImplemented


@dataclass(frozen=True, repr=False)
class FirstOf(Rule):
    rules: tuple[AnyRule, ...]

    def __or__(self, other: AnyRule) -> Rule:
        return FirstOf((*self.rules, other)) if is_rule(other) else NotImplemented

    def __call__(self, leaf: Leaf) -> Any:
        return next((a for a in self._answers(leaf) if a is not PASS), PASS)

    def why(self, leaf: Leaf) -> str:
        rule = self._chosen(leaf)
        return "no rule has an opinion" if rule is None else why(rule, leaf)

    def fill(self, leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
        rule = self._chosen(leaf)
        return spec if rule is None else fill(rule, leaf, spec)

    def contradictions(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        *others, last = self.rules
        found: list[Fault] = []
        for rule in others:
            found += contradictions(rule, leaves)
            leaves = [leaf for leaf in leaves if answer(rule, leaf) is PASS]
        return [*found, *contradictions(last, leaves)]

    def unused(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        return [fault for rule in self.rules for fault in unused(rule, leaves)]

    def _answers(self, leaf: Leaf) -> Any:
        return (answer(rule, leaf) for rule in self.rules)

    def _chosen(self, leaf: Leaf) -> AnyRule | None:
        answers = zip(self.rules, self._answers(leaf), strict=True)
        return next((rule for rule, placement in answers if placement is not PASS), None)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.rules))


@dataclass(frozen=True, repr=False)
class Both(Rule):
    first: AnyRule
    second: AnyRule

    def __call__(self, leaf: Leaf) -> Any:
        placement = answer(self.first, leaf)
        if placement is PASS:
            return answer(self.second, leaf)
        if isinstance(placement, PartitionSpec):
            return fill(self.second, leaf, placement)
        return placement

    def why(self, leaf: Leaf) -> str:
        placement = answer(self.first, leaf)
        if placement is PASS:
            return why(self.second, leaf)
        told = why(self.first, leaf)
        if self(leaf) == placement:
            return told
        return f"{told}, then {why(self.second, leaf)}"

    def fill(self, leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
        return fill(self.second, leaf, fill(self.first, leaf, spec))

    def contradictions(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        asked = [leaf for leaf in leaves if _can_be_filled(answer(self.first, leaf))]
        return [*contradictions(self.first, leaves), *contradictions(self.second, asked)]

    def unused(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        return [*unused(self.first, leaves), *unused(self.second, leaves)]

    def __repr__(self) -> str:
        sides = (self.first, self.second)
        return " & ".join(f"({r!r})" if isinstance(r, FirstOf) else repr(r) for r in sides)


def answer(rule: AnyRule, leaf: Leaf) -> Any:
    """What a rule comes to: a rule may answer with another one."""
    placement = rule(leaf)
    return answer(placement, leaf) if is_rule(placement) else placement


def why(rule: AnyRule, leaf: Leaf) -> str:
    tell = getattr(rule, "why", None)
    if tell is not None:
        return tell(leaf)
    placement = rule(leaf)
    if is_rule(placement):
        return why(placement, leaf)
    return getattr(rule, "__qualname__", None) or repr(rule)


def fill(rule: AnyRule, leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
    if isinstance(rule, Rule):
        return rule.fill(leaf, spec)
    return _merge(leaf, spec, answer(rule, leaf))


def contradictions(rule: AnyRule, leaves: Sequence[Leaf]) -> Sequence[Fault]:
    return rule.contradictions(leaves) if isinstance(rule, Rule) else faults_of(rule, leaves)


def unused(rule: AnyRule, leaves: Sequence[Leaf]) -> Sequence[Fault]:
    return rule.unused(leaves) if isinstance(rule, Rule) else ()


def free_dimensions(spec: PartitionSpec, ndim: int) -> list[int]:
    """The dimensions that `spec` leaves whole."""
    entries = entries_of(spec)
    return [dim for dim in range(ndim) if dim >= len(entries) or entries[dim] is None]


def with_entry(spec: PartitionSpec, dim: int, entry: Any) -> PartitionSpec:
    entries = list(entries_of(spec))
    entries += [None] * (dim + 1 - len(entries))
    entries[dim] = entry
    return with_entries(spec, entries)


def trimmed(entries: Sequence[Any]) -> Sequence[Any]:
    """The entries of a spec without those at its end that say nothing."""
    while entries and entries[-1] is None:
        entries = entries[:-1]
    return entries


def _merge(leaf: Leaf, spec: PartitionSpec, more: Any) -> PartitionSpec:
    if not isinstance(more, PartitionSpec):
        return spec
    for dim in free_dimensions(spec, leaf.ndim):
        entry = entries_of(more)[dim] if dim < len(more) else None
        names = axis_names(entry)
        if names and not axes_in(spec).intersection(names):
            spec = with_entry(spec, dim, entry)
    return spec


def _can_be_filled(placement: Any) -> bool:
    return placement is PASS or isinstance(placement, PartitionSpec)
