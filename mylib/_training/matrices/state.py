"""The state of `by_matrix`, and the transform's own state, which knows nothing of devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from ..._core.rules import fsdp
from ..._core.tree import SelfPlaced
from ..._moving.transfer import filter_device_put, filter_shard
from .balance import note_on
from .group import MatrixGroup
from .layout import GroupUpdate, Layout, checked
from .transform import Tree

State = Any


@jtu.register_dataclass
@dataclass(frozen=True)
class MatrixState(SelfPlaced):
    """For each group, the arrays that depend on the matrix, stacked and sharded over its devices,
    and those that don't; and the transform's state of all other leaves.
    """

    stacks: tuple[tuple[jax.Array, ...], ...]
    shared: tuple[tuple[jax.Array, ...], ...]
    others: Tree
    layout: Layout = field(metadata={"static": True})

    def on(self, shardings: Sequence[NamedSharding]) -> "MatrixState":
        """The state for weights that are kept at these shardings, without numbers."""
        layout, whole = self.layout.on(shardings), PartitionSpec()
        before = {update.example: number for number, update in enumerate(self.layout.updates)}

        def on_mesh(group: MatrixGroup, array: jax.Array, is_own: bool) -> Any:
            shape = (group.stacked, *array.shape[1:]) if is_own else array.shape
            at = NamedSharding(group.mesh, group.state_spec if is_own else whole)
            return jax.ShapeDtypeStruct(shape, array.dtype, sharding=at)

        stacks, shared = [], []
        for update in layout.updates:
            group, old = update.group, before[update.example]
            stacks.append(tuple(on_mesh(group, x, is_own=True) for x in self.stacks[old]))
            shared.append(tuple(on_mesh(group, x, is_own=False) for x in self.shared[old]))
        return MatrixState(tuple(stacks), tuple(shared), self.others, layout)

    def notes_of_explain(self) -> list[str]:
        """What `mylib.explain` prints below its table."""
        updates = self.layout.updates
        return [note_on(self.layout.groups, [x.work for x in updates])] if updates else []


def to_plain(state: State, /) -> State:
    """The state as the transform's own `init` makes it, which is the same on any number of
    devices: for checkpoints.

    **Arguments:**

    - `state`: a state of `mylib.by_matrix`, or any tree with such states in it, such as that
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


def _rewritten(change: Callable[[MatrixState, State], State], tree: State, values: State) -> State:
    is_node: Callable[[object], bool] = lambda x: isinstance(x, MatrixState)  # noqa: E731
    nodes, structure = jtu.tree_flatten(tree, is_leaf=is_node)
    if not any(map(is_node, nodes)):
        return values
    parts = structure.flatten_up_to(values)
    changed = [
        change(node, x) if is_node(node) else x for node, x in zip(nodes, parts, strict=True)
    ]
    return structure.unflatten(changed)


@jax.jit
def _plain_arrays(state: MatrixState) -> State:
    layout = state.layout
    leaves = dict(zip(layout.others_at, jtu.tree_leaves(state.others), strict=True))
    for update, stacks, shared in zip(layout.updates, state.stacks, state.shared, strict=True):
        for numbers, x in zip(_leaves_of(update, own=True), stacks, strict=True):
            leaves |= zip(numbers, _members(update.group, x), strict=True)
        for numbers, x in zip(_leaves_of(update, own=False), shared, strict=True):
            for n in numbers:
                # A transform may choose a dtype by the weights that it sees.
                if n not in leaves or x.dtype == layout.plain_dtypes[n]:
                    leaves[n] = x.astype(layout.plain_dtypes[n])
    return layout.plain.unflatten([leaves[number] for number in range(len(leaves))])


def _members(group: MatrixGroup, stack: jax.Array) -> list[jax.Array]:
    """An array of the state for each leaf of a group."""
    held = group.holding(stack.shape[1:])
    members = held.per_device(held.parts, (held.state_spec,), held.spec)(stack)
    if held is group:
        return members
    return filter_shard(members, fsdp(tuple(group.mesh.axis_names)), mesh=group.mesh)


def _state_of(like: MatrixState, plain: object) -> MatrixState:
    layout = like.layout
    leaves = checked(plain, jax.eval_shape(_plain_arrays, like), "plain", _OTHER)
    for update, stacks in zip(layout.updates, like.stacks, strict=True):
        for numbers, stack in zip(_leaves_of(update, own=True), stacks, strict=True):
            held = update.group.holding(stack.shape[1:])
            for i in numbers:
                leaves[i] = filter_device_put(leaves[i], NamedSharding(held.mesh, held.spec))
    shapes = tuple(tuple(x.shape[1:] for x in stacks) for stacks in like.stacks)
    state = _joined(layout, jtu.tree_structure(like.others), shapes, leaves)
    # A transform may choose a dtype by the weights that it sees, which are those of one group.
    alike = jax.tree.map(lambda x, y: x.astype(y.dtype), state.shared, like.shared)
    return replace(state, shared=alike)


_OTHER = "give the state of an optimiser for weights of these shapes, as `like` is"


def _leaves_of(update: GroupUpdate, own: bool) -> list[tuple[int, ...]]:
    """For each array of a group's state that depends on the matrix, or for each that doesn't, the
    numbers of those of its members.
    """
    pairs = zip(zip(*update.at, strict=True), update.is_own, strict=True)
    return [numbers for numbers, is_own in pairs if is_own == own]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _joined(
    layout: Layout,
    others_tree: Any,
    shapes: tuple[tuple[tuple[int, ...], ...], ...],
    leaves: Sequence[jax.Array],
) -> MatrixState:
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


def _stack(group: MatrixGroup, members: Sequence[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    held = group.holding(shape)

    def whole(*parts: jax.Array) -> jax.Array:
        return held.whole(parts).reshape(held.slots, *shape)

    return held.per_device(whole, held.spec, held.state_spec)(*members)
