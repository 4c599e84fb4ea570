"""The one way from training to reading compiled programs, which most jobs never do: `_programs` is
imported when it is first needed.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax

from .._core.placement import AnyMesh

if TYPE_CHECKING:
    from .._programs.lowered import Compiled as Compiled, Lowered as Lowered


def to_lowered(
    program: jax.stages.Lowered,
    name: str,
    mesh: AnyMesh | None,
    arrays: Iterable[tuple[str, jax.Array]],
    **about: Any,
) -> "Lowered":
    from .._programs.lowered import Lowered, Origin, argument

    arguments = [argument(name, array) for name, array in arrays]
    return Lowered(Origin(name, mesh, arguments, **about), program)
