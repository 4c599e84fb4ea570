"""Programs that tell the names and lines of the source that is here."""

import re
from collections.abc import Iterator
from typing import Any

import jax

from .._compat import names_in_cache_keys

_LOCATION = re.compile(r'loc\("([^"]*"(?::\d+)?)')
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LINE = re.compile(r"^\d+ \{file_name_id=(\d+) .*?\bline=(\d+) ", re.MULTILINE)
_ARGUMENT = re.compile(r' parameter\(\d+\).*?op_name="((?:[^"\\]|\\.)*)"')

# The default value of an option that changes no program: with any option, JAX compiles again
# what it has in memory.
_AGAIN: dict[str, Any] = {"xla_dump_max_hlo_modules": -1}


def as_written(
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
    options: dict[str, Any] | None = None,
) -> jax.stages.Compiled:
    """A compiled program whose names and lines are those of the lowered one. JAX's compilation
    cache finds a program by what it computes: the one that it finds may have been written
    elsewhere, or before lines were inserted above it. Such a one is compiled again.
    """
    if not jax.config.values["jax_compilation_cache_dir"]:
        return compiled
    written = set(_LOCATION.findall(lowered.as_text(debug_info=True) or ""))
    if written.issuperset(_told_by(compiled.as_text() or "")):
        return compiled
    with names_in_cache_keys():
        return lowered.compile((options or {}) | _AGAIN)


def _told_by(text: str) -> Iterator[str]:
    """The lines and names of arguments in the text of a compiled program, written as in that of a
    lowered one: with the quote that ends a name.
    """
    head, _, entry = text.partition("\nENTRY ")
    tables = head.partition("FileNames")[2].partition("StackFrames")[0]
    files = dict(_FILE.findall(tables.partition("FunctionNames")[0]))
    for file, line in _LINE.findall(tables):
        yield f'{files[file]}":{line}'
    for name in _ARGUMENT.findall(entry):
        yield name.replace("\\'", "'") + '"'
