"""The memory that a compiled program needs on each device."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from ._fit import Argument, Fit, in_bytes, largest
from ._machine import Machine


@dataclass(frozen=True)
class Memory:
    """The bytes that a compiled program needs on each device.

    **Attributes:**

    - `arguments`, `results`: the arrays that it takes and returns.
    - `aliased`: the part of `results` that reuses the memory of donated arguments.
    - `temporaries`: the most memory that it needs for intermediate values.
    - `code`, `constants`: the program itself, and the arrays that it has captured. The compiler for
        GPUs doesn't report the size of the code.
    - `host`: arguments, results and temporaries in the host's memory, not part of `total`.
    - `largest`: the largest arguments, each with `path`, `shape` and `nbytes` on each device.
    """

    arguments: int
    results: int
    temporaries: int
    aliased: int
    code: int
    constants: int
    host: int
    largest: tuple[Argument, ...] = field(default=(), repr=False)

    @property
    def total(self) -> int:
        """The memory that a device needs for all of it."""
        return (
            self.arguments
            + self.results
            - self.aliased
            + self.temporaries
            + self.code
            + self.constants
        )

    def fits(self, machine: Machine) -> Fit:
        """Whether the program fits on each device of a machine.

        **Arguments:**

        - `machine`: a [`mylib.machines.Machine`][] whose memory is known.

        **Returns:**

        A [`mylib.machines.Fit`][], which is true or false. As text, it shows how much is missing.
        """
        if machine.memory is None:
            raise ValueError(
                f"the memory of {machine} is unknown. Describe it: "
                "dataclasses.replace(machine.chip, memory=...)"
            )
        return Fit(self.total, machine.memory, self.largest, str(self))

    def __str__(self) -> str:
        names = "arguments", "results", "temporaries", "aliased", "code", "constants", "host"
        parts = {name: getattr(self, name) for name in names}
        return ", ".join(f"{name} {in_bytes(size)}" for name, size in parts.items() if size)


def memory_of(
    compiled: jax.stages.Compiled, arguments: Sequence[Argument], text: str | None = None
) -> Memory:
    """`text` is the text of the program, if the caller has it."""
    stats: Any = compiled.memory_analysis()
    if stats is None:
        raise NotImplementedError("this compiler does not report how much memory a program needs")
    constants = sum(_constants(compiled.as_text() or "" if text is None else text))
    code = stats.generated_code_size_in_bytes
    return Memory(
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
        largest=largest(arguments),
    )


def _constants(text: str) -> Iterator[int]:
    """The bytes of each constant array in a program."""
    for dtype, shape in _CONSTANT.findall(text):
        bits = 1 if dtype == "pred" else int(re.sub(r"^\D+(\d+).*", r"\1", dtype))
        yield math.prod(int(size) for size in shape.split(",")) * max(bits, 8) // 8


# Without scalars, whose memory is negligible.
_CONSTANT = re.compile(r"= ([a-z]+\d*[a-z\d]*)\[([\d,]+)\]\S* constant\(")


def arguments_of(names: Sequence[str], arrays: Sequence[Any]) -> list[Argument]:
    return [
        Argument(name, tuple(x.shape), _bytes_of(x)) for name, x in zip(names, arrays, strict=True)
    ]


def _bytes_of(x: Any) -> int:
    sharding = getattr(x, "sharding", None)
    shape = x.shape if sharding is None else sharding.shard_shape(tuple(x.shape))
    return math.prod(shape) * x.dtype.itemsize
