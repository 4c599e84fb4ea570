"""The one way from placing arrays to other processes, which most jobs don't have: `processes` and
`links` are imported when a name of theirs is first used.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import jax

from .._core.placement import AnyMesh, World
from .._core.stubs import names_listed_in, on_first_use

if TYPE_CHECKING:
    from .links import (
        Crossing as Crossing,
        count_moves as count_moves,
        crosses as crosses,
        handle as handle,
        is_nowhere_here as is_nowhere_here,
        move_across as move_across,
        next_call as next_call,
        set_origin as set_origin,
    )
    from .processes import (
        CommonCall as CommonCall,
        Processes as Processes,
        agree as agree,
        check_replicas as check_replicas,
        named as named,
        processes_at as processes_at,
    )

__getattr__ = on_first_use(globals(), names_listed_in(__file__))


class Alone(NamedTuple):
    """A call that meets no other process."""

    processes: "Processes" = ()


_ALONE, _HERE = nullcontext(Alone()), nullcontext()


def one_call(
    mesh: AnyMesh | None, world: World, check: bool | None = None
) -> "AbstractContextManager[Alone | CommonCall]":
    """A call that may place arrays on the devices of the mesh. Its processes are those that receive
    an error that is raised before anything is moved.
    """
    if world.staged or check is False or jax.process_count() == 1:
        return _ALONE
    from .processes import call_on

    return call_on(mesh, world)


def raised_in_all(processes: "Processes") -> AbstractContextManager[None]:
    """Raises an error of one process in all that come to compare; without them, here alone."""
    if not processes:
        return _HERE
    from .processes import raised_in_all

    return raised_in_all(processes)
