"""What a compiled program holds: the compiler's own numbers, constants, and the peak."""

from dataclasses import dataclass
from typing import Any

import jax

from .attribution import primitive_of, source_of
from .flow import runs_of
from .hlo import Module
from .peak import Buffer, peak_of
from .text import readable, table


@dataclass(frozen=True)
class Alive:
    """Arrays that a device holds when it holds most: those that the same line has made.

    **Attributes:**

    - `bytes`: their size together.
    - `count`: how many there are.
    - `shape`, `dtype`: of each.
    - `primitive`, `source`: what has made them, and the line of Python.
    """

    bytes: int
    count: int
    dtype: str
    shape: tuple[int, ...]
    primitive: str
    source: str


@dataclass(frozen=True)
class ProgramMemory:
    """The memory that a compiled program needs, in bytes a device.

    **Attributes:**

    - `arguments`, `results`, `temporaries`: as the compiler has it.
    - `aliased`: how much of the results is in memory of donated arguments.
    - `code`: the program itself.
    - `constants`: the arrays that the function captures, and other large constants. The compiler's
        own analysis leaves them out.
    - `host`: arguments, results and temporaries in the host's memory.
    - `peak`: an estimate of the most that is held at one time: what is above, with the temporaries
        that are alive together by the order in which the program runs. The compiler may share more
        memory than this knows of, or pad tiles; `temporaries` is its own number.
    - `alive`: what is alive then besides arguments and constants, as a tuple of
        [`mylib.Alive`][], the largest first. A TPU's on-chip memory is not counted. Empty if the
        program's instructions are not in the order in which they run.
    """

    arguments: int
    results: int
    temporaries: int
    aliased: int
    code: int
    constants: int
    host: int
    peak: int
    alive: tuple[Alive, ...]

    @classmethod
    def of(cls, compiled: jax.stages.Compiled, module: Module) -> "ProgramMemory | None":
        analysis: Any = compiled.memory_analysis()
        if analysis is None:
            return None
        constants = constants_of(module)
        peak, alive = 0, ()
        if module.is_scheduled:
            found = peak_of(module)
            alive = _alive(found.alive)
            peak = analysis.argument_size_in_bytes + constants + found.bytes
        return cls(
            arguments=analysis.argument_size_in_bytes,
            results=analysis.output_size_in_bytes,
            temporaries=analysis.temp_size_in_bytes,
            aliased=analysis.alias_size_in_bytes,
            code=analysis.generated_code_size_in_bytes,
            constants=constants,
            host=analysis.host_argument_size_in_bytes
            + analysis.host_output_size_in_bytes
            + analysis.host_temp_size_in_bytes,
            peak=peak,
            alive=alive,
        )

    def lines(self) -> list[str]:
        parts = {
            "arguments": self.arguments,
            "results": self.results,
            "temporaries": self.temporaries,
            "constants": self.constants,
            "code": self.code,
            "on the host": self.host,
        }
        held = ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)
        shared = f" ({readable(self.aliased)} of them in donated arguments)" if self.aliased else ""
        lines = [f"each device holds {held or 'nothing'}{shared}"]
        if self.alive:
            lines.append(
                f"largest when it holds most, about {readable(self.peak)} by the schedule:"
            )
            rows = [
                (
                    readable(x.bytes),
                    f"{x.count} x " * (x.count > 1) + f"{x.dtype}{list(x.shape)}",
                    x.primitive,
                    x.source,
                )
                for x in self.alive[:_SHOWN]
            ]
            lines += table(rows)
        return lines


_SHOWN = 6
_SMALL = 1024


def _alive(buffers: list[Buffer]) -> tuple[Alive, ...]:
    alike: dict[tuple[str, tuple[int, ...], str, str], int] = {}
    sizes: dict[tuple[str, tuple[int, ...], str, str], int] = {}
    for buffer in buffers:
        if buffer.bytes < _SMALL:
            continue
        x = buffer.made_by
        array = next(a for a in x.arrays if a.bytes == buffer.bytes)
        key = array.dtype, array.shape, primitive_of(x), source_of(x)
        alike[key] = alike.get(key, 0) + 1
        sizes[key] = sizes.get(key, 0) + buffer.bytes
    found = [Alive(sizes[key], count, *key) for key, count in alike.items()]
    return tuple(sorted(found, key=lambda x: -x.bytes))


def constants_of(module: Module) -> int:
    """The size of the arrays that are part of the program. What is the same number throughout is
    none.
    """
    return sum(
        x.bytes
        for name in runs_of(module)
        for x in module.computations[name].instructions
        if x.opcode == "constant" and x.type.find("[]") < 0
    )
