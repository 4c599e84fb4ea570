"""The state of `by_matrix`, and the transform's own state, which knows nothing of devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from .._transfer import filter_device_put, filter_shard
from ..rules import fsdp
from .balance import note_on
from .group import MatrixGroup
from .layout import GroupUpdate, Layout

State = Any


@jtu.register_dataclass
@dataclass(frozen=True)
class MatrixState:
    """For each group, the arrays that depend on the matrix, stacked and sharded over their owners,
    and those that don't; and the transform's state of all other leaves.
    """

    stacks: tuple[tuple[Any, ...], ...]
    shared: tuple[tuple[Any, ...], ...]
    others: Any
    layout: Layout = field(metadata={"static": True})

    def on(self, shardings: Sequence[NamedSharding]) -> "MatrixState":
        """The state for weights that are kept at these shardings, without numbers."""
        layout, whole = self.layout.on(shardings), PartitionSpec()

        def on_mesh(group: MatrixGroup, x: Any, shape: tuple[int, ...], spec: Any) -> Any:
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(group.mesh, spec))

        before = {update.example: number for number, update in enumerate(self.layout.updates)}
        stacks, shared = [], []
        for update in layout.updates:
            group, old = update.group, before[update.example]
            stacks.append(
                tuple(
                    on_mesh(group, x, (group.stacked, *x.shape[1:]), group.state_spec)
                    for x in self.stacks[old]
                )
            )
            shared.append(tuple(on_mesh(group, x, x.shape, whole) for x in self.shared[old]))
        return MatrixState(tuple(stacks), tuple(shared), self.others, layout)

    def notes_of_explain(self) -> list[str]:
        """What `mylib.explain` prints below its table."""
        updates = self.layout.updates
        return [note_on(self.layout.groups, [x.work for x in updates])] if updates else []


def to_plain(state: State, /) -> State:
    """The state as the transform's own `init` makes it, which is the same on any number of
    devices: for checkpoints.

    **Arguments:**

    - `state`: a state of [`mylib.by_matrix`][], or any tree with such states in it, such as that
        of an `optax.chain`.

    **Returns:**

    The same tree, with the transform's state in place of each. Arrays of a weight's shape are
    sharded like the weight. Leaves with several matrices have the state of each, stacked.
    """
    return _rewritten(lambda node, _: _plain_arrays(node), state, state)


def from_plain(plain: State, like: State, /) -> State:
    """The reverse of `to_plain`.

    **Arguments:**

    - `plain`: a tree that `to_plain` has returned, also on another number of devices, or the state
        of the transform itself.
    - `like`: a state for the devices at hand, such as
        `eqx.filter_eval_shape(optim.init, params)`. Only its structure is used.

    **Returns:**

    A tree with the structure of `like` and the values of `plain`.
    """
    return _rewritten(_state_of, like, plain)


def _rewritten(change: Callable[[MatrixState, Any], Any], tree: Any, values: Any) -> Any:
    is_node: Callable[[Any], bool] = lambda x: isinstance(x, MatrixState)  # noqa: E731
    nodes, structure = jtu.tree_flatten(tree, is_leaf=is_node)
    if not any(map(is_node, nodes)):
        return values
    parts = structure.flatten_up_to(values)
    changed = [
        change(node, x) if is_node(node) else x for node, x in zip(nodes, parts, strict=True)
    ]
    return structure.unflatten(changed)


@jax.jit
def _plain_arrays(state: MatrixState) -> Any:
    layout = state.layout
    leaves = dict(zip(layout.others_at, jtu.tree_leaves(state.others), strict=True))
    for update, stacks, shared in zip(layout.updates, state.stacks, state.shared, strict=True):
        for numbers, x in zip(_leaves_of(update, own=True), stacks, strict=True):
            leaves |= zip(numbers, _members(update.group, x), strict=True)
        for numbers, x in zip(_leaves_of(update, own=False), shared, strict=True):
            leaves |= dict.fromkeys(numbers, x)
    return layout.plain.unflatten([leaves[number] for number in range(len(leaves))])


def _members(group: MatrixGroup, x: Any) -> list[Any]:
    """An array of the state for each leaf of a group."""
    if x.shape[1:] != group.matrix.shape:
        # On Explicit axes a dimension that is split can't be indexed.
        members = group.members_of(filter_shard(x, NamedSharding(group.mesh, PartitionSpec())))
        return filter_shard(members, fsdp(tuple(group.mesh.axis_names)), mesh=group.mesh)
    return group.per_device(group.parts, (group.state_spec,), group.spec)(x)


def _state_of(like: MatrixState, plain: Any) -> MatrixState:
    layout = like.layout
    leaves = layout.plain.flatten_up_to(plain)
    shapes: list[tuple[Any, ...]] = []
    for update, stacks in zip(layout.updates, like.stacks, strict=True):
        shapes.append(tuple(x.shape[1:] for x in stacks))
        for numbers, shape in zip(_leaves_of(update, own=True), shapes[-1], strict=True):
            for i in numbers:
                leaves[i] = _put(leaves[i], update.group, shape)
    return _joined(layout, jtu.tree_structure(like.others), tuple(shapes), leaves)


def _leaves_of(update: GroupUpdate, own: bool) -> list[tuple[int, ...]]:
    """For each array of a group's state that depends on the matrix, or for each that doesn't, the
    numbers of those of its members.
    """
    pairs = zip(zip(*update.at, strict=True), update.is_own, strict=True)
    return [numbers for numbers, is_own in pairs if is_own == own]


def _put(x: Any, group: MatrixGroup, shape: tuple[int, ...]) -> Any:
    """A leaf of the plain state on the mesh, as its weight is if it has its shape."""
    spec = group.spec if shape == group.matrix.shape else PartitionSpec()
    return filter_device_put(x, NamedSharding(group.mesh, spec))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _joined(layout: Layout, others_tree: Any, shapes: Any, leaves: Sequence[Any]) -> MatrixState:
    stacks, shared = [], []
    for update, of_arrays in zip(layout.updates, shapes, strict=True):
        stacks.append(
            tuple(
                _stack(update.group, [leaves[i] for i in numbers], shape)
                for numbers, shape in zip(_leaves_of(update, own=True), of_arrays, strict=True)
            )
        )
        shared.append(tuple(leaves[first] for first, *_ in _leaves_of(update, own=False)))
    others = others_tree.unflatten([leaves[i] for i in layout.others_at])
    return MatrixState(tuple(stacks), tuple(shared), others, layout)


def _stack(group: MatrixGroup, members: Sequence[Any], shape: tuple[int, ...]) -> Any:
    if shape != group.matrix.shape:
        target = NamedSharding(group.mesh, group.state_spec)
        return filter_shard(group.stacked_from(members), target)
    whole = group.per_device(lambda *xs: group.whole(xs), group.spec, group.state_spec)
    return whole(*members)
