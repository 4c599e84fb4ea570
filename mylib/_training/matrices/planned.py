"""Plans how the matrices of a model are updated, from shapes alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import PyTree

from ..._core.contexts import in_own_dtypes, on_one_device, plan_in_force
from ..._core.errors import PlacementError, because
from ..._core.placement import (
    AnyMesh,
    Placement,
    current_world,
    grounded,
    planning_mesh,
    resolve_leaves,
    sharding_of,
    show_mesh,
)
from ..._core.products import products_in
from ..._core.tree import Leaves, split
from .alike import is_by_element, key_of
from .belongs import Belonging, belonging
from .group import MatrixGroup
from .layout import GroupUpdate, Layout
from .matrices import Matrices, MatrixDims, matrices_in
from .muon import check_numbers
from .transform import Transform, Tree


@dataclass(frozen=True)
class Request:
    """The arguments of `by_matrix`."""

    transform: Transform
    kept: PyTree[Placement] | None
    over: tuple[str, ...] | None
    matrices: Matrices | None
    dtype: DTypeLike | None
    mesh: AnyMesh | None

    def layout(self, params: Tree) -> Layout | None:
        """None on one device: there the transform can do its work itself."""
        if on_one_device.value:
            return None
        leaves = split(params)
        if len(leaves.positions) != len(leaves.all):
            raise ValueError("by_matrix takes a tree of arrays: eqx.filter(model, eqx.is_array)")
        is_here = not _are_on_several(leaves.arrays)
        leaves = leaves.with_shapes(leaves.arrays)
        shardings = self._shardings(leaves, is_here)
        dims = matrices_in(leaves, self.matrices, self.mesh)
        if not shardings:
            return None
        mesh = shardings[0].mesh
        self._check_over(mesh)
        is_alone = mesh.size == 1 and not any(d and d.batch for d in dims)
        if is_alone and not self._is_planned:
            return None
        try:
            return _Planner(self, leaves, dims, mesh).layout().on(shardings)
        except ZeroDivisionError as error:
            empty = ", ".join(leaves.name(i) for i, x in enumerate(leaves.arrays) if not x.size)
            instead = f"leave {empty} out of the tree, as there is nothing to update"
            raise ValueError(f"by_matrix: {instead}: the transform divides by zero") from error

    def as_sent(self, updates: Tree) -> Tree:
        """Updates on one device, rounded as they are where they are sent."""
        if self.dtype is None or not on_one_device.value or in_own_dtypes.value:
            return updates
        return jax.tree.map(lambda x: x.astype(self.dtype).astype(x.dtype), updates)

    @property
    def _is_planned(self) -> bool:
        """Whether `mylib.plan` decides where weights are kept."""
        return self.kept is None and self.mesh is None

    def _check_over(self, mesh: AnyMesh) -> None:
        for axis in self.over or ():
            # A plan's mesh may lack some of them.
            if axis not in mesh.shape and not self._is_planned:
                has_no = f"{show_mesh(mesh)} has no axis {axis!r}"
                raise ValueError(f"by_matrix: over={self.over!r}: {has_no}")

    def _shardings(self, leaves: Leaves, is_here: bool) -> list[NamedSharding]:
        world = current_world()
        kept, mesh = self.kept, self.mesh
        if self._is_planned and plan_in_force.value is not None:
            kept, mesh = plan_in_force.value
        elif self._is_planned and world.mesh.size <= 1 and is_here:
            kept, mesh = PartitionSpec(), planning_mesh()
        targets = resolve_leaves(leaves, kept, mesh, world)
        places = [None if t is None else grounded(sharding_of(t), world) for t in targets]
        shardings = [s for s in places if isinstance(s, NamedSharding)]
        faults = [
            leaves.at(i, because("by_matrix needs to know where it is kept", _FIX, "by_matrix"))
            for i, s in enumerate(places)
            if not isinstance(s, NamedSharding) or s.mesh != shardings[0].mesh
        ]
        if faults:
            raise PlacementError(faults)
        return shardings


_FIX = (
    "give `kept` as a rule or a PartitionSpec for every leaf, all on one mesh (None is for a step "
    "that mylib.plan places)"
)


def _are_on_several(arrays: Sequence[object]) -> bool:
    here = [x for x in arrays if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    return any(x.sharding.num_devices > 1 for x in here)


class _Planner:
    def __init__(
        self, request: Request, leaves: Leaves, dims: Sequence[MatrixDims | None], mesh: AnyMesh
    ):
        self.request, self.leaves, self.dims, self.mesh = request, leaves, dims, mesh
        self.start, self.program = cache(self._start), cache(self._program)
        # What the transform sees: matrices, each of them for itself.
        self.seen = [
            leaf if d is None else jax.ShapeDtypeStruct(d.of_matrix(leaf.shape), leaf.dtype)
            for leaf, d in zip(leaves.arrays, dims, strict=True)
        ]
        self.names = [leaves.name(i) for i in range(len(self.seen))]
        self.matrices = [i for i, d in enumerate(dims) if d is not None and not self._stays(i)]
        self.others = [i for i in range(len(dims)) if i not in self.matrices]

    def only(self, numbers: Sequence[int]) -> Tree:
        chosen = set(numbers)
        seen = [struct if i in chosen else None for i, struct in enumerate(self.seen)]
        return self.leaves.treedef.unflatten(seen)

    def layout(self) -> Layout:
        every = self.only(range(len(self.seen)))
        transform = self.request.transform
        check_numbers(transform, every, {self.leaves.paths[i]: self.seen[i] for i in self.matrices})
        belongs = belonging(transform, every, self.names, self.matrices)
        others = jtu.tree_leaves_with_path(self.state(*self.others)) if self.others else []
        return Layout(
            tree=self.leaves.treedef,
            over=self.request.over,
            updates=tuple(self.updates(belongs)),
            others=tuple(self.others),
            others_at=self.at(belongs, *self.others) if self.others else (),
            others_like=tuple(self._like(belongs.owner[path], leaf) for path, leaf in others),
            plain=belongs.tree,
            plain_dtypes=belongs.dtypes,
            shapes=tuple(tuple(leaf.shape) for leaf in self.leaves.arrays),
            kept=(),
        )

    def updates(self, belongs: Belonging) -> Iterator[GroupUpdate]:
        """Leaves of one shape are a group if their states at the start and their updates are equal
        programs, traced in their places in the tree, that share the leaves of the state that belong
        to no weight.
        """
        keys: list[object] = []
        members: list[list[int]] = []
        for i in self.matrices:
            leaf, program = self.leaves.arrays[i], self.program(i)
            alone, beside = program.out_avals[0].dtype, belongs.of_updates[i]
            if alone != beside:
                raise ValueError(_OTHER_DTYPE.format(self.names[i], beside, alone))
            owners = [(n, belongs.owner[belongs.paths[n]]) for n in self.at(belongs, i)]
            common = [n for n, owner in owners if owner is None]
            starts = key_of(self.start(i)[0])
            key = leaf.shape, leaf.dtype, self.dims[i], common, starts, key_of(program)
            if key not in keys:
                keys.append(key)
                members.append([])
            members[keys.index(key)].append(i)
        for numbers in members:
            leaf, dims = self.leaves.arrays[numbers[0]], self.dims[numbers[0]]
            assert dims is not None
            group = MatrixGroup(
                tuple(numbers), leaf.shape, leaf.dtype, PartitionSpec(), dims, (), self.mesh, 0,
                self.request.dtype,
            )  # fmt: skip
            yield self.update(group, _work(self.program(numbers[0])), belongs)

    def at(self, belongs: Belonging, *numbers: int) -> tuple[int, ...]:
        """The numbers of the leaves of some weights' state, in the state of the whole tree."""
        paths = [path for path, _ in jtu.tree_leaves_with_path(self.state(*numbers))]
        if not {belongs.owner.get(path, -1) for path in paths} <= {None, *numbers}:
            raise ValueError(
                "by_matrix: the state of a weight isn't at the weight's place in the tree of the "
                f"optimiser's state, but at {jtu.keystr(paths[0])}: keep it in a tree like that of "
                "the weights"
            )
        return tuple(map(belongs.paths.index, paths))

    def update(self, group: MatrixGroup, work: int | None, belongs: Belonging) -> GroupUpdate:
        at = tuple(self.at(belongs, i) for i in group.numbers)
        return GroupUpdate(
            group=group,
            work=work,
            example=group.numbers[0],
            state=jtu.tree_structure(self.state(group.numbers[0])),
            is_own=tuple(belongs.owner[belongs.paths[n]] is not None for n in at[0]),
            at=at,
            reads_weights=not belongs.needs_params.isdisjoint(group.numbers),
            init_reads=not belongs.init_reads.isdisjoint(group.numbers),
        )

    def _like(self, owner: int | None, struct: jax.ShapeDtypeStruct) -> int | None:
        return owner if owner is not None and struct.shape == self.seen[owner].shape else None

    def _stays(self, number: int) -> bool:
        """Whether a matrix is updated where it is kept, as Adam's are: it need not be whole."""
        is_one = self.seen[number].shape == tuple(self.leaves.arrays[number].shape)
        return is_one and is_by_element(self.program(number))

    def state(self, *numbers: int) -> Tree:
        """The state of some leaves."""
        return self.start(*numbers)[1]

    def _start(self, *numbers: int) -> tuple[ClosedJaxpr, Tree]:
        init = self.request.transform.init
        return jax.make_jaxpr(init, return_shape=True)(self.only(numbers))

    def _program(self, number: int) -> ClosedJaxpr:
        tree, state = self.only([number]), self.state(number)
        try:
            return jax.make_jaxpr(self.request.transform.update)(tree, state, tree)
        except TypeError as error:
            if "required keyword-only argument" not in str(error):
                raise
            raise ValueError(
                "by_matrix: put the part of the optimiser that needs a keyword outside, "
                f"`optax.chain(by_matrix(...), that_part)`: {error}"
            ) from error


_OTHER_DTYPE = (
    "by_matrix updates each matrix for itself, but the update of {} is {} beside weights of other "
    "dtypes, and {} alone: say in which dtype, such as "
    "`optax.inject_hyperparams(..., hyperparam_dtype=jnp.float32)`"
)


def _work(program: ClosedJaxpr) -> int | None:
    """What a program computes; None if it calls code whose work is unknown."""
    work = products_in(program, each_turn=True)
    return None if work is None else 2 * work.products + work.others
