"""`tensor_parallel`: which layers are sharded by their outputs, and which by their inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
from jax.sharding import PartitionSpec

from ..errors import Fault, because
from ..placement import PASS, trimmed
from ..tree import Leaf, Pattern, joined, name_of
from .axes import namings
from .path import is_in_a_state, suggestion
from .rule import Axes, Rule
from .simple import checked_axis, number_of_parts


def tensor_parallel(
    axis: Axes, *, column: str | Sequence[str] = (), row: str | Sequence[str] = ()
) -> Rule:
    """Tensor parallelism as in Megatron: layers in pairs, the first sharded by its outputs, and the
    second by its inputs, so that activations are summed once per pair.

    `tensor_parallel("model", column=["up", "gate"], row=["down"]) | replicated()` is all that a
    gated MLP needs.

    A *column* layer has its weight and bias sharded by outputs. A *row* layer has its weight
    sharded by inputs, and its bias replicated. Both can be `eqx.nn.Linear`, convolutions, and
    classes whose annotations name the dimensions `"out"` and `"in"`. These need no pattern:

    | layer | how it is sharded |
    |---|---|
    | `eqx.nn.MultiheadAttention` | by heads |
    | `eqx.nn.MLP` | alternately by outputs and inputs; a last one without a pair is replicated |
    | `eqx.nn.Embedding`, and a linear layer named `head` | by the vocabulary |

    Layers may be stacked. The rule returns PASS for all other leaves, except that leaves of rank 0
    are replicated. Patterns take precedence over the table; to keep one of its layers replicated,
    let another rule decide first: `by_path({"head.*": P()}) | tensor_parallel(...)`.

    **Arguments:**

    - `axis`: the mesh axis, or a tuple of them.
    - `column`, `row`: patterns for layers, as in `mylib.rules.by_path`: `"up"`, or
        `"blocks.*.mlp.up"`.

    **Returns:**

    A `mylib.rules.Rule`. Using it raises if a pattern matches no layer, if a leaf has no
    dimension of outputs or inputs, or if the axis doesn't divide the heads.

    **Raises:**

    `TypeError` if `axis` is not a mesh axis.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=4, model=2)
        model = eqx.nn.MLP(8, 8, 64, 1, key=jax.random.key(0))
        rule = mylib.rules.tensor_parallel("model") & mylib.rules.fsdp("data")
        model = mylib.filter_shard(model, rule, mesh=mesh)
        assert model.layers[1].weight.sharding.spec == P(None, "model")
        ```
    """
    return TensorParallel(
        checked_axis("tensor_parallel", axis), (*_patterns(column, "out"), *_patterns(row, "in"))
    )


def _patterns(texts: str | Sequence[str], side: str) -> Iterator[tuple[Pattern, str]]:
    for text in [texts] if isinstance(texts, str) else texts:
        yield Pattern(text), side


_SIDES = {"out": "column", "in": "row"}


class Role(NamedTuple):
    """The dimension to shard, by the leaf's name (None: it is replicated), and the reason."""

    dimension: str | None
    why: str


@dataclass(frozen=True, repr=False)
class TensorParallel(Rule):
    axis: Axes
    patterns: tuple[tuple[Pattern, str], ...]

    def __call__(self, leaf: Leaf) -> Any:
        role = self._role(leaf)
        named = [] if role is None else namings(leaf)
        if role is None or not named:  # A factored moment has fewer dimensions than its weight.
            return PASS if leaf.ndim else PartitionSpec()
        names = next((names for names in named if role.dimension in names), ())
        entries = [self.axis if name and name == role.dimension else None for name in names]
        return PartitionSpec(*trimmed(entries))

    def why(self, leaf: Leaf) -> str:
        role = self._role(leaf)
        if role is None:
            return f"{self._name}: no role" + ("" if leaf.ndim else ", a leaf of rank 0")
        whole = "" if self(leaf) else ", replicated"
        return f"{self._name}: {role.why}{whole}"

    def contradictions(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        return [fault for leaf in leaves for fault in self._unfit(leaf)]

    def _unmatched(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        return [
            because(
                f"the pattern matches none of the {len(leaves)} leaves, nor their layers",
                suggestion(pattern, leaves),
                f"{self._name}: {_SIDES[side]} {pattern.text!r}",
            )
            for pattern, side in self.patterns
            if not any(_is_at(pattern, leaf.parts) for leaf in leaves)
        ]

    def _matching(self, leaf: Leaf) -> list[tuple[Pattern, str]]:
        return [(p, side) for p, side in self.patterns if _is_at(p, leaf.parts)]

    def _role(self, leaf: Leaf) -> Role | None:
        for pattern, side in self._matching(leaf):
            return Role(side, f"{_SIDES[side]}, pattern {pattern.text!r}")
        return _role_in_equinox(leaf)

    def _unfit(self, leaf: Leaf) -> Iterator[Fault]:
        name, matching = name_of(leaf.path), self._matching(leaf)
        patterns = ", ".join(f"{_SIDES[side]} {pattern.text!r}" for pattern, side in matching)
        request = f"{self._name}: {patterns}" if patterns else self._name
        if len({side for _, side in matching}) > 1:
            fix = "make the patterns narrower: a layer is one or the other"
            yield Fault(name, leaf.shape, request, "patterns of both kinds match it", fix)
        sides = {name for names in namings(leaf) for name in names}.intersection(_SIDES)
        if matching and not sides and not is_in_a_state(leaf):
            reason = "it is not the weight or bias of a linear layer or a convolution"
            fix = "shard it by by_axes or by_path, or make the pattern narrower"
            yield Fault(name, leaf.shape, request, reason, fix)
        parts = number_of_parts(self.axis, leaf.mesh)
        heads = None if matching else _heads_of(leaf)
        if parts is not None and heads is not None and heads % parts:
            reason = f"its {heads} heads do not divide into the {parts} parts of {self.axis!r}"
            fix = (
                f"use a multiple of {parts} heads, or a smaller axis; or replicate them: "
                "by_path({...: P()}) | tensor_parallel(...)"
            )
            yield Fault(name, leaf.shape, request, reason, fix)

    @property
    def _name(self) -> str:
        return f"tensor_parallel({self.axis!r})"

    def __repr__(self) -> str:
        listed = {
            kind: [pattern.text for pattern, side in self.patterns if side == which]
            for which, kind in _SIDES.items()
        }
        patterns = "".join(f", {kind}={texts!r}" for kind, texts in listed.items() if texts)
        return f"tensor_parallel({self.axis!r}{patterns})"


def _is_at(pattern: Pattern, parts: tuple[str, ...]) -> bool:
    """Whether a pattern matches the path of an array, or of the layer that it belongs to."""
    return bool(pattern.ends(joined(parts)) or pattern.ends(joined(parts[:-1])))


def _role_in_equinox(leaf: Leaf) -> Role | None:
    """The role of a leaf in the layers of Equinox."""
    for node, parts in leaf.holders:
        match node:
            case eqx.nn.MultiheadAttention():
                return Role("heads", "heads of MultiheadAttention")
            case eqx.nn.MLP() if parts[0] == "layers":
                return _role_in_mlp(node, int(parts[1]))
            case eqx.nn.Embedding():
                return Role("vocab", "vocabulary of Embedding")
            case eqx.nn.Linear() if leaf.parts[-2:-1] == ("head",):
                return Role("out", "vocabulary of head")
    return None


def _role_in_mlp(mlp: eqx.nn.MLP, number: int) -> Role:
    if mlp.scan:
        return Role(None, "layers of MLP(scan=True) can't alternate")
    if number % 2:
        return Role("in", "row, every other layer of MLP")
    if number == len(mlp.layers) - 1:
        return Role(None, "the last layer of MLP has no partner")
    return Role("out", "column, every other layer of MLP")


def _heads_of(leaf: Leaf) -> int | None:
    attention = (n for n, _ in leaf.holders if isinstance(n, eqx.nn.MultiheadAttention))
    return next((node.num_heads for node in attention), None)
