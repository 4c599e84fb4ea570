"""Programs that tell the names and lines of the source that is here."""

import re
from typing import Any

import jax

from ..._core.compat import compilation_cache, names_in_cache_keys
from .hlo import HloModule

# A name, or a file and a line.
_LOCATION = re.compile(r'loc\("([^"]*)"(?::(\d+))?')

# The default value of an option that changes no program: with any option, JAX compiles again
# what it has in memory.
_AGAIN: dict[str, Any] = {"xla_dump_max_hlo_modules": -1}


def read(
    compiled: jax.stages.Compiled,
    lowered: jax.stages.Lowered | None = None,
    options: dict[str, Any] | None = None,
) -> tuple[jax.stages.Compiled, HloModule]:
    """A compiled program whose names and lines are those of the lowered one, if this is given.
    JAX's compilation cache finds a program by what it computes: the one that it finds may have been
    written elsewhere, or before lines were inserted above it. Such a one is compiled again.
    """
    module = HloModule(compiled.as_text() or "")
    # Without a cache it has been compiled from what is here.
    if lowered is None or compilation_cache() is None:
        return compiled, module
    written = set(_LOCATION.findall(lowered.as_text(debug_info=True) or ""))
    if written.issuperset(module.origins()):
        return compiled, module
    with names_in_cache_keys():
        return read(lowered.compile((options or {}) | _AGAIN))
