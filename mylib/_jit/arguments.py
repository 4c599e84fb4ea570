"""A call's arguments: placed before the call, donated once, let go of after it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import is_
from typing import TYPE_CHECKING, Any

import jax
from jax.core import Tracer
from jax.experimental.layout import Format

from .._placement import Target, World, current_world
from .._processes import one_call, raised_in_all
from .._transfer import let_go, mesh_of_all, place_leaves
from .._tree import Arrays, Leaves, canonical_dtype, split as split_tree
from .donation import Donated
from .inputs import Inputs, Resolved
from .variants import Variant

if TYPE_CHECKING:
    from .program import Program


@dataclass(slots=True, eq=False)
class Call:
    """A call: its arguments, the `arrays` in them, and the function's `own` arrays."""

    program: "Program"
    args: Any
    kwargs: Any
    arrays: Arrays
    own: Arrays
    variant: Variant = field(init=False)


def place(
    call: Call, inputs: Inputs, abstract: bool = False
) -> tuple[Arrays, Arrays, Resolved | None]:
    """The arrays of the arguments and of the function, at their targets, and the targets, if the
    function needs them. If `abstract`, nothing is moved.
    """
    world, variant, own = current_world(), call.variant, call.own
    if world.staged and not inputs.also_staged:
        return call.arrays, own, None
    state = inputs.state_of(call.arrays + own, world)
    if state is not None and variant.in_place is not None and variant.in_place[0] == state:
        return call.arrays, own, variant.in_place[1]
    leaves = call.program.function.split((call.args, call.kwargs), abstract)
    of_all = None if abstract else mesh_of_all(inputs.mesh, world)
    with one_call(of_all, None), raised_in_all(of_all, None):
        resolved = _resolved(call, inputs, leaves, world)
    for_function = resolved if inputs.for_function else None
    targets, own_targets = inputs.needed(leaves, resolved.targets, own, world)
    values = _at(leaves, targets, world, abstract)
    own_values = _at(split_tree(own), own_targets, world, abstract)
    if all(map(is_, values + own_values, leaves.arrays + own)):
        # The state does not include layouts.
        if not any(isinstance(target, Format) for target in resolved.targets):
            variant.in_place = state, for_function
        return call.arrays, own, for_function
    everything = list(leaves.all)
    for position, x in zip(leaves.positions, values, strict=True):
        everything[position] = x
    return list(compress(everything, variant.split.are_arrays)), own_values, for_function


def _resolved(call: Call, inputs: Inputs, leaves: Leaves, world: World) -> Resolved:
    """The arguments' targets. Rules are called once for the same shapes in the same context."""
    asked = ([(x.shape, x.dtype) for x in leaves.arrays], leaves.kinds, world)
    resolved = call.variant.resolved
    if resolved is None or resolved[0] != asked:
        targets = inputs.resolve(call.program.function, leaves, call.args, call.kwargs, world)
        resolved = call.variant.resolved = asked, Resolved(tuple(targets))
    return resolved[1]


def _at(
    leaves: Leaves, targets: Sequence[Target | None], world: World, abstract: bool
) -> list[Any]:
    if abstract:
        return [_abstract(x, target) for x, target in zip(leaves.arrays, targets, strict=True)]
    return place_leaves(leaves, targets, world)


def _abstract(x: Any, target: Target | None) -> Any:
    if target is None:
        return x
    dtype, weak = canonical_dtype(x), getattr(x, "weak_type", False)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=target, weak_type=weak)


def used_once(call: Call, arrays: Arrays, which: Donated) -> tuple[Arrays, Arrays]:
    """The arrays that are kept and those that are donated, with a copy of each donated one that
    occurs twice or is also passed without being donated: JAX refuses to donate those.
    """
    kept, donated = which.parted(arrays)
    taken = {*map(id, kept), *map(id, which.parted(call.arrays)[0])}
    if len(taken.union(map(id, donated))) == len(taken) + len(donated):
        return kept, donated
    for i, x in enumerate(donated):
        if isinstance(x, jax.Array) and not isinstance(x, Tracer) and id(x) in taken:
            donated[i] = jax.device_put(x, may_alias=False)
        taken.add(id(x))
    return kept, donated


def let_go_of_moved(call: Call, placed: Arrays, which: Donated) -> None:
    """After a successful call, deletes donated arrays that had to be moved before it."""
    if any(isinstance(x, Tracer) for x in call.arrays):
        return
    kept, donated = which.parted(call.arrays)
    let_go(donated, [*kept, *placed])
