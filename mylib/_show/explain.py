"""`explain`: shows where every leaf would go, why, and the memory it needs, without moving it."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import jax.tree_util as jtu
from jax.experimental.layout import Format
from jax.sharding import AbstractMesh, NamedSharding, Sharding
from jaxtyping import PyTree

from .._errors import Fault, PlacementError
from .._placement import (
    AnyMesh,
    Placement,
    Target,
    World,
    axis_names,
    current_world,
    decide,
    default_memory_kind,
    entries_of,
    is_rule,
    leaf_at,
    same_axes,
    sharding_of,
)
from .._tree import KeyPath, Kind, Leaf, name_of, split
from ..rules import as_rule

# Leaves of this many bytes or more count as large.
_LARGE = 2**20


def explain(
    tree: PyTree[Any], placement: PyTree[Placement], /, mesh: AnyMesh | None = None
) -> "Explanation":
    """Shows where every array of a tree would go, which rule chose that and why, and how much
    memory each device needs. Moves nothing, needs no devices, and doesn't raise for faulty
    placements: faults are part of the result.

    **Arguments:**

    - `tree`: any PyTree; it may be abstract (`equinox.filter_eval_shape`).
    - `placement`: as in [`mylib.filter_shard`][].
    - `mesh`: the mesh for a `PartitionSpec`; by default the mesh of `jax.set_mesh`. It may be a
        `jax.sharding.AbstractMesh` of any size.

    **Returns:**

    A [`mylib.Explanation`][], which prints as a table.

    !!! Example

        ```python
        mesh = jax.sharding.AbstractMesh((1024,), ("data",))
        model = eqx.filter_eval_shape(
            eqx.nn.MLP, 4096, 4096, 16384, 8, key=jax.random.key(0)
        )
        explanation = mylib.explain(model, mylib.rules.fsdp("data"), mesh)
        print(explanation)
        assert not explanation.faults
        ```
    """
    leaves = split(tree)
    # Abstract leaves: it isn't checked whether the arrays can be moved to their targets.
    abstract = replace(leaves, kinds=[Kind.ABSTRACT] * len(leaves.kinds))
    world = current_world()
    decision = decide(abstract, placement, mesh, world)
    # The leaves with faults that a rule itself reports.
    named = {fault.path for fault in decision.faults}
    rows: list[Row] = []
    for i, (entry, target) in enumerate(zip(decision.entries, decision.targets, strict=True)):
        leaf = leaf_at(leaves, i, decision.mesh)
        if i in decision.faulty or name_of(leaf.path) in named:
            rows.append(Row(leaf, None, None, "", True))
        else:
            place = target or _resting_place(leaves.arrays[i], leaves.kinds[i])
            rows.append(Row(leaf, target, _grounded(place, world), _reason(entry, leaf), False))
    return Explanation(tuple(rows), tuple(decision.faults))


def _resting_place(x: Any, kind: Kind) -> Target | None:
    return x.sharding if kind in (Kind.DEVICE, Kind.ABSTRACT) else None


def _grounded(place: Target | None, world: World) -> Sharding | None:
    """Replaces an abstract mesh by the mesh with devices, if known: the shardings of traced values
    have abstract meshes.
    """
    if place is None:
        return None
    sharding, devices = sharding_of(place), world.devices
    if (
        isinstance(sharding, NamedSharding)
        and isinstance(sharding.mesh, AbstractMesh)
        and devices is not None
        and same_axes(sharding.mesh, devices)
    ):
        return NamedSharding(devices, sharding.spec, memory_kind=sharding.memory_kind)
    return sharding


def _reason(entry: Any, leaf: Leaf) -> str:
    if is_rule(entry):
        # As one line of the table.
        return " ".join(str(as_rule(entry).why(leaf)).split())
    return "" if entry is None else "given as such"


@dataclass(frozen=True)
class Row:
    """The result of [`mylib.explain`][] for one array leaf.

    **Attributes:**

    - `leaf`: the [`mylib.Leaf`][]: its name, shape, dtype, bytes.
    - `target`: where it would go; None if it is left alone, or can't be placed.
    - `place`: where it would be afterwards: the target, or its current sharding, if known, when it
        is left alone.
    - `why`: the rule that chose it, and its reason.
    - `faulty`: whether it can't be placed.
    - `spec`: the target as text.
    - `nbytes`: the bytes of the whole leaf; 0 if its size is symbolic.
    - `devices`: the number of devices that hold a part of it; 0 if unknown.
    - `bytes_per_device`: its bytes on each of them.
    - `wasted`: the bytes that would be saved, over all devices, if each part were held only once.
    """

    leaf: Leaf
    target: Target | None
    place: Sharding | None
    why: str
    faulty: bool

    @cached_property
    def spec(self) -> str:
        if self.target is None:
            return "can't be placed" if self.faulty else "left alone"
        sharding = sharding_of(self.target)
        if not isinstance(sharding, NamedSharding):
            return str(sharding)
        spec = str(sharding.spec).replace("PartitionSpec", "P").replace(",)", ")")
        chosen = isinstance(self.target, Format) and self.target.layout is not None
        layout = ", with a layout" if chosen else ""
        return spec + (f" in {sharding.memory_kind}" if self.offloaded else "") + layout

    @cached_property
    def devices(self) -> int:
        return 0 if self.place is None else self.place.num_devices

    @cached_property
    def bytes_per_device(self) -> int:
        if self.place is None or self.symbolic:
            return 0
        if not isinstance(self.place, NamedSharding):
            return math.prod(self.place.shard_shape(self.leaf.shape)) * self.leaf.dtype.itemsize
        # Not `shard_shape`: it raises inside shard_map.
        size, mesh = self.leaf.dtype.itemsize, self.place.mesh
        entries = entries_of(self.place.spec)
        for dim, entry in zip_longest(self.leaf.shape, entries[: self.leaf.ndim]):
            size *= -(-dim // math.prod(mesh.shape[name] for name in axis_names(entry)))
        return size

    @property
    def nbytes(self) -> int:
        """The bytes of the whole leaf."""
        return 0 if self.symbolic else self.leaf.nbytes

    @property
    def symbolic(self) -> bool:
        """Whether its size is symbolic, as in `jax.export`; it then counts as 0."""
        return not all(isinstance(dim, int) for dim in self.leaf.shape)

    @property
    def offloaded(self) -> bool:
        """Whether it is in another memory than the devices' own."""
        if self.place is None:
            return False
        return self.place.memory_kind not in (None, default_memory_kind(self.place))

    @property
    def wasted(self) -> int:
        return max(0, self.bytes_per_device * self.devices - self.nbytes)


