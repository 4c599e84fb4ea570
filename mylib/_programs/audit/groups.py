"""The groups of devices of a collective, and the mesh axes that they lie along."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ..._core.errors import AuditError
from .hlo import numbers

# Each row is a group: the positions of its devices in the program's list of devices.
Groups = np.ndarray

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(?P<axes>.*?)\](?:, device_ids=\((?P<devices>.*)\))? \{(?P<used>.*)\}")
_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")


def groups_of(text: str, devices: int) -> Groups:
    """The groups of a `replica_groups` attribute, in any of its spellings."""
    if text.startswith("{"):
        rows = [numbers(row) for row in re.findall(r"\{([\d, ]*)\}", text[1:-1])]
        rows = rows or [list(range(devices))]  # `{}` is one group of all
        if len({len(row) for row in rows}) != 1:
            raise AuditError(f"the groups are of different sizes: replica_groups={text}")
        groups = np.array(rows)
    else:
        try:
            groups = _of_mesh(text) if text.startswith("mesh[") else _of_iota(text)
        except ValueError as error:
            raise AuditError(f"replica_groups={text} is not understood") from error
    if groups.ndim != 2 or sorted(groups.ravel()) != list(range(devices)):
        raise AuditError(
            f"replica_groups={text} doesn't name each of the program's {devices} devices once"
        )
    return groups


def pairs_of(text: str, devices: int) -> Groups:
    """The pairs of a `source_target_pairs` attribute."""
    pairs = np.array([numbers(pair) for pair in re.findall(r"\{([\d, ]+)\}", text[1:-1])])
    if not pairs.size:
        return np.zeros((0, 2), int)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.max() >= devices:
        raise AuditError(f"source_target_pairs={text} is not understood")
    return pairs


def rings_of(pairs: Groups) -> Groups | None:
    """The rings that pairs form, as groups; None if they form none. One that sends to itself is in
    none of them.
    """
    following = dict(pair for pair in pairs.tolist() if pair[0] != pair[1])
    rings: list[list[int]] = []
    left = set(following)
    while left:
        first = min(left)
        ring = [first]
        while (after := following.get(ring[-1])) != first:
            if after is None or after in ring:
                return None
            ring.append(after)
        left -= set(ring)
        rings.append(ring)
    return np.array(rings) if len({len(ring) for ring in rings}) == 1 else None


def _of_iota(text: str) -> np.ndarray:
    """What `[4,2]<=[2,4]T(1,0)` stands for. Raises a `ValueError` if it stands for nothing."""
    shape, dims, order = (numbers(part or "") for part in _matched(_IOTA, text).groups())
    devices = np.arange(math.prod(shape)).reshape(dims or shape)
    return devices.transpose(order or range(devices.ndim)).reshape(shape)


def _of_mesh(text: str) -> Groups:
    match = _matched(_MESH, text)
    groups = MeshAxes.read(match["axes"]).groups(match["used"].replace("'", "").split(","))
    if not match["devices"]:
        return groups
    is_list = re.fullmatch(r"[\d, ]+", match["devices"])
    ids = np.array(numbers(match["devices"])) if is_list else _of_iota(match["devices"])
    if ids.size != groups.size:
        raise ValueError(text)
    return ids.ravel()[groups]


def _along_parts(sizes: Sequence[int], parts: Sequence[tuple[int, int, int]]) -> Groups:
    """The groups along parts of axes. A part is the number of an axis, the number of blocks that
    this is divided into, and the number of devices in each.
    """
    others = np.indices(sizes).reshape(len(sizes), -1)
    inside = np.zeros(math.prod(sizes), int)
    for axis, blocks, size in parts:
        apart = sizes[axis] // (blocks * size)
        place = others[axis] // apart % size
        inside = inside * size + place
        others[axis] -= place * apart
    # Devices of one group differ only inside; the last key is the first that is sorted by.
    order = np.lexsort((inside, *others[::-1]))
    return order.reshape(-1, math.prod(size for *_, size in parts))


def _matched(pattern: re.Pattern[str], text: str) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return match


def axis_of(name: str) -> str:
    """The axis that `"data:(2)4"` or `"~data"` belongs to."""
    return name.lstrip("~").split(":")[0]


def in_words(axes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes.items())


class MeshAxes(NamedTuple):
    """The axes of a mesh, in the order of the devices that a program runs on."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh) -> "MeshAxes":
        return cls(tuple(map(str, mesh.axis_names)), tuple(mesh.axis_sizes))

    @classmethod
    def of_sizes(cls, sizes: Mapping[str, int]) -> "MeshAxes":
        return cls(tuple(sizes), tuple(sizes.values()))

    @classmethod
    def read(cls, text: str) -> "MeshAxes":
        """The axes in `'x'=2,'y'=4`."""
        return cls.of_sizes({name: int(size) for name, size in _AXIS.findall(text)})

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    def named(self, groups: Groups) -> tuple[str, ...]:
        """The axes along which the devices of each group lie. `"data:(2)4"` is a part of an axis:
        4 devices in each of its 2 blocks. If a group isn't a part of the mesh, its name has the
        axes along which its devices differ: `"~data"`.
        """
        places = np.stack(np.unravel_index(groups, self.sizes), -1)
        varies = (places != places[:, :1]).any((0, 1))
        axes = [i for i, does in enumerate(varies) if does]
        # As many devices as the axes along which they differ have: then all of them.
        if math.prod(self.sizes[i] for i in axes) == groups.shape[1]:
            return tuple(self.names[i] for i in axes)
        # A group that is no part of the mesh still has a name, so that contracts count it.
        return self._parts(groups, axes) or tuple(f"~{self.names[i]}" for i in axes)

    def groups(self, names: Sequence[str]) -> Groups:
        """The groups that lie along these axes, as `named` names them; of a group that isn't a part
        of the mesh, those along the whole axes.
        """
        chosen: list[tuple[int, int, int]] = []
        for name in names:
            axis, _, part = name.lstrip("~").partition(":(")
            before, _, size = part.partition(")")
            i = self.names.index(axis)
            chosen.append((i, int(before or 1), int(size or self.sizes[i])))
        return _along_parts(self.sizes, chosen)

    def along(self, pairs: Groups) -> tuple[str, ...]:
        """The axes along which data moves from the first device of each pair to the second."""
        places = np.stack(np.unravel_index(pairs, self.sizes), -1)
        varies = (places[:, 0] != places[:, 1]).any(0)
        return tuple(name for name, does in zip(self.names, varies, strict=True) if does)

    def _parts(self, groups: Groups, axes: Sequence[int]) -> tuple[str, ...]:
        """The names of a group that has only parts of some axes."""
        chosen: list[tuple[int, int, int]] = []
        for i in axes:
            # By the first group. Whether the others lie alike is checked with the names found.
            at = np.unique(np.unravel_index(groups[0], self.sizes)[i])
            if len(at) == 1 or self.sizes[i] % (len(at) * (at[1] - at[0])):
                return ()
            chosen.append((i, int(self.sizes[i] // (len(at) * (at[1] - at[0]))), len(at)))
        along = _along_parts(self.sizes, chosen)
        if {*map(frozenset, along.tolist())} != {*map(frozenset, groups.tolist())}:
            return ()
        return tuple(
            self.names[i] if size == self.sizes[i] else f"{self.names[i]}:({before}){size}"
            for i, before, size in chosen
        )


def axes_in(text: str) -> list[MeshAxes]:
    """The meshes in a program's text, unless XLA has invented their names."""
    texts = re.findall(r"replica_groups=mesh\[([^\]]*)\](?!,)", text)
    meshes = dict.fromkeys(map(MeshAxes.read, texts))
    # The compiler calls them `axis_0`, `axis_1`, where it has only numbers of devices.
    return [x for x in meshes if not all(re.fullmatch(r"axis_\d+", name) for name in x.names)]
