"""The base class of rules: how they explain their results, and how they combine."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jax.sharding import PartitionSpec

from ..errors import Fault
from ..placement import MOST_RULES, PASS, ask, axes_in, axis_names, entries_of, faults_of, is_rule
from ..text import show_spec
from ..tree import Leaf, name_of

AnyRule = Callable[[Leaf], Any]
Axes = str | tuple[str, ...]


class Rule:
    """A rule of `mylib.rules`. Like any rule it is a callable from `mylib.Leaf` to a placement
    or `mylib.rules.PASS`, and every verb accepts it as a placement. It can also be combined
    with other rules, and explains its results.

    - `a | b`: the first that doesn't return PASS. `b` decides the leaves for which `a` returns
        PASS.
    - `a & b`: `b` may shard the dimensions that `a` left whole. If `a` returns a `PartitionSpec`,
        `b` may shard its None dimensions over axes that it doesn't use; if `a` returns PASS, `b`
        decides. Other results of `a` (a sharding, a device, None) are final.

    `&` binds tighter than `|`, as always in Python. One side may be a plain function. Your own
    rules need not subclass this class.

    !!! Example

        ```python
        class Rows(mylib.rules.Rule):
            def __call__(self, leaf):
                return P("data") if leaf.ndim == 2 else mylib.rules.PASS

        rule = Rows() | mylib.rules.replicated()
        model = eqx.nn.Linear(64, 64, key=jax.random.key(0))
        model = mylib.filter_shard(model, rule, mesh=mylib.make_mesh(data=8))
        ```
    """

    @abstractmethod
    def __call__(self, leaf: Leaf) -> Any:
        """The placement of `leaf`, or PASS."""

    def why(self, leaf: Leaf) -> str:
        """The reason for the rule's result for `leaf`; `mylib.explain` shows it."""
        return repr(self)

    def faults(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        """The faults of the rule, given all `leaves` that it was called with."""
        return [*self.contradictions(leaves), *self.unused(leaves)]

    def contradictions(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        """The faults of its results for these `leaves`."""
        return [x for rule, asked in self._parts(leaves) for x in rule.contradictions(asked)]

    def unused(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        """The faults of its parts that match none of these `leaves`. In `a | b`, `b` also gets the
        leaves that `a` decides: a pattern that `a` overrides still counts as used.
        """
        if all(leaf.ndim == 0 for leaf in leaves):
            return []  # an optimiser state that holds only a counter
        of_parts = (x for rule, asked in self._parts(leaves) for x in rule.unused(asked))
        return [*self._unmatched(leaves), *of_parts]

    def _unmatched(self, leaves: Sequence[Leaf]) -> Iterable[Fault]:
        """The same for its own patterns, without its parts."""
        return ()

    def _parts(self, leaves: Sequence[Leaf]) -> Iterable[tuple["Rule", Sequence[Leaf]]]:
        """The rules that it consists of, each with those of the `leaves` that it is asked about."""
        return ()

    def fill(self, leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
        """`spec` with more of the dimensions of `leaf` sharded: the right-hand side of `&`."""
        added = self(leaf)
        if not isinstance(added, PartitionSpec):
            return spec
        for dim in free_dimensions(spec, leaf.ndim):
            entry = entries_of(added, leaf.ndim)[dim]
            names = axis_names(entry)
            if names and not used_axes(spec).intersection(names):
                spec = with_entry(spec, dim, entry)
        return spec

    def __or__(self, other: AnyRule) -> "Rule":
        return FirstOf(as_rule(self), as_rule(other)) if is_rule(other) else NotImplemented

    def __ror__(self, other: AnyRule) -> "Rule":
        return FirstOf(as_rule(other), as_rule(self)) if is_rule(other) else NotImplemented

    def __and__(self, other: AnyRule) -> "Rule":
        return Both(as_rule(self), as_rule(other)) if is_rule(other) else NotImplemented

    def __rand__(self, other: AnyRule) -> "Rule":
        return Both(as_rule(other), as_rule(self)) if is_rule(other) else NotImplemented


def as_rule(rule: AnyRule) -> Rule:
    """Wraps any callable as a `Rule`."""
    if isinstance(rule, Rule) and type(rule).faults is Rule.faults:
        return rule
    return Plain(rule)


@dataclass(frozen=True, repr=False)
class Plain(Rule):
    """A function or other callable, which may return another rule."""

    function: AnyRule

    def __call__(self, leaf: Leaf) -> Any:
        return self._chain(leaf)[1]

    def why(self, leaf: Leaf) -> str:
        rules, _ = self._chain(leaf)
        why = getattr(rules[-1], "why", None)
        if why is not None:
            return why(leaf)
        return getattr(rules[-1], "__qualname__", None) or repr(rules[-1])

    def contradictions(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        own = faults_of(self.function, leaves) if leaves else []
        return [*own, *super().contradictions(leaves)]

    def _chain(self, leaf: Leaf) -> tuple[list[AnyRule], Any]:
        """The rules called in turn, and the result of the last one."""
        rules, placement = [self.function], ask(self.function, leaf)
        while is_rule(placement):
            if len(rules) == MOST_RULES:
                raise ValueError(f"the rule {placement!r} returns itself")
            rules.append(placement)
            placement = ask(placement, leaf)
        return rules, placement

    def _parts(self, leaves: Sequence[Leaf]) -> Iterable[tuple[Rule, Sequence[Leaf]]]:
        results = ((ask(self.function, leaf), leaf) for leaf in leaves)
        return leaves_by_rule((as_rule(rule), leaf) for rule, leaf in results if is_rule(rule))

    def __repr__(self) -> str:
        return repr(self.function)


@dataclass(frozen=True, repr=False)
class Pair(Rule):
    first: Rule
    second: Rule

    def _parts(self, leaves: Sequence[Leaf]) -> Iterable[tuple[Rule, Sequence[Leaf]]]:
        return [(self.first, leaves), (self.second, leaves)]


class FirstOf(Pair):
    def __call__(self, leaf: Leaf) -> Any:
        placement = self.first(leaf)
        return self.second(leaf) if placement is PASS else placement

    def why(self, leaf: Leaf) -> str:
        return self._chosen(leaf).why(leaf)

    def fill(self, leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
        return self._chosen(leaf).fill(leaf, spec)

    def contradictions(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        passed = [leaf for leaf in leaves if self.first(leaf) is PASS]
        return [*self.first.contradictions(leaves), *self.second.contradictions(passed)]

    def _chosen(self, leaf: Leaf) -> Rule:
        return self.second if self.first(leaf) is PASS else self.first

    def __repr__(self) -> str:
        return f"{self.first!r} | {self.second!r}"


class Both(Pair):
    def __call__(self, leaf: Leaf) -> Any:
        placement = self.first(leaf)
        if placement is PASS:
            return self.second(leaf)
        if isinstance(placement, PartitionSpec):
            return self.second.fill(leaf, placement)
        return placement

    def why(self, leaf: Leaf) -> str:
        placement = self.first(leaf)
        if placement is PASS:
            return self.second.why(leaf)
        reason = self.first.why(leaf)
        if self(leaf) == placement:
            return reason
        return f"{reason}, then {self.second.why(leaf)}"

    def fill(self, leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
        return self.second.fill(leaf, self.first.fill(leaf, spec))

    def contradictions(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        results = [(leaf, self.first(leaf)) for leaf in leaves]
        filled = [leaf for leaf, result in results if isinstance(result, PartitionSpec)]
        passed = [leaf for leaf, result in results if result is PASS]
        return [
            *self.first.contradictions(leaves),
            *self.second.contradictions([*filled, *passed]),
            *(fault for leaf in filled for fault in self._unfit(leaf)),
        ]

    def _unfit(self, leaf: Leaf) -> Iterator[Fault]:
        """The fault if the second rule can't shard a leaf that the first has sharded."""
        placement = self.second(leaf)
        if placement is PASS or placement is None:
            return
        request, name = f"... & {self.second!r}", name_of(leaf.path)
        if not isinstance(placement, PartitionSpec):
            reason = f"{placement!r} can't shard what another rule leaves unsharded"
            yield Fault(name, leaf.shape, request, reason, "return a PartitionSpec, or PASS")
        elif len(placement) > leaf.ndim:
            entries = f"{show_spec(placement)} has {len(placement)} entries"
            reason = f"{entries}, for an array of rank {leaf.ndim}"
            yield Fault(name, leaf.shape, request, reason, f"give at most {leaf.ndim}")

    def __repr__(self) -> str:
        sides = (self.first, self.second)
        return " & ".join(f"({r!r})" if isinstance(r, FirstOf) else repr(r) for r in sides)


def leaves_by_rule(pairs: Iterable[tuple[Rule, Leaf]]) -> Iterable[tuple[Rule, list[Leaf]]]:
    """Groups leaves by rule."""
    asked: dict[int, tuple[Rule, list[Leaf]]] = {}
    for rule, leaf in pairs:
        key = id(rule.function if isinstance(rule, Plain) else rule)
        asked.setdefault(key, (rule, []))[1].append(leaf)
    return asked.values()


# The leaves of a model have few different specs, so these functions remember their results.


@lru_cache
def used_axes(spec: PartitionSpec) -> frozenset[Any]:
    """The mesh axes that `spec` already uses."""
    return frozenset(axes_in(spec)) | spec.unreduced | spec.reduced


@lru_cache
def free_dimensions(spec: PartitionSpec, ndim: int) -> Sequence[int]:
    """The dimensions that `spec` doesn't shard."""
    return [dim for dim, entry in enumerate(entries_of(spec, ndim)[:ndim]) if entry is None]


@lru_cache
def with_entry(spec: PartitionSpec, dim: int, entry: Any) -> PartitionSpec:
    entries = list(entries_of(spec, dim + 1))
    entries[dim] = entry
    return spec.update(partitions=entries)
