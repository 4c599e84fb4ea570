"""What `kept=` and `used=` of `plan` fix, on one mesh."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.tree_util as jtu
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ..._core.placement import (
    axis_names,
    current_world,
    decide,
    is_placement_leaf,
    is_rule,
    trimmed,
)
from ..._core.rules import as_rule
from ..._core.text import show_spec
from ..._core.tree import split, spread_prefix
from .trace import PlanError, TracedStep

MODEL = "model"
Entry = str | tuple[str, ...] | None
# The entries of a spec.
Spec = tuple[Entry, ...]


class ContradictionError(Exception):
    """What is fixed can't be on this mesh. The message explains why."""


@dataclass(frozen=True)
class Fixes:
    """The specs of arrays that are fixed, by their path in the tuple of arguments."""

    kept: Mapping[str, Spec]
    used: Mapping[str, Spec]

    def is_whole(self, path: str, dim: int) -> bool:
        """Whether a dimension of a weight must not be split over "model" where it is used."""
        spec = self.used.get(path, self.kept.get(path))
        return spec is not None and MODEL not in axes_at(spec, dim)


@dataclass(frozen=True)
class FixedParts:
    """What was given as `kept=` and `used=`."""

    kept: object = None
    used: object = None

    def on(self, traced: TracedStep, sizes: Mapping[str, int]) -> Fixes:
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        kept = _specs("kept", self.kept, traced, mesh)
        used = _specs("used", self.used, traced, mesh)
        for path, spec in used.items():
            name = traced.step.called(path)
            if path not in traced.in_models:
                raise PlanError(
                    f"used= fixes {name}, which is not a weight of a model that is called"
                )
            if not axes_of(spec) <= {MODEL}:
                at = show_spec(PartitionSpec(*spec))
                raise PlanError(
                    f"used= fixes {name} at {at}, and plans split weights where "
                    "they are used only over 'model': the other axes split rows, and weights are "
                    "gathered from them. Write kept= for where it is kept, or the strategy by "
                    "hand, with mylib.fully_shard"
                )
        return Fixes(kept, used)


def _specs(name: str, fixed: object, traced: TracedStep, mesh: AbstractMesh) -> dict[str, Spec]:
    specs: dict[str, Spec] = {}
    for start, (tree, placement) in _trees(name, fixed, traced).items():
        leaves = split(tree)
        entries, misfits = spread_prefix(placement, leaves, is_placement_leaf)
        each = {id(entry): _left_if_passed(entry) for entry in entries}
        entries = [each[id(entry)] for entry in entries]
        decision = decide(leaves, leaves.fill(entries), mesh, current_world())
        for fault in misfits + decision.faults:
            raise ContradictionError(f"{name}= can't be served, {fault.path}: {fault.reason}")
        for path, target in zip(leaves.paths, decision.targets, strict=True):
            # Of a sharding on a mesh of the user's own it is unknown what its axes would be here.
            if isinstance(target, NamedSharding) and target.mesh == mesh:
                specs[start + jtu.keystr(path)] = trimmed(target.spec.partitions)
            elif target is not None:
                raise PlanError(f"{name}= takes specs, as the mesh is still open, not {target!r}")
    return specs


def _trees(name: str, fixed: object, traced: TracedStep) -> dict[str, tuple[object, object]]:
    """For each path in the tuple of arguments: the tree there, and what is fixed of it."""
    if not isinstance(fixed, dict):
        models = {} if fixed is None else traced.models
        return {path: (role.module, fixed) for path, role in models.items()}
    names = traced.step.names
    unknown = next((x for x in fixed if x not in names), None)
    if unknown is not None:
        raise PlanError(f"{name}= names {unknown!r}; the step's arguments are {', '.join(names)}")
    return {f"[{i}]": (traced.step.args[i], fixed[x]) for i, x in enumerate(names) if x in fixed}


def _left_if_passed(placement: Any) -> object:
    # Where a rule passes, the plan decides, as where it says None.
    return as_rule(placement) | (lambda leaf: None) if is_rule(placement) else placement


def axes_at(spec: Spec, dim: int) -> tuple[str, ...]:
    return axis_names(spec[dim]) if dim < len(spec) else ()


def axes_of(spec: Spec) -> set[str]:
    return {axis for entry in spec for axis in axis_names(entry)}
