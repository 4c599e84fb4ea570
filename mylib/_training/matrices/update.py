"""`init` and `update` of matrices whose layout is known."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..._core.contexts import plan_in_force
from ..._core.placement import PLANNING
from ..jit import expect
from .layout import GroupUpdate, Layout
from .state import MatrixState
from .transform import Transform, Tree

Arrays: TypeAlias = list[jax.Array]
Values: TypeAlias = Sequence[jax.Array]
# The updates of some matrices, the next state of each, and what they share.
Updated: TypeAlias = tuple[jax.Array, Arrays, Arrays]


def initial(transform: Transform, layout: Layout, params: Tree) -> MatrixState:
    """The state of `transform`, created on the devices that own the matrices."""
    leaves = layout.leaves_of(params, "params")
    stacks, shared = [], []
    for how in layout.updates:
        group, work = how.group, _GroupStep(transform, layout, how)
        parts = work.parts_of(layout.placed(leaves)) if how.init_reads else []
        stacks.append(
            tuple(group.per_device(work.start, ([group.spec] * len(parts),), work.spec)(parts))
        )
        shared.append(tuple(work.shared(work.init(jnp.zeros(group.matrix.shape, group.dtype)))))
    others = transform.init(layout.only(leaves, layout.others)) if layout.others else None
    return MatrixState(tuple(stacks), tuple(shared), layout.state_placed(others), layout)


def updated(
    transform: Transform, updates: Tree, state: MatrixState, params: Tree | None, **extra: object
) -> tuple[Tree, MatrixState]:
    """The updates, and the next state."""
    layout = state.layout
    for group, stack in zip(layout.groups, state.stacks, strict=True):
        if plan_in_force.value is not None and group.mesh.axis_names == (PLANNING,):
            raise ValueError(_NOT_MADE)
        target = NamedSharding(group.mesh, group.state_spec)
        # JAX may place arrays without elements elsewhere.
        expect(stack, [target if x.size else None for x in stack])
    leaves = layout.placed(layout.leaves_of(updates, "updates"))
    weights = None if params is None else layout.placed(layout.leaves_of(params, "params"))
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
    state = MatrixState(tuple(stacks), tuple(shared), layout.state_placed(others), layout)
    return layout.tree.unflatten(layout.placed(results)), state


_NOT_MADE = (
    "by_matrix: this state was created outside of the plan, and is not on its mesh: create it by "
    "plan.make(make, ...), or by by_matrix.from_plain(plain, like), with that as like"
)


class _GroupStep:
    """What is done with one group."""

    def __init__(
        self,
        transform: Transform,
        layout: Layout,
        how: GroupUpdate,
        extra: dict[str, object] | None = None,
    ):
        self.transform, self.layout, self.extra = transform, layout, extra or {}
        self.group, self.is_own, self.state = how.group, how.is_own, how.state
        self.spec, self.example = how.group.state_spec, how.example

    def parts_of(self, leaves: Values) -> Arrays:
        return [leaves[i] for i in self.group.numbers]

    def alone(self, matrix: jax.Array) -> Tree:
        """The tree with a matrix in the place of the group's example, and nothing else."""
        return self.layout.only([matrix] * self.layout.tree.num_leaves, [self.example])

    def own(self, leaves: Values) -> Arrays:
        return list(compress(leaves, self.is_own))

    def shared(self, leaves: Values) -> Arrays:
        return [x for x, is_own in zip(leaves, self.is_own, strict=True) if not is_own]

    def init(self, matrix: jax.Array) -> Arrays:
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
            parts: Arrays, weights: Arrays, own: Arrays, shared: Arrays, dynamic: dict[str, object]
        ) -> tuple[Arrays, Arrays, Arrays]:
            whole = group.whole(parts)
            read = group.whole(weights) if weights else None
            if read is None and has_params:
                read = jnp.zeros(whole.shape, group.dtype)
            extra = eqx.combine(dynamic, static)
            before = own, shared
            step = lambda n: self.step(n, whole, read, own, shared, extra)  # noqa: E731
            new, own, shared = self.for_owned(step, own)
            results = group.parts(new)
            if len({x.dtype for x in parts}) > 1:
                # Those of one group were joined in the widest dtype.
                alone = lambda x: self.step(1, x, read, *before, extra)[0]  # noqa: E731
                like = [jax.eval_shape(alone, whole.astype(x.dtype)) for x in parts]
                results = [x.astype(y.dtype) for x, y in zip(results, like, strict=True)]
            return results, own, shared

        count = len(group.numbers)
        whole = PartitionSpec()
        run = group.per_device(
            on_device,
            ([group.spec] * count, [group.spec] * len(weights), self.spec, whole, whole),
            ([group.spec] * count, self.spec, whole),
        )
        with jax.named_scope("by_matrix"):
            return run(parts, weights, list(own), list(shared), dynamic)

    def for_owned(self, step: Callable[[int], Updated], own: Arrays) -> Updated:
        """Updates as many matrices as this device owns: all slots, or one fewer."""
        group, slots = self.group, self.group.slots
        if (group.loads == slots).all():
            return step(slots)
        # What is shared changes on each device, also on one that owns nothing. It is outside of the
        # branches, which differ between devices.
        _, _, shared = step(1)

        def fewer() -> tuple[jax.Array, Arrays]:
            n = slots - 1
            new, some, _ = step(max(n, 1))
            # An update may give the state another dtype.
            some = [
                jnp.concatenate([x[:n], y[n:].astype(x.dtype)])
                for x, y in zip(some, own, strict=True)
            ]
            return jnp.concatenate([new[:n], jnp.zeros_like(new[:1])]), some

        return *lax.cond(group.load() == slots, lambda: step(slots)[:2], fewer), shared

    def step(
        self,
        n: int,
        whole: jax.Array,
        read: jax.Array | None,
        own: Arrays,
        shared: Arrays,
        extra: dict[str, object],
    ) -> Updated:
        """Updates the first `n` matrices of this device."""

        def one(matrix: jax.Array, weight: jax.Array | None, own: Arrays) -> Updated:
            mine, common = iter(own), iter(shared)
            leaves = [next(mine if is_own else common) for is_own in self.is_own]
            params = None if weight is None else self.alone(weight)
            new, state = self.transform.update(
                self.alone(matrix), self.state.unflatten(leaves), params, **extra
            )
            (new,), leaves = jtu.tree_leaves(new), jtu.tree_leaves(state)
            return new, self.own(leaves), self.shared(leaves)

        head = None if read is None else read[:n]
        return jax.vmap(one, out_axes=(0, 0, None))(whole[:n], head, [x[:n] for x in own])