@dataclass(frozen=True, repr=False)
class Explanation:
    """The result of [`mylib.explain`][]. Prints as a table, in which leaves that differ only by an
    index, such as the layers of a model, share a line.

    **Attributes:**

    - `rows`: a [`mylib.Row`][] for each array leaf.
    - `faults`: all faults, each a [`mylib.Fault`][].
    - `nbytes`: the bytes of all leaves, each counted once.
    - `bytes_by_device`: the bytes that each device would hold in its own memory. The devices of an
        abstract mesh are numbered.
    - `most_loaded`: the device that would hold the most bytes, and their number; None if no device
        would hold any.
    - `replicated`: the rows of large leaves (1 MiB or more) that every device would hold whole.
    """

    rows: tuple[Row, ...]
    faults: tuple[Fault, ...]

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    @cached_property
    def bytes_by_device(self) -> dict[Any, int]:
        by_place: Counter[Any] = Counter()
        for row in self.rows:
            if row.place is not None and not row.offloaded:
                by_place[_whereabouts(row.place)] += row.bytes_per_device
        by_device: Counter[Any] = Counter()
        for place, size in by_place.items():
            for device in range(place.size) if isinstance(place, AbstractMesh) else place:
                by_device[device] += size
        # Sets of devices are unordered.
        return dict(sorted(by_device.items(), key=lambda load: getattr(load[0], "id", load[0])))

    @property
    def most_loaded(self) -> tuple[Any, int] | None:
        loads = self.bytes_by_device
        return max(loads.items(), key=lambda load: load[1]) if loads else None

    @property
    def replicated(self) -> tuple[Row, ...]:
        return tuple(
            row
            for row in self.rows
            if row.devices > 1 and row.bytes_per_device == row.nbytes >= _LARGE
        )

    def __repr__(self) -> str:
        lines = _columns([_HEADER, *(_cells(label, rows) for label, rows in _fold(self.rows))])
        lines += ["", *self._totals()]
        lines += [_show_waste(label, rows) for label, rows in _fold(self.replicated)]
        if self.faults:
            lines += ["", str(PlacementError(self.faults))]
        return "\n".join(lines)

    def _totals(self) -> list[str]:
        arrays = _count(len(self.rows), "array")
        lines = [f"{arrays}, {show_bytes(self.nbytes)}"]
        if self.most_loaded is not None:
            device, most = self.most_loaded
            count, least = len(self.bytes_by_device), min(self.bytes_by_device.values())
            devices = _count(count, "device")
            lines[0] += (
                f"; {show_bytes(most)} on each of {devices}"
                if most == least
                else f"; on {devices}, {show_bytes(most)} on the most loaded one ({device}) and "
                f"{show_bytes(least)} on the least"
            )
        offloaded = sum(row.nbytes for row in self.rows if row.offloaded)
        if offloaded:
            lines.append(f"{show_bytes(offloaded)} of the arrays in other memory than the devices'")
        return lines


