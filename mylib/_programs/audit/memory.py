"""The memory that a compiled program needs: the compiler's numbers, constants, and the peak."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh

from ..._core.errors import AuditError
from ..._core.show import columns, wrapped
from ..._core.text import show_bytes
from ..machines import Alive, Argument, Memory, largest
from .attribution import primitive_of, source_of
from .hlo import HloModule, arrays_of, bits_of
from .peak import Buffer, peak_of


def memory_of(
    compiled: jax.stages.Compiled, program: HloModule | str, arguments: Sequence[Argument]
) -> Memory:
    """The memory of a `compiled` program, given its module or its text as `program`, and its
    `arguments`.
    """
    memory = _counted(compiled, program if isinstance(program, str) else program.text, arguments)
    try:
        at_peak = peak_of(HloModule(program) if isinstance(program, str) else program)
    except AuditError:  # what isn't understood is unknown
        return memory
    # The schedule is read here as XLA's buffer assignment reads it, but for what it shares in ways
    # that the text doesn't tell. Where the two differ more, the arrays would be others.
    counted = memory.arguments + memory.constants + at_peak.bytes
    agrees = abs(counted - memory.peak) <= memory.peak * _WITHIN
    return replace(memory, alive=_alive(at_peak.alive) if agrees else None)


def _counted(compiled: jax.stages.Compiled, text: str, arguments: Sequence[Argument]) -> Memory:
    stats: Any = compiled.memory_analysis()
    if stats is None:
        raise NotImplementedError("this compiler does not report how much memory a program needs")
    arrays = arrays_of(" ".join(_CONSTANT.findall(text)))
    constants = sum(array.size * max(bits_of(array.dtype), 8) // 8 for array in arrays)
    code = stats.generated_code_size_in_bytes
    platform, kind = compiled_for(compiled)
    memory = Memory(
        arguments=stats.argument_size_in_bytes,
        results=stats.output_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        # The TPU's compiler counts constants as code.
        code=max(0, code - constants) if code else 0,
        constants=constants,
        host=stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        + stats.host_temp_size_in_bytes,
        peak=0,
        accepted=kind if platform == "tpu" else "",
        largest=largest(arguments),
    )
    counted = stats.peak_memory_in_bytes if platform in ("gpu", "tpu") else memory.total
    # No more can be held than all that there is.
    return replace(memory, peak=min(counted, memory.total))


def compiled_for(compiled: jax.stages.Compiled) -> tuple[str, str]:
    """The platform and the `device_kind` of its devices. They are unknown, so empty, if it has no
    arguments and no results.
    """
    for sharding in jtu.tree_leaves((compiled.input_shardings, compiled.output_shardings)):
        if not isinstance(getattr(sharding, "mesh", None), AbstractMesh):
            device = next(iter(sharding.device_set))
            return device.platform, device.device_kind
    return "", ""


# A constant array, without scalars, whose memory is negligible.
_CONSTANT = re.compile(r"= ([a-z]+\d*[a-z\d]*\[[\d,]+\])\S* constant\(")


def held(memory: Memory) -> dict[str, int]:
    """The bytes that each device holds, by purpose."""
    names = "arguments", "results", "temporaries", "constants", "code", "host"
    sizes = {name: getattr(memory, name) for name in names}
    return {"on the host" if x == "host" else x: size for x, size in sizes.items() if size}


def at_the_peak(memory: Memory) -> tuple[str, list[tuple[str, ...]]]:
    """The largest arrays at the peak: a heading, and the rows of a table."""
    counted = f"at the peak, XLA counts {show_bytes(memory.peak)}"
    if memory.alive is None:
        return f"{counted}; what is held then is unknown", []
    listed_bytes = show_bytes(sum(x.bytes for x in memory.alive))
    largest = memory.alive[:_SHOWN]
    rows = [(show_bytes(x.bytes), x.arrays, x.primitive, x.source) for x in largest]
    return f"{counted}; by the schedule, {listed_bytes} of it besides arguments", rows


def lines_of(memory: Memory) -> list[str]:
    """The lines that a report ends with."""
    parts = ", ".join(f"{name} {show_bytes(size)}" for name, size in held(memory).items())
    donated = f" ({show_bytes(memory.aliased)} of them in donated arguments)"
    shared = donated if memory.aliased else ""
    heading, rows = at_the_peak(memory)
    lines = [f"each device holds {parts or 'nothing'}{shared}", heading + ":" * bool(rows)]
    held_then = columns([_AT_THE_PEAK, *rows], indent="  ") if rows else []
    return [*wrapped(lines), *held_then]


# A guess: how much the schedule's peak may differ from XLA's for its arrays to be listed.
_WITHIN = 0.1
_SHOWN = 5
_AT_THE_PEAK = "bytes", "arrays", "primitive", "line"
_SMALL = 1024  # bytes: scalars and semaphores are left out


def _alive(buffers: list[Buffer]) -> tuple[Alive, ...]:
    alike: dict[tuple[str, tuple[int, ...], str, str], list[int]] = {}
    for buffer in buffers:
        if buffer.bytes >= _SMALL:
            x = buffer.made_by
            array = next(a for a in x.arrays if a.padded_bytes == buffer.bytes)
            key = array.dtype, array.shape, primitive_of(x), source_of(x)
            alike.setdefault(key, []).append(buffer.bytes)
    arrays = [Alive(sum(sizes), len(sizes), *key) for key, sizes in alike.items()]
    return tuple(sorted(arrays, key=lambda x: -x.bytes))
