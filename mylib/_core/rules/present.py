"""`where_present`: placements that also work on meshes with fewer axes, and without a mesh."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec

from ..errors import Fault
from ..placement import AnyMesh, axis_names, entries_of, lacks_axis, manual_axes, restricted
from ..tree import Leaf
from .rule import AnyRule, Rule, free_dimensions, used_axes
from .simple import as_rule_or_spec


def where_present(rule: AnyRule | PartitionSpec) -> Rule:
    """Another rule, but mesh axes that the mesh doesn't have are left out of its specs, as if each
    were of size 1. Without a mesh, arrays are left alone.

    For the code of a model, which then runs on one device and on any mesh:

    ```python
    def __call__(self, x):
        x = jax.nn.gelu(x @ self.up)
        x = mylib.filter_shard(x, where_present(P("data", None, "model")))
        return x @ self.down
    ```

    Inside `shard_map` the axes that it maps over count as not there: arrays are already split over
    them.

    **Arguments:**

    - `rule`: the other rule, or one `PartitionSpec` for all leaves.

    **Returns:**

    A `mylib.rules.Rule`. An axis that is misspelt is left out, too; `mylib.explain` shows
    what was left out.

    **Raises:**

    `TypeError` if `rule` is neither a rule nor a `PartitionSpec`.

    !!! Example

        ```python
        rule = mylib.rules.where_present(P("data", "model"))
        x = jnp.ones((8, 4))
        assert mylib.filter_shard(x, rule) is x
        with jax.set_mesh(mylib.make_mesh(data=8)):
            assert mylib.filter_shard(x, rule).sharding.spec == P("data")
        ```
    """
    return WherePresent(as_rule_or_spec("where_present", rule))


@dataclass(frozen=True, repr=False)
class WherePresent(Rule):
    rule: Rule

    def __call__(self, leaf: Leaf) -> Any:
        present = _axes_of(leaf.mesh)
        if not present:
            return None
        placement = self.rule(leaf)
        return restricted(placement, present) if isinstance(placement, PartitionSpec) else placement

    def fill(self, leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
        present = _axes_of(leaf.mesh)
        if not present:
            return spec
        filled = self.rule.fill(leaf, spec)
        # The entries of the other rule are not this one's.
        entries = entries_of(filled, leaf.ndim)
        added = {
            name for dim in free_dimensions(spec, leaf.ndim) for name in axis_names(entries[dim])
        }
        return restricted(filled, present | (used_axes(filled) - added))

    def why(self, leaf: Leaf) -> str:
        present = _axes_of(leaf.mesh)
        if not present:
            return "left alone, there is no mesh"
        reason, placement = self.rule.why(leaf), self.rule(leaf)
        asked = used_axes(placement) if isinstance(placement, PartitionSpec) else set[str]()
        absent = ", ".join(map(repr, sorted(asked - present)))
        return f"{reason}; without {absent}, which the mesh doesn't have" if absent else reason

    def contradictions(self, leaves: Sequence[Leaf]) -> Sequence[Fault]:
        placed = [leaf for leaf in leaves if _axes_of(leaf.mesh)]
        return [f for f in self.rule.contradictions(placed) if not lacks_axis(f)]

    def _parts(self, leaves: Sequence[Leaf]) -> Iterable[tuple[Rule, Sequence[Leaf]]]:
        return [(self.rule, leaves)]

    def __repr__(self) -> str:
        return f"where_present({self.rule!r})"


def _axes_of(mesh: AnyMesh | None) -> set[Any]:
    """The axes that can be named here."""
    return set() if mesh is None else set(mesh.axis_names).difference(manual_axes())