def show_bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


_HEADER = ("array", "shape", "dtype", "spec", "bytes", "per device", "why")


def _cells(label: str, rows: Sequence[Row]) -> tuple[str, ...]:
    row, count = rows[0], len(rows)
    times = f"{count} x " if count > 1 else ""
    per_device = show_bytes(row.bytes_per_device) if row.place is not None else ""
    nbytes = "symbolic" if row.symbolic else show_bytes(row.nbytes)
    return (
        label,
        str(row.leaf.shape),
        str(row.leaf.dtype),
        row.spec,
        times + nbytes,
        per_device and times + per_device,
        row.why,
    )


def _columns(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]


def _show_waste(label: str, rows: Sequence[Row]) -> str:
    wasted = show_bytes(sum(row.wasted for row in rows))
    devices = _count(rows[0].devices, "device")
    return f"large and replicated: {label} on {devices}, which wastes {wasted}"


def _count(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _fold(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Groups rows that differ only in indices of their paths, under one name."""
    alike: dict[Any, list[Row]] = {}
    for row in rows:
        name = _starred(row.leaf.path)
        size = (row.leaf.shape, row.leaf.dtype, row.devices, row.bytes_per_device)
        key = (name, row.spec, row.why, row.offloaded, *size)
        alike.setdefault(key, []).append(row)
    labels = [_common_name(group) for group in alike.values()]
    times = Counter(labels)
    return [
        (label if times[label] == 1 else _ends(group), group)
        for label, group in zip(labels, alike.values(), strict=True)
    ]


def _starred(path: KeyPath) -> str:
    return "".join("[*]" if _is_index(key) else jtu.keystr((key,)) for key in path)


def _is_index(key: Any) -> bool:
    return isinstance(key, jtu.SequenceKey) or (
        isinstance(key, jtu.DictKey) and isinstance(key.key, int)
    )


def _common_name(rows: Sequence[Row]) -> str:
    """The common name of the rows' leaves, with a star for each index that differs."""
    levels = zip(*(row.leaf.path for row in rows), strict=True)
    return (
        "".join(
            _starred(keys[:1]) if len(set(keys)) > 1 else jtu.keystr(keys[:1]) for keys in levels
        )
        or "the array"
    )


def _ends(rows: Sequence[Row]) -> str:
    first, last = name_of(rows[0].leaf.path), name_of(rows[-1].leaf.path)
    return first if len(rows) == 1 else f"{first} ... {last}"


def _whereabouts(sharding: Sharding) -> AbstractMesh | frozenset[Any]:
    mesh = getattr(sharding, "mesh", None)
    return mesh if isinstance(mesh, AbstractMesh) else frozenset(sharding.device_set)
