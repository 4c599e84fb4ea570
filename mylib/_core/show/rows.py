"""One row for each array leaf: where it is or would go, and its bytes."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from ..placement import (
    Target,
    bytes_on_each,
    entries_over,
    partial_sums,
    sharding_of,
    unusual_memory_kind,
)
from ..text import counted, show_bytes, show_spec
from ..tree import KeyPath, Leaf
from .text import number_of, show_device

# The states of leaves.
COMMITTED, UNCOMMITTED, DELETED = "committed", "uncommitted", "deleted"
NUMPY, ABSTRACT, TRACED = "NumPy", "abstract", "traced"

_UNPLACED = {
    "": "left alone",
    NUMPY: "host memory",
    ABSTRACT: "no sharding",
    TRACED: "by its type",
}


@dataclass(frozen=True)
class Row:
    """One array leaf, in the results of `mylib.explain` and `mylib.show`.

    **Attributes:**

    - `leaf`: the `mylib.Leaf`: its name, shape, dtype, bytes.
    - `path`: the keys that lead to it.
    - `target`: where it would go; None if it is left alone, or can't be placed. In `mylib.show`
        that is where it is.
    - `place`: where it would be afterwards: the target, or its current sharding, if known, when it
        is left alone.
    - `why`: the rule that chose it, and its reason. In `mylib.show` that is its state; of a traced
        leaf, its type.
    - `faulty`: whether it can't be placed.
    - `state`: `"committed"`, `"uncommitted"`, `"deleted"` (donated, for example), `"NumPy"`,
        `"abstract"` or `"traced"`; empty in `mylib.explain`.
    - `spec`: the target as text.
    - `nbytes`: the bytes of the whole leaf; 0 if its size is symbolic, or it is deleted.
    - `devices`: the number of devices that hold a part of it; 0 if unknown.
    - `bytes_per_device`: its bytes on each of them.
    - `wasted`: the bytes that would be saved, over all devices, if each part were held only once.

    !!! Example

        ```python
        (row,) = mylib.show({"w": jnp.ones((64, 64))}).rows
        assert row.leaf.name == "['w']" and row.devices == 1
        assert row.nbytes == row.bytes_per_device == 64 * 64 * 4
        ```
    """

    leaf: Leaf
    target: Target | None
    place: Sharding | None
    why: str
    faulty: bool
    state: str = ""

    @property
    def path(self) -> KeyPath:
        return self.leaf.path

    @cached_property
    def spec(self) -> str:
        if self.faulty:
            return "can't be placed"
        if self.target is None:
            return _UNPLACED.get(self.state, "")
        chosen = isinstance(self.target, Format) and self.target.layout is not None
        layout = ", with a layout" if chosen else ""
        return show_place(sharding_of(self.target)) + layout

    @cached_property
    def devices(self) -> int:
        return 0 if self.place is None else self.place.num_devices

    @cached_property
    def bytes_per_device(self) -> int:
        if self.place is None or not self._counts:
            return 0
        return bytes_on_each(self.place, self.leaf.shape, self.leaf.dtype)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole leaf."""
        return self.leaf.nbytes if self._counts else 0

    @property
    def _counts(self) -> bool:
        return not (self.symbolic or self.state == DELETED)

    @property
    def symbolic(self) -> bool:
        """Whether its size is symbolic, as in `jax.export`; it then counts as 0."""
        return not all(isinstance(dim, int) for dim in self.leaf.shape)

    @property
    def offloaded(self) -> bool:
        """Whether it is in another memory than the devices' own."""
        return self.place is not None and unusual_memory_kind(self.place) is not None

    @property
    def wasted(self) -> int:
        return max(0, self.bytes_per_device * self.devices - self.nbytes)

    @property
    def drawn_at(self) -> Sharding | None:
        """Its place, if it is known which device holds which part."""
        return self.place if self._counts else None

    @cached_property
    def likeness(self) -> Hashable:
        """Rows share a line if these are equal."""
        where = self.place.mesh if isinstance(self.place, NamedSharding) else self.place
        size = (self.leaf.shape, self.leaf.dtype, self.devices, self.bytes_per_device)
        return (self.spec, self.why, self.state, where, self.offloaded, *size)


@dataclass(frozen=True)
class Rows:
    """Rows, and their totals."""

    rows: tuple[Row, ...]

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @cached_property
    def bytes_by_device(self) -> dict[Any, int]:
        by_place: Counter[Any] = Counter()
        for row in self.rows:
            if row.place is not None and not row.offloaded and row.state != DELETED:
                by_place[_whereabouts(row.place)] += row.bytes_per_device
        by_device: Counter[Any] = Counter()
        for place, size in by_place.items():
            for device in range(place.size) if isinstance(place, AbstractMesh) else place:
                by_device[device] += size
        # Sets of devices are unordered.
        return dict(sorted(by_device.items(), key=lambda load: number_of(load[0])))

    @property
    def most_loaded(self) -> tuple[Any, int] | None:
        loads = self.bytes_by_device
        return max(loads.items(), key=lambda load: load[1]) if loads else None


def totals(rows: Rows) -> list[str]:
    lines = [f"{counted(len(rows.rows), 'array')}, {show_bytes(rows.nbytes)}"]
    if rows.most_loaded is not None:
        device, most = rows.most_loaded
        number, least = len(rows.bytes_by_device), min(rows.bytes_by_device.values())
        devices = counted(number, "device")
        lines[0] += (
            f"; {show_bytes(most)} on {'each of ' * (number > 1)}{devices}"
            if most == least
            else f"; on {devices}, {show_bytes(most)} on the most loaded one "
            f"({show_device(device)}) and {show_bytes(least)} on the least"
        )
    offloaded = sum(row.nbytes for row in rows.rows if row.offloaded)
    if offloaded:
        lines.append(f"{show_bytes(offloaded)} of the arrays in other memory than the devices'")
    return lines


def sizes(rows: Sequence[Row]) -> tuple[str, str]:
    """The bytes of rows that share a line, and those on each device."""
    row = rows[0]
    times = f"{len(rows)} x " if len(rows) > 1 else ""
    nbytes = "symbolic" if row.symbolic else show_bytes(row.nbytes)
    per_device = show_bytes(row.bytes_per_device) if row.place is not None else ""
    return times + nbytes, per_device and times + per_device


# Many arrays have the same sharding.
@lru_cache(maxsize=128)
def show_place(place: Sharding) -> str:
    """A sharding as text, without its mesh."""
    kind = unusual_memory_kind(place)
    memory = f" in {kind}" if kind else ""
    if isinstance(place, SingleDeviceSharding):
        (device,) = place.device_set
        return show_device(device) + memory
    if not isinstance(place, NamedSharding):
        return str(place)
    return show_spec(place.spec) + memory


def meaning(place: Sharding | None) -> Hashable:
    """Equal for shardings that split arrays in the same way, over the same mesh."""
    if not isinstance(place, NamedSharding):
        return place
    entries = entries_over(place.spec, place.mesh.axis_names)
    return place.mesh, entries, partial_sums(place.spec), place.memory_kind


def _whereabouts(sharding: Sharding) -> AbstractMesh | frozenset[Any]:
    mesh = getattr(sharding, "mesh", None)
    return mesh if isinstance(mesh, AbstractMesh) else frozenset(sharding.device_set)
