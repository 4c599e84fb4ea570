"""Warns of a compiler for GPUs that may read operands of products in the wrong order."""

from functools import cache

from ..._core.errors import MylibWarning, warn
from ..._core.known_faults import MISREAD, MISREAD_OFF


@cache
def about_misread(platform: str, flags: str) -> None:
    """Warns once in a process, unless `flags` turn off what is at fault."""
    if MISREAD.is_on(platform) and MISREAD_OFF not in flags.lower():
        warn(f"this version of jaxlib can compute wrong numbers: {MISREAD}", MylibWarning)
