"""`resolve`: turns a placement into a target for every array leaf, or reports all faults."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.experimental.layout import Format
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)
from jaxtyping import PyTree

from ..contexts import on_one_device
from ..errors import Fault, PlacementError, because
from ..text import show_spec
from ..tree import (
    MISFIT,
    Kind,
    Leaf,
    Leaves,
    canonical_dtype,
    is_none,
    is_of_keys,
    is_placed,
    name_of,
    split,
    spread_prefix,
)
from .checks import (
    show,
    show_mesh,
    unfit_layout,
    unfit_order,
    unfit_partial_sums,
    unfit_shape,
    unfit_spec,
    unfit_staged,
)
from .context import World, current_world
from .shardings import AnyMesh, Target, has_partial_sums, sharding_of


class _Passed:
    def __repr__(self) -> str:
        return "PASS"


PASS: Final = _Passed()
"""A rule's result for a leaf that it doesn't decide."""

# The longest chain of rules that return one another. A loop can't be recognised: each access to a
# method makes another object.
MOST_RULES = 32
_PLACEMENTS = PartitionSpec | Sharding | jax.Device | Format
Rule = Callable[[Leaf], Any]
Placement = jax.Device | Sharding | Format | PartitionSpec | Rule | None
"""Where an array goes: a device, a `jax.sharding.Sharding`, a `Format`, a `PartitionSpec` (over the
given mesh, or that of `jax.set_mesh`), a rule (a callable from `mylib.Leaf` to any of these),
or None to leave the array alone. Every verb also takes a PyTree prefix of these.
"""

# The target of a placement for leaves of one kind and shape, and its faults. The caller fills in
# their `path`, and the `request` of those that a `Refusal` or a `Fit` finds.
Verdict = tuple[Target | None, list[Fault]]
Refusal = Callable[[Target], Iterator[Fault]]
Fit = Callable[[Target, tuple[int, ...]], Iterator[Fault]]


def resolve(
    tree: PyTree[Any], placement: PyTree[Placement], /, mesh: AnyMesh | None = None
) -> PyTree[Any]:
    """Determines the target of every array of a tree, without moving anything.

    Every verb does this first. Only shapes and dtypes are read, so the tree may be abstract
    (`equinox.filter_eval_shape`).

    **Arguments:**

    - `tree`: any PyTree.
    - `placement`: a device, sharding, `Format`, `PartitionSpec`, None, a rule, or a PyTree prefix
        of those.
    - `mesh`: the mesh for a `PartitionSpec`; by default the mesh of `jax.set_mesh`.

    **Returns:**

    A PyTree of the structure of `tree`, with a `jax.sharding.Sharding` or `Format` for every array
    leaf that has a placement, and None for all others. It is itself a placement.

    **Raises:**

    `mylib.PlacementError`, naming every leaf that can't be placed as requested.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        tree = {"x": jnp.zeros((16, 3)), "name": "x"}
        targets = mylib.resolve(tree, P("data"), mesh=mesh)
        assert targets == {"x": NamedSharding(mesh, P("data")), "name": None}
        ```
    """
    leaves = split(tree)
    return leaves.fill(resolve_leaves(leaves, placement, mesh, current_world()))


def resolve_leaves(
    leaves: Leaves,
    placement: PyTree[Placement],
    mesh: AnyMesh | None,
    world: World,
    refuse: Refusal | None = None,
) -> list[Target | None]:
    """`resolve` on a flattened tree. `refuse` yields the faults of a target that the calling
    verb can't serve.
    """
    decision = decide(leaves, placement, mesh, world, refuse)
    if decision.faults:
        raise PlacementError(decision.faults)
    return decision.targets


@dataclass
class Decision:
    """The placement requested for each array leaf, and its target; `mesh` is the mesh of specs."""

    entries: list[Any]
    targets: list[Target | None]
    faults: list[Fault]
    faulty: set[int]
    mesh: AnyMesh | None


def decide(
    leaves: Leaves,
    placement: PyTree[Placement],
    mesh: AnyMesh | None,
    world: World,
    refuse: Refusal | None = None,
    fit: Fit = unfit_shape,
) -> Decision:
    """`resolve_leaves` without raising: it returns the faults. `fit` yields the faults of a
    target that an array of this shape can't have.
    """
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        reason, fix = f"a {type(mesh).__name__} is not a mesh", "pass a `jax.sharding.Mesh`"
        raise PlacementError([because(reason, fix, f"mesh={mesh!r}")])
    if on_one_device.value:
        count = len(leaves.arrays)
        return Decision([None] * count, [None] * count, [], set(), None)
    if not leaves.positions:
        _refuse_mistaken(leaves.tree, placement)
    entries, misfits = spread_prefix(placement, leaves, is_placement_leaf)
    return _Resolver(leaves, mesh, world, refuse, fit).run(entries, misfits)


def _refuse_mistaken(tree: object, placement: object) -> None:
    """Trees without arrays are ordinary, such as an activation, or the state of a transformation
    that has none. But a class, or an optimiser, was taken for something else, and if the placement
    contains arrays, the arguments are probably swapped.
    """
    if isinstance(tree, type) and issubclass(tree, eqx.Module):
        raise TypeError(f"{tree.__qualname__} is a class: pass an instance of the model")
    if isinstance(tree, tuple) and callable(getattr(tree, "init", None)) and placement is not None:
        raise TypeError(
            f"the tree is an optimiser, a {type(tree).__name__}, which has no arrays. Place its "
            "state: filter_shard(optim.init(params), placement)"
        )
    array = next(iter(split(placement).arrays), None)
    if array is not None:
        request = f"a placement with arrays in it, the first of shape {tuple(array.shape)}"
        reason = "the tree has no array, and an array is not a placement"
        fix = "swap them: the tree comes first, and the placement second"
        raise PlacementError([because(reason, fix, request)])


def ask(rule: Rule, leaf: Leaf) -> Any:
    """The result of a rule for a leaf."""
    # `equinox.if_array` would not count a `Leaf` as an array.
    return rule.axis if isinstance(rule, eqx.if_array) else rule(leaf)


def leaf_at(leaves: Leaves, i: int, mesh: AnyMesh | None) -> Leaf:
    """The description of a leaf that rules are called with."""
    x = leaves.arrays[i]
    return Leaf(leaves.paths[i], tuple(x.shape), canonical_dtype(x), mesh, leaves.walker)


def is_placement_leaf(x: object) -> bool:
    return x is None or isinstance(x, _PLACEMENTS) or is_rule(x)


def is_rule(x: object) -> bool:
    """Whether `x` can be called for a placement: a function, or a node, such as a Module or a
    `Partial`, that holds neither placements nor arrays.
    """
    # A mesh is callable only because it is a decorator, and a class makes something else.
    if not callable(x) or isinstance(x, Mesh | type):
        return False
    # A Module of placements is a prefix, though it can be called. So is one that holds only None.
    held = jtu.tree_leaves(x, is_leaf=is_none)
    if any(isinstance(y, _PLACEMENTS) or is_placed(y) for y in held):
        return False
    return not held or not all(map(is_none, held))


@lru_cache(maxsize=256)
def _faults_of_spec(spec: PartitionSpec, mesh: AnyMesh) -> Sequence[Fault]:
    # Programs use few pairs, and place by them in every step.
    return tuple(unfit_spec(spec, mesh))


@dataclass
class _Resolver:
    """The state of one `resolve`."""

    leaves: Leaves
    mesh: AnyMesh | None
    world: World
    refuse: Refusal | None
    fit: Fit
    asked: dict[int, tuple[Rule, list[Leaf]]] = field(default_factory=dict)
    # Trees are repetitive, so each pair of a placement and a shape is checked once. Keyed by id,
    # since hashing a sharding costs more; `alive` keeps the keyed objects alive.
    verdicts: dict[tuple[object, ...], Verdict] = field(default_factory=dict)
    alive: list[object] = field(default_factory=list)
    # Rules return the same few specs again and again.
    specs: dict[PartitionSpec, PartitionSpec] = field(default_factory=dict)
    mesh_given: bool = False

    def run(self, entries: list[Any], misfits: list[Fault]) -> Decision:
        self.mesh_given = self.mesh is not None
        if not self.mesh_given:
            self.mesh = _mesh_of_specs(self.world)
        faults, faulty = list(misfits), set[int]()
        targets: list[Target | None] = []
        verdicts = self.verdicts
        for i, (x, kind, entry) in enumerate(
            zip(self.leaves.arrays, self.leaves.kinds, entries, strict=True)
        ):
            if entry is None or entry is MISFIT:
                targets.append(None)
                if entry is MISFIT:
                    faulty.add(i)
                continue
            verdict = verdicts.get((id(entry), kind, x.shape)) or self.judge(i, x, kind, entry)
            target, reasons = verdict
            targets.append(target)
            if reasons:
                faulty.add(i)
                faults += [self.leaves.at(i, fault) for fault in reasons]
        for rule, seen in self.asked.values():
            faults += self.named(faults_of(rule, seen), seen)
        return Decision(entries, targets, faults, faulty, self.mesh)

    def judge(self, i: int, x: Any, kind: Kind, entry: Any) -> Verdict:
        asked: list[object] = []
        if is_rule(entry) and i in self.leaves.self_placed:
            return None, []
        while is_rule(entry):
            if len(asked) == MOST_RULES:
                itself = because("the rule returns itself", "return a placement", repr(entry))
                return None, [itself]
            asked.append(entry)
            entry = self.ask(i, entry)
        if entry is None:
            return None, []
        written, size, key = entry, None, (id(entry), kind, x.shape)
        if self.world.staged or isinstance(entry, Format):
            # Not only the shape matters here: also the mesh of a traced value, and the dtype for a
            # layout.
            abstract = kind is Kind.ABSTRACT
            size = self.world.size_at(x) if self.world.staged and not abstract else None
            key = (*key, size, x.dtype)
        if asked and self.mesh is None and isinstance(entry, PartitionSpec):
            # Without a mesh the rule has no choice of axes, so the error shows the rule itself.
            written = asked[0]
            key = (*key, id(written))
        verdict = self.verdicts.get(key)
        if verdict is None:
            verdict = self.try_target(entry, written, x, kind, size)
            if not has_partial_sums(entry):
                self.alive += [entry, written]
                self.verdicts[key] = verdict
            elif is_of_keys(x):  # not cached: these verdicts depend on the dtype, and are rare
                fault = because("keys can't be summed", "leave out unreduced= and reduced=")
                verdict = verdict[0], verdict[1] + self.requested(written, [fault])
        return verdict

    def ask(self, i: int, rule: Rule) -> Any:
        leaf = leaf_at(self.leaves, i, self.mesh)
        self.asked.setdefault(id(rule), (rule, []))[1].append(leaf)
        try:
            answer = ask(rule, leaf)
        except Exception as error:
            name = self.leaves.name_at(leaf.path)
            error.add_note(f"(raised by the rule {rule!r} for the leaf {name})")
            raise
        return self.specs.setdefault(answer, answer) if type(answer) is PartitionSpec else answer

    def named(self, faults: list[Fault], seen: Sequence[Leaf]) -> list[Fault]:
        """A rule's faults of leaves, which it knows by their paths."""
        if not faults:
            return []
        names = {name_of(leaf.path): self.leaves.name_at(leaf.path) for leaf in seen}
        names[""] = self.leaves.naming(())
        return [replace(fault, path=names.get(fault.path, fault.path)) for fault in faults]

    def try_target(
        self, entry: object, written: object, x: Any, kind: Kind, size: int | None
    ) -> Verdict:
        try:
            target = self.target(entry)
        except _Misfit as misfit:
            return None, self.requested(written, misfit.faults)
        faults = [] if kind is Kind.ABSTRACT else list(self.unfit_world(target, size))
        faults = faults or list(self.fit(target, tuple(x.shape)))
        if isinstance(target, Format) and target.layout is not None:
            faults = faults or list(unfit_layout(target.layout, x))
        return target, self.requested(written, faults) if faults else []

    def requested(self, entry: object, faults: Iterable[Fault]) -> list[Fault]:
        request = show(entry, self.mesh)
        return [replace(fault, request=request) for fault in faults]

    def target(self, entry: object) -> Target:
        """The target that a placement means."""
        if isinstance(entry, PartitionSpec):
            return NamedSharding(self.checked_mesh(entry), entry)
        if isinstance(entry, jax.Device):
            if self.mesh_given and isinstance(self.mesh, Mesh) and entry not in self.mesh.devices:
                reason = f"that device is not in {show_mesh(self.mesh)}"
                raise _Misfit(because(reason, "leave out `mesh=`"))
            return SingleDeviceSharding(entry)
        if isinstance(entry, Format) and not isinstance(entry.sharding, Sharding):
            raise _Misfit(because("the format has no sharding", "write Format(layout, sharding)"))
        if not isinstance(entry, Sharding | Format):
            raise _Misfit(_not_a_placement(entry))
        sharding = sharding_of(entry)
        if has_partial_sums(sharding) and isinstance(sharding, NamedSharding):
            faults = list(unfit_partial_sums(sharding.spec, sharding.mesh))
            if faults:
                raise _Misfit(*faults)
        return entry

    def checked_mesh(self, spec: PartitionSpec) -> AnyMesh:
        mesh = self.mesh
        if mesh is None:
            reason = "a PartitionSpec needs a mesh, and there is none here"
            fix = "pass `mesh=`, or call this under `jax.set_mesh(mesh)`"
            raise _Misfit(because(reason, fix))
        faults = _faults_of_spec(spec, mesh)
        if faults:
            raise _Misfit(*faults)
        return mesh

    def unfit_world(self, target: Target, size: int | None) -> Iterator[Fault]:
        """Faults of a target in this context; elsewhere it may be fine."""
        sharding = sharding_of(target)
        if self.world.staged:
            yield from unfit_staged(sharding, self.world, size)
            if self.fit is unfit_shape:  # else by shard_map
                yield from unfit_order(sharding, self.world)
        elif isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
            yield because(
                "an abstract mesh has no devices to put an array on",
                "pass a `jax.sharding.Mesh`, or give abstract leaves (`jax.ShapeDtypeStruct`)",
            )
        if self.refuse is not None:
            yield from self.refuse(target)


class _Misfit(Exception):
    def __init__(self, *faults: Fault):
        self.faults = faults


def faults_of(rule: Rule, leaves: Sequence[Leaf]) -> list[Fault]:
    """The faults that a rule's own `faults` method finds for the leaves it was called with."""
    find = getattr(rule, "faults", None)
    if find is None:
        return []
    faults = find(leaves)
    return [
        fault
        if isinstance(fault, Fault)
        else because(fault, "fix the rule, or drop that part of it", repr(rule))
        for fault in ([faults] if isinstance(faults, str) else faults)
    ]


def _mesh_of_specs(world: World) -> AnyMesh | None:
    if world.staged and not world.mesh.empty:
        return world.mesh
    return world.devices if world.mesh.empty or world.devices is not None else world.mesh


def _not_a_placement(entry: object) -> Fault:
    if entry is PASS:
        return because(
            "the rule returns PASS for this leaf, and no other rule follows it",
            "end the rule with `| replicated()`, or return None to leave the leaf alone",
        )
    kind = f"an object of type {type(entry).__name__}"
    fix = "give a device, a Sharding, a Format, a PartitionSpec, None or a rule"
    if isinstance(entry, str):
        kind, fix = "an axis name", f"write {show_spec(PartitionSpec(entry))}"
    elif isinstance(entry, type):
        kind, fix = f"the class {entry.__name__}", f"make one: {entry.__name__}(...)"
    elif isinstance(entry, Mesh | AbstractMesh):
        kind, fix = "a mesh", "pass it as `mesh=`, with a PartitionSpec"
    return because(f"{kind} is not a placement", fix)
