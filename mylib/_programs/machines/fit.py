"""Whether a compiled program fits into the memory of a machine's devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..._core.errors import MylibError
from ..._core.text import show_bytes

# List at most this many arrays.
_SHOWN = 5


class Argument(NamedTuple):
    """An array that a program takes: its path, its shape, and its bytes on each device. A
    `mylib.results.ProgramArray` is read from a compiled program, and there may be none: this is
    also known of a program that the compiler has refused.

    !!! Example

        ```python
        report = mylib.audit(lambda x: x @ x, jnp.ones((512, 512)))
        for argument in report.memory.largest:
            print(argument.path, argument.shape, argument.nbytes)
        ```
    """

    path: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Alive:
    """Arrays that one line has made, and that are alive when the program needs the most memory.

    **Attributes:**

    - `bytes`: their size together.
    - `count`: how many there are.
    - `shape`, `dtype`: of each.
    - `primitive`, `source`: what has made them, and the line of Python.

    !!! Example

        ```python
        report = mylib.audit(lambda x: jnp.sin(x) @ x, jnp.ones((512, 512)))
        for held in report.memory.alive or ():
            print(held.arrays, held.bytes, held.source)
        ```
    """

    bytes: int
    count: int
    dtype: str
    shape: tuple[int, ...]
    primitive: str
    source: str

    @property
    def arrays(self) -> str:
        """As text: `2 x f32[8, 4]`."""
        return f"{self.count} x " * (self.count > 1) + f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Fit:
    """Whether a program fits on a machine: true if it does. As text, it shows how much memory is
    missing, the program's largest arguments, or its largest other arrays if they need more, and
    fixes.

    **Attributes:**

    - `needed`, `available`: bytes on each device. `needed` is XLA's own count.
    - `largest`: the largest arguments, each with `path`, `shape` and `nbytes` on each device.
    - `parts`: the uses of the memory, as text.
    - `accepted`: whether the machine's own compiler has accepted the program, which decides.
    - `arguments`: the bytes of all arguments on each device.
    - `temporaries`: the largest other arrays that are held at the same time, as a tuple of
        `mylib.machines.Alive`; empty if they are unknown, as when the compiler has refused a
        program without naming arrays.

    !!! Example

        ```python
        compiled = mylib.filter_jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()
        fit = compiled.fits(mylib.machines.gpu("h100", devices_per_host=1))
        assert fit and fit.missing == 0
        ```
    """

    needed: int
    available: int
    largest: tuple[Argument, ...] = ()
    parts: str = ""
    accepted: bool = False
    arguments: int = 0
    temporaries: tuple[Alive, ...] = ()

    @property
    def missing(self) -> int:
        """The bytes that each device lacks; 0 if the program fits."""
        return 0 if self.accepted else max(0, self.needed - self.available)

    def __bool__(self) -> bool:
        return not self.missing

    def __repr__(self) -> str:
        needs = f"the program needs {show_bytes(self.needed)} on each device"
        if self:
            compiler = "; its compiler has accepted the program" if self.accepted else ""
            return f"{needs}, of {show_bytes(self.available)}{compiler}"
        lines = [
            f"{needs}, which has {show_bytes(self.available)}: {show_bytes(self.missing)} are "
            "missing",
            *([f"  {self.parts}"] if self.parts else []),
        ]
        sizes = "by their bytes on each device"
        if self.largest and self.arguments >= self.needed * _PART:
            lines.append(f"  its largest arguments, {sizes}:")
            lines += [f"    {show_bytes(x.nbytes):>10}  {x.path} {x.shape}" for x in self.largest]
            helps = "shard the large ones over more devices, and donate what a step replaces"
            lines.append(f"  {helps}")
        if self.needed - self.arguments >= self.needed * _PART:
            if self.temporaries:
                lines.append(f"  the largest arrays that it computes, {sizes}:")
            lines += [
                f"    {show_bytes(x.bytes):>10}  {x.arrays}  {x.primitive}  {x.source}".rstrip()
                for x in self.temporaries[:_SHOWN]
            ]
            lines.append(f"  {_HELPS}")
        return "\n".join(lines)


# Arguments, or temporaries, are listed if they need at least this part of the memory. A guess:
# smaller ones are not why a program does not fit.
_PART = 0.25
_HELPS = (
    "use a smaller batch, recompute more (mylib.filter_checkpoint, or another policy), or compute "
    "the largest in blocks, such as the loss over a large vocabulary"
)


class OutOfMemoryError(MylibError, RuntimeError):
    """The compiler found that a program doesn't fit into the memory of the devices.

    **Attributes:**

    - `fit`: a `mylib.machines.Fit`.

    !!! Example

        ```python
        def compiled(lowered):
            try:
                return lowered.compile()
            except mylib.machines.OutOfMemoryError as error:
                print(error.fit.missing, error)
        ```
    """

    def __init__(self, fit: Fit):
        self.fit = fit
        super().__init__(str(fit))

    def __reduce__(self) -> tuple[type["OutOfMemoryError"], tuple[Fit]]:
        return type(self), (self.fit,)


def largest(arguments: Sequence[Argument]) -> tuple[Argument, ...]:
    return tuple(sorted(arguments, key=lambda x: -x.nbytes)[:_SHOWN])
