"""`init` and `update` of matrices whose layout is known."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .._jit import expect
from .._placement import PLANNING, plan_in_force
from .._transfer import filter_shard
from .layout import GroupUpdate, Layout
from .state import MatrixState

Arrays = list[Any]
Values = Sequence[Any]


def initial(transform: Any, layout: Layout, params: Any) -> MatrixState:
    """The state of `transform`, created on the devices that own the matrices."""
    leaves = layout.tree.flatten_up_to(params)
    stacks, shared = [], []
    for how in layout.updates:
        group, work = how.group, _GroupStep(transform, layout, how)
        parts = work.parts_of(leaves) if how.init_reads else []
        stacks.append(
            tuple(group.per_device(work.start, ([group.spec] * len(parts),), work.spec)(parts))
        )
        shared.append(tuple(work.shared(work.init(jnp.zeros(group.matrix.shape, group.dtype)))))
    others = transform.init(layout.only(leaves, layout.others)) if layout.others else None
    arrays, tree = jtu.tree_flatten(others)
    others = tree.unflatten(filter_shard(arrays, list(layout.others_places)))
    return MatrixState(tuple(stacks), tuple(shared), others, layout)


def updated(
    transform: Any, updates: Any, state: MatrixState, params: Any, **extra: Any
) -> tuple[Any, MatrixState]:
    """The updates, and the next state."""
    layout = state.layout
    for group, stack in zip(layout.groups, state.stacks, strict=True):
        if plan_in_force.value is not None and group.mesh.axis_names == (PLANNING,):
            raise ValueError(_NOT_MADE)
        expect(stack, [NamedSharding(group.mesh, group.state_spec)] * len(stack))
    leaves = layout.tree.flatten_up_to(updates)
    weights = None if params is None else layout.tree.flatten_up_to(params)
    results = list(leaves)
    stacks, shared = [], []
    previous: Arrays = []
    for how, own, common in zip(layout.updates, state.stacks, state.shared, strict=True):
        work = _GroupStep(transform, layout, how, extra)
        read = weights if weights and how.reads_weights else None
        moved = work.parts_of(leaves), [] if read is None else work.parts_of(read)
        # One group after the other, so that the whole matrices of one are there at a time.
        moved, _ = lax.optimization_barrier((moved, previous))
        previous, own, common = work.update(*moved, own, common, weights is not None)
        for i, x in zip(how.group.numbers, previous, strict=True):
            results[i] = x
        stacks.append(tuple(own))
        shared.append(tuple(common))
    others = state.others
    if layout.others:
        rest, others = transform.update(
            layout.only(leaves, layout.others),
            state.others,
            None if weights is None else layout.only(weights, layout.others),
            **extra,
        )
        for i, x in zip(layout.others, jtu.tree_leaves(rest), strict=True):
            results[i] = x
    return layout.tree.unflatten(results), MatrixState(tuple(stacks), tuple(shared), others, layout)


_NOT_MADE = (
    "by_matrix: this state was created outside of the plan, and is not on its mesh: create it by "
    "plan.make(make, ...), or by by_matrix.from_plain(plain, like), with that as like"
)


class _GroupStep:
    """What is done with one group."""

    def __init__(self, transform: Any, layout: Layout, how: GroupUpdate, extra: Any = None):
        self.transform, self.layout, self.extra = transform, layout, extra or {}
        self.group, self.is_own, self.state = how.group, how.is_own, how.state
        self.spec, self.example = how.group.state_spec, how.example

    def parts_of(self, leaves: Sequence[Any]) -> Arrays:
        parts = [leaves[i] for i in self.group.numbers]
        if self.group.mesh.size == 1:
            return parts
        return filter_shard(parts, NamedSharding(self.group.mesh, self.group.spec))

    def alone(self, x: Any) -> Any:
        """The tree with a matrix in the place of the group's example, and nothing else."""
        return self.layout.only([x] * self.layout.tree.num_leaves, [self.example])

    def own(self, leaves: Sequence[Any]) -> Arrays:
        return list(compress(leaves, self.is_own))

    def shared(self, leaves: Sequence[Any]) -> Arrays:
        return [x for x, is_own in zip(leaves, self.is_own, strict=True) if not is_own]

    def init(self, matrix: Any) -> Arrays:
        return jtu.tree_leaves(self.transform.init(self.alone(matrix)))

    def start(self, parts: Arrays) -> Arrays:
        """The state of the matrices that this device owns; without `parts` their values are not
        read.
        """
        group = self.group
        shape = group.slots, *group.matrix.shape
        whole = group.whole(parts) if parts else jnp.zeros(shape, group.dtype)
        return jax.vmap(lambda x: self.own(self.init(x)))(whole)

    def update(
        self, parts: Arrays, weights: Arrays, own: Values, shared: Values, has_params: bool
    ) -> tuple[Arrays, Arrays, Arrays]:
        group = self.group
        dynamic, static = eqx.partition(self.extra, eqx.is_array)

        def on_device(
            parts: Arrays, weights: Arrays, own: Arrays, shared: Arrays, dynamic: Any
        ) -> tuple[Arrays, Arrays, Arrays]:
            whole = group.whole(parts)
            read = group.whole(weights) if weights else None
            if read is None and has_params:
                read = jnp.zeros(whole.shape, whole.dtype)
            extra = eqx.combine(dynamic, static)
            step = lambda n: self.step(n, whole, read, own, shared, extra)  # noqa: E731
            new, own, shared = self.for_owned(step, own)
            return group.parts(new), own, shared

        count = len(group.numbers)
        whole = PartitionSpec()
        run = group.per_device(
            on_device,
            ([group.spec] * count, [group.spec] * len(weights), self.spec, whole, whole),
            ([group.spec] * count, self.spec, whole),
        )
        with jax.named_scope("by_matrix"):
            return run(parts, weights, list(own), list(shared), dynamic)

    def for_owned(self, step: Callable[[int], Any], own: Arrays) -> Any:
        """Updates as many matrices as this device owns: all slots, or one fewer."""
        group, slots = self.group, self.group.slots
        if (group.loads == slots).all():
            return step(slots)
        # What is shared changes on each device, also on one that owns nothing. It is outside of the
        # branches, which differ between devices.
        _, _, shared = step(1)

        def fewer() -> Any:
            new, some, _ = step(max(slots - 1, 1))
            if slots == 1:
                return jnp.zeros_like(new), own
            some = [jnp.concatenate([x, y[-1:]]) for x, y in zip(some, own, strict=True)]
            return jnp.concatenate([new, jnp.zeros_like(new[:1])]), some

        return *lax.cond(group.load() == slots, lambda: step(slots)[:2], fewer), shared

    def step(
        self, n: int, whole: Any, read: Any, own: Arrays, shared: Arrays, extra: Any
    ) -> tuple[Any, Arrays, Arrays]:
        """Updates the first `n` matrices of this device."""

        def one(x: Any, weight: Any, own: Arrays) -> tuple[Any, Arrays, Arrays]:
            mine, common = iter(own), iter(shared)
            leaves = [next(mine if is_own else common) for is_own in self.is_own]
            weight = None if weight is None else self.alone(weight)
            new, state = self.transform.update(
                self.alone(x), self.state.unflatten(leaves), weight, **extra
            )
            (new,), leaves = jtu.tree_leaves(new), jtu.tree_leaves(state)
            return new, self.own(leaves), self.shared(leaves)

        head = None if read is None else read[:n]
        return jax.vmap(one, out_axes=(0, 0, None))(whole[:n], head, [x[:n] for x in own])
