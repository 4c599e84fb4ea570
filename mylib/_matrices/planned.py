"""Plans how the matrices of a model are updated, from shapes alone."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from .._compat import opened
from .._errors import PlacementError, because
from .._placement import (
    AnyMesh,
    current_world,
    grounded,
    on_one_device,
    plan_in_force,
    planning_mesh,
    resolve_leaves,
    sharding_of,
    show_mesh,
)
from .._products import products_in
from .._tree import Leaves, split
from .belongs import Belonging, belonging
from .group import MatrixGroup
from .layout import GroupUpdate, Layout
from .matrices import Matrices, MatrixDims, matrices_in


@dataclass(frozen=True)
class Request:
    """The arguments of `by_matrix`."""

    transform: Any
    kept: Any
    over: tuple[str, ...] | None
    matrices: Matrices | None
    dtype: Any
    mesh: AnyMesh | None

    def layout(self, params: Any) -> Layout | None:
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
        return _Planner(self, leaves, dims, mesh).layout().on(shardings)

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


def _are_on_several(arrays: Sequence[Any]) -> bool:
    return any(
        isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.sharding.num_devices > 1
        for x in arrays
    )


class _Planner:
    def __init__(
        self,
        request: Request,
        leaves: Leaves,
        dims: Sequence[MatrixDims | None],
        mesh: AnyMesh,
    ):
        self.request, self.leaves, self.dims, self.mesh = request, leaves, dims, mesh
        self.state = cache(self._state)
        self.matrices = [i for i, d in enumerate(dims) if d is not None]
        self.others = [i for i, d in enumerate(dims) if d is None]
        # What the transform sees: matrices, each of them for itself.
        self.seen = [
            x if d is None else jax.ShapeDtypeStruct(d.of_matrix(x.shape), x.dtype)
            for x, d in zip(leaves.arrays, dims, strict=True)
        ]

    def only(self, numbers: Sequence[int]) -> Any:
        chosen = set(numbers)
        seen = [x if i in chosen else None for i, x in enumerate(self.seen)]
        return self.leaves.treedef.unflatten(seen)

    def layout(self) -> Layout:
        every = self.only(range(len(self.seen)))
        names = [self.leaves.name(i) for i in range(len(self.seen))]
        belongs = belonging(self.request.transform, every, names, self.matrices)
        others = jtu.tree_leaves_with_path(self.state(*self.others)) if self.others else []
        return Layout(
            tree=self.leaves.treedef,
            over=self.request.over,
            updates=tuple(self.update(group, work, belongs) for group, work in self.groups()),
            others=tuple(self.others),
            others_at=tuple(belongs.paths.index(path) for path, _ in others),
            others_like=tuple(self._like(belongs.owner[path], x) for path, x in others),
            others_places=(None,) * len(others),
            plain=belongs.tree,
        )

    def update(self, group: MatrixGroup, work: int | None, belongs: Belonging) -> GroupUpdate:
        """All leaves of a group have states of one structure, in other places of the tree."""
        number_of = {path: number for number, path in enumerate(belongs.paths)}
        at: list[tuple[int, ...]] = []
        for i in group.numbers:
            paths = [path for path, _ in jtu.tree_leaves_with_path(self.state(i))]
            if not {belongs.owner.get(path, -1) for path in paths} <= {None, i}:
                raise ValueError(
                    "by_matrix: the state of a weight isn't at the weight's place in the tree of "
                    f"the optimiser's state, but at {jtu.keystr(paths[0])}: keep it in a tree like "
                    "that of the weights"
                )
            at.append(tuple(number_of[path] for path in paths))
        return GroupUpdate(
            group=group,
            work=work,
            example=group.numbers[0],
            state=jtu.tree_structure(self.state(group.numbers[0])),
            is_own=tuple(belongs.owner[belongs.paths[n]] is not None for n in at[0]),
            at=tuple(at),
            reads_weights=not belongs.needs_params.isdisjoint(group.numbers),
            init_reads=not belongs.init_reads.isdisjoint(group.numbers),
        )

    def _like(self, owner: int | None, x: Any) -> int | None:
        return owner if owner is not None and x.shape == self.seen[owner].shape else None

    def _state(self, *numbers: int) -> Any:
        """The state of some leaves."""
        return jax.eval_shape(self.request.transform.init, self.only(numbers))

    def groups(self) -> Iterator[tuple[MatrixGroup, int | None]]:
        """Leaves of one shape whose updates are the same program, traced in their places in the
        tree; and what the update of one matrix of each group computes.
        """
        alike: dict[Any, list[int]] = {}
        works: dict[Any, int | None] = {}
        for i in self.matrices:
            x, program = self.leaves.arrays[i], self._program(i)
            key = x.shape, x.dtype, self.dims[i], _text(program)
            alike.setdefault(key, []).append(i)
            if key not in works:
                works[key] = _work(program)
        for key, numbers in alike.items():
            shape, dtype, dims, _ = key
            group = MatrixGroup(
                tuple(numbers), shape, dtype, PartitionSpec(), dims, (), self.mesh, 0,
                self.request.dtype,
            )  # fmt: skip
            yield group, works[key]

    def _program(self, number: int) -> Any:
        tree, transform = self.only([number]), self.request.transform
        return jax.make_jaxpr(transform.update)(tree, self.state(number), tree)


def _text(program: Any) -> Any:
    """What is equal for equal programs."""
    # Addresses of functions differ from trace to trace.
    text = re.sub(r"0x[0-9a-f]+", "", str(opened(program)))
    return text, tuple(map(_constant, program.consts))


def _work(program: Any) -> int | None:
    """What a program computes; None if it calls code whose work is unknown."""
    work = products_in(program, each_turn=True)
    return None if work is None else 2 * work.products + work.others


def _constant(x: Any) -> Any:
    if isinstance(x, Tracer):
        return id(x)
    x = np.asarray(x)
    return x.shape, str(x.dtype), x.tobytes()
