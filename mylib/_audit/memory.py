"""The memory that a compiled program needs: the compiler's numbers, constants, and the peak."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import jax

from .._errors import AuditError
from .._text import show_bytes, table
from ..machines import Alive, Argument, Fit, Machine, Memory, memory_of
from .attribution import primitive_of, source_of
from .hlo import HloModule
from .peak import Buffer, peak_of


@dataclass(frozen=True)
class ProgramMemory(Memory):
    """The memory that a compiled program needs, in bytes a device: a [`mylib.machines.Memory`][],
    with `total` and `fits(machine)`, and what is alive at the peak.

    **Attributes:**

    - `arguments`, `results`, `temporaries`, `aliased`, `code`, `constants`, `host`, `peak`,
        `accepted`, `largest`: those of [`mylib.machines.Memory`][].
    - `alive`: what is held at the peak besides arguments and constants, as a tuple of
        [`mylib.machines.Alive`][], the largest first. None if that is unknown: it is found from the
        order in which the program runs, and must account for `peak` within a tenth.
    """

    alive: tuple[Alive, ...] | None = None

    @classmethod
    def of(
        cls, compiled: jax.stages.Compiled, program: HloModule | str, arguments: Sequence[Argument]
    ) -> "ProgramMemory":
        """The memory of a `compiled` program, given its module or its text as `program`, and its
        `arguments`.
        """
        text = program if isinstance(program, str) else program.text
        memory = memory_of(compiled, arguments, text)
        parts = {part.name: getattr(memory, part.name) for part in fields(memory)}
        try:
            at_peak = peak_of(HloModule(program) if isinstance(program, str) else program)
        except AuditError:  # what isn't understood is unknown
            return cls(**parts)
        counted = memory.arguments + memory.constants + at_peak.bytes
        agrees = abs(counted - memory.peak) <= memory.peak * _WITHIN
        return cls(**parts, alive=_alive(at_peak.alive) if agrees else None)

    def fits(self, machine: Machine) -> Fit:
        """Whether it fits on each device of a `machine`; see [`mylib.machines.Memory`][]."""
        return replace(super().fits(machine), temporaries=self.alive or ())

    def held(self) -> dict[str, int]:
        """The bytes that each device holds, by purpose."""
        parts = {
            "arguments": self.arguments,
            "results": self.results,
            "temporaries": self.temporaries,
            "constants": self.constants,
            "code": self.code,
            "on the host": self.host,
        }
        return {name: size for name, size in parts.items() if size}

    def at_the_peak(self) -> tuple[str, list[tuple[str, ...]]]:
        """The largest arrays at the peak: a heading, and the rows of a table."""
        counted = f"at the peak, XLA counts {show_bytes(self.peak)}"
        rows = [
            (show_bytes(x.bytes), x.arrays, x.primitive, x.source)
            for x in (self.alive or ())[:_SHOWN]
        ]
        if self.alive is None:
            return f"{counted}; what is held then is unknown", rows
        listed_bytes = show_bytes(sum(x.bytes for x in self.alive))
        return f"{counted}; by the schedule, {listed_bytes} of it besides arguments", rows

    def lines(self) -> list[str]:
        """The lines that it prints as."""
        held = ", ".join(f"{name} {show_bytes(size)}" for name, size in self.held().items())
        shared = (
            f" ({show_bytes(self.aliased)} of them in donated arguments)" if self.aliased else ""
        )
        heading, rows = self.at_the_peak()
        lines = [f"each device holds {held or 'nothing'}{shared}", heading + ":" * bool(rows)]
        return [*lines, *(table(rows) if rows else [])]


_WITHIN = 0.1
_SHOWN = 6
_SMALL = 1024


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
