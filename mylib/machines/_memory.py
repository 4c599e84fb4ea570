"""The memory that a compiled program needs on each device."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import AbstractMesh

from .._text import show_bytes
from ._fit import Argument, Fit, largest
from ._machine import Machine
from ._sheets import CHIPS


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
    - `peak`: the most that is held at one time, by XLA's own count (`peak_memory_in_bytes`), which
        is exact on GPUs. On TPUs that count may contain on-chip memory; if it is larger than
        `total`, `peak` is `total`. On the CPU it lacks the temporaries, so `peak` is `total`.
    - `accepted`: the `device_kind` of the TPU for which its compiler has accepted the program,
        which it does only if the program fits; empty for other compilers, which don't check.
    - `largest`: the largest arguments, each with `path`, `shape` and `nbytes` on each device.
    """

    arguments: int
    results: int
    temporaries: int
    aliased: int
    code: int
    constants: int
    host: int
    peak: int
    accepted: str = ""
    largest: tuple[Argument, ...] = field(default=(), repr=False)

    @property
    def total(self) -> int:
        """The sum of its parts, as if temporaries were never in each other's place."""
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
        accepted = self._is_accepted_by(machine.chip.kinds, machine.memory)
        return Fit(
            self.peak, machine.memory, self.largest, str(self), accepted, arguments=self.arguments
        )

    def _is_accepted_by(self, kinds: Sequence[str], memory: int) -> bool:
        """Whether a TPU's compiler has found room for it in as much memory."""
        sheets = (chip for chip in CHIPS.values() if self.accepted in chip.kinds)
        sizes = [chip.memory // chip.devices for chip in sheets if chip.memory is not None]
        return self.accepted in kinds and sizes != [] and memory >= sizes[0]

    def __str__(self) -> str:
        names = "arguments", "results", "temporaries", "aliased", "code", "constants", "host"
        parts = {name: getattr(self, name) for name in names} | {"peak": self.peak}
        return ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)


def memory_of(compiled: jax.stages.Compiled, arguments: Sequence[Argument], text: str) -> Memory:
    """The memory of a program, given its arguments and its text."""
    stats: Any = compiled.memory_analysis()
    if stats is None:
        raise NotImplementedError("this compiler does not report how much memory a program needs")
    constants = sum(_constants(text))
    code = stats.generated_code_size_in_bytes
    platform, kind = _compiled_for(compiled)
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
    return dataclasses.replace(memory, peak=min(counted, memory.total))


def _compiled_for(compiled: jax.stages.Compiled) -> tuple[str, str]:
    """The platform and the `device_kind` of its devices. They are unknown, so empty, if it has no
    arguments and no results.
    """
    for sharding in jtu.tree_leaves((compiled.input_shardings, compiled.output_shardings)):
        if not isinstance(getattr(sharding, "mesh", None), AbstractMesh):
            device = next(iter(sharding.device_set))
            return device.platform, device.device_kind
    return "", ""


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
