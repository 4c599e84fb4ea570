"""Which mesh axes split which letters of a kernel."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..errors import Fault, PlacementError
from ..placement import axis_names
from ..text import show_spec
from .splits import Letters, Shaped, Splits

# For a letter, the mesh axes that split it.
Axes = Mapping[str, tuple[str, ...]]


class Called(Protocol):
    """What an equation calls: the user's function, or one that is made of it."""

    def __call__(self, *arrays: jax.Array) -> Sequence[jax.Array]: ...

    @property
    def name(self) -> str: ...

    @property
    def paths(self) -> list[str]:
        """What each array is called in errors."""
        ...

    @property
    def is_checked(self) -> bool: ...

    def reference(self, arrays: Sequence[jax.Array]) -> tuple[list[Any], object]: ...

    def shown(self, letter: str, splits: Splits) -> str:
        """A letter as `axes=` names it."""
        ...


class GivenArray(NamedTuple):
    """An array that a kernel takes or returns: its name in errors, and the entries of its spec."""

    path: str
    shape: tuple[int, ...]
    letters: Letters
    entries: tuple[Any, ...]


@dataclass(frozen=True, repr=False)
class CallInLayer:
    """The layer of `fully_shard` that calls a kernel, and what the kernel is given there."""

    context: Any
    name: str
    splits: Splits
    shapes: tuple[tuple[int, ...], ...]

    def axes_of(self, splits: Splits) -> Axes | None:
        """How the kernel is split here. Letters that `vmap` has added since are rows."""
        split: Axes | None = self.context.axes_of(self.name, self.splits, self.shapes)
        added = [x for x in splits.named if x not in self.splits.letters]
        rows: tuple[str, ...] = self.context.rows
        return None if split is None else {**split, **dict.fromkeys(added[:1], rows)}


def specs_of(
    letters: Sequence[Letters], arrays: Sequence[Shaped], split: Axes
) -> list[PartitionSpec]:
    """The specs of arrays. A dimension of size 1 is broadcast: it is whole."""
    return [
        PartitionSpec(
            *(split.get(x) if n > 1 else None for x, n in zip(names, array.shape, strict=True))
        )
        for names, array in zip(letters, arrays, strict=True)
    ]


def splits_in(
    operands: Sequence[GivenArray], mesh: AbstractMesh | Mesh
) -> Iterator[tuple[GivenArray, int, tuple[str, ...]]]:
    """Each dimension that is split, with the axes of more than one device that do it."""
    for operand in operands:
        for dim, (size, entry) in enumerate(zip(operand.shape, operand.entries, strict=False)):
            axes = tuple(axis for axis in axis_names(entry) if mesh.shape[axis] > 1)
            if axes and size > 1:
                yield operand, dim, axes


def agreed(kernel: Called, splits: Splits, avals: Sequence[Any], mesh: AbstractMesh | Mesh) -> Axes:
    """How Explicit axes split the letters of a kernel, if the types of all operands agree."""
    operands = [
        GivenArray(path, tuple(aval.shape), letters, tuple(aval.sharding.spec))
        for path, aval, letters in zip(kernel.paths, avals, splits.operands, strict=True)
    ]
    split: dict[str, tuple[str, ...]] = {}
    faults: list[Fault] = []
    for operand, dim, axes in splits_in(operands, mesh):
        letter = operand.letters[dim]
        reason = unfit(letter, axes, splits, mesh)
        if reason is None and split.setdefault(letter, axes) != axes:
            reason = f"another operand has {letter!r} split over {', '.join(split[letter])}"
        for other, taken in split.items():
            if reason is None and other != letter and not set(taken).isdisjoint(axes):
                reason = f"{', '.join(axes)} splits {other!r}, too"
        if reason is not None:
            faults.append(fault(kernel, operand, dim, axes, splits, reason))
    if faults:
        raise PlacementError(faults)
    return split


def unfit(
    letter: str, axes: Sequence[str], splits: Splits, mesh: AbstractMesh | Mesh
) -> str | None:
    """Why these axes can't split a letter."""
    if letter not in splits.parts:
        return "the kernel needs this dimension whole"
    count = math.prod(mesh.shape[axis] for axis in axes)
    if splits.parts[letter] % count:
        return f"{count} devices don't divide {splits.parts[letter]}"
    return None


def fault(
    kernel: Called, operand: GivenArray, dim: int, axes: Sequence[str], splits: Splits, reason: str
) -> Fault:
    over = ", ".join(map(repr, axes))
    request = (
        f"dimension {dim} ({operand.letters[dim]!r}) over {over}, where {kernel.name} is called"
    )
    entries = [None if i == dim else entry for i, entry in enumerate(operand.entries)]
    fits = ", ".join(f"{letter!r} into {count}" for letter, count in splits.parts.items())
    spec = show_spec(PartitionSpec(*entries))
    fix = (
        f"mylib.filter_shard({operand.path}, {spec}) before, or split another dimension: of "
        f"{splits} these may be split: {fits or 'nothing'}"
    )
    return Fault(operand.path, operand.shape, request, reason, fix)
