"""The memory that a compiled program needs on each device."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..._core.text import show_bytes
from .fit import Alive, Argument, Fit
from .machine import Machine
from .sheets import CHIPS


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
    - `alive`: what is held at the peak besides arguments and constants, as a tuple of
        `mylib.machines.Alive`, the largest first. None if the
        arrays found in the program's order miss `peak` by more than 10 %.

    !!! Example

        ```python
        memory = mylib.audit(lambda x: x + 1, jnp.ones((8, 8))).memory
        assert memory.arguments == memory.results == 256
        ```
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
    alive: tuple[Alive, ...] | None = None

    @property
    def total(self) -> int:
        """The sum of its parts, as if temporaries were never in each other's place."""
        held = self.arguments + self.results + self.temporaries + self.code + self.constants
        return held - self.aliased

    def fits(self, machine: Machine) -> Fit:
        """Whether the program fits on each device of a machine.

        **Arguments:**

        - `machine`: a `mylib.machines.Machine` whose memory is known.

        **Returns:**

        A `mylib.machines.Fit`, which is true or false. As text, it shows how much is missing.
        """
        if machine.memory is None:
            raise ValueError(
                f"the memory of {machine} is unknown. Describe it: "
                "dataclasses.replace(machine.chip, memory=...)"
            )
        accepted = self._is_accepted_by(machine.chip.kinds, machine.memory)
        return Fit(
            self.peak,
            machine.memory,
            self.largest,
            str(self),
            accepted,
            arguments=self.arguments,
            temporaries=self.alive or (),
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
