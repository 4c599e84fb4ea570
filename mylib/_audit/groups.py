"""The groups of devices of a collective, and the mesh axes that they lie along."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from .._errors import AuditError

# Each row is a group: the positions of its devices in the program's list of devices.
Groups = np.ndarray

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(?P<axes>.*?)\](?:, device_ids=\((?P<devices>.*)\))? \{(?P<used>.*)\}")
_AXIS = re.compile(r"'?([^',=]+)'?=(\d+)")
_USED = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)")


def groups_of(text: str, devices: int) -> Groups:
    """The groups of a `replica_groups` attribute, in any of its spellings."""
    if text.startswith("{"):
        rows = [_integers(row) for row in re.findall(r"\{([\d, ]*)\}", text[1:-1])]
        if not rows:
            rows = [list(range(devices))]
        if len({len(row) for row in rows}) != 1:
            raise AuditError(f"the groups are of different sizes: replica_groups={text}")
        groups = np.array(rows)
    elif text.startswith("["):
        groups = _of_iota(text)
    elif text.startswith("mesh["):
        groups = _of_mesh(text)
    else:
        raise AuditError(f"replica_groups={text} is not understood")
    if groups.ndim != 2 or sorted(groups.ravel()) != list(range(devices)):
        raise AuditError(
            f"replica_groups={text} doesn't name each of the program's {devices} devices once"
        )
    return groups


def pairs_of(text: str, devices: int) -> Groups:
    """The pairs of a `source_target_pairs` attribute, without those of a device with itself."""
    pairs = all_pairs_of(text, devices)
    return pairs[pairs[:, 0] != pairs[:, 1]]


def all_pairs_of(text: str, devices: int) -> Groups:
    """The pairs of a `source_target_pairs` attribute."""
    pairs = np.array([_integers(pair) for pair in re.findall(r"\{([\d, ]+)\}", text[1:-1])])
    if not pairs.size:
        return np.zeros((0, 2), int)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.max() >= devices:
        raise AuditError(f"source_target_pairs={text} is not understood")
    return pairs


def rings_of(pairs: Groups) -> Groups | None:
    """The rings that pairs form, as groups; None if they form none."""
    following = dict(pairs.tolist())
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


def _integers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]


def _of_iota(text: str) -> Groups:
    match = _IOTA.fullmatch(text)
    if match is None:
        raise AuditError(f"replica_groups={text} is not understood")
    shape, dims, order = (_integers(part or "") for part in match.groups())
    if math.prod(shape) != math.prod(dims) or (order and sorted(order) != list(range(len(dims)))):
        raise AuditError(f"replica_groups={text} is not understood")
    devices = np.arange(math.prod(dims)).reshape(dims)
    return (devices.transpose(order) if order else devices).reshape(shape)


def _of_mesh(text: str) -> Groups:
    match = _MESH.fullmatch(text)
    if match is None:
        raise AuditError(f"replica_groups={text} is not understood")
    sizes = {name: int(size) for name, size in _AXIS.findall(match["axes"])}
    if match["devices"]:
        devices = _device_ids(match["devices"])
    else:
        devices = np.arange(math.prod(sizes.values()))
    used = [
        (name, int(pre or 1), int(size or 0)) for name, pre, size in _USED.findall(match["used"])
    ]
    if not {name for name, _, _ in used} <= set(sizes) or not used:
        raise AuditError(f"replica_groups={text} is not understood")
    shape: list[int] = []
    position: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        before = 1
        for _, pre, part in sorted(x for x in used if x[0] == name):
            if pre > before:
                shape.append(pre // before)
            position[name, pre] = len(shape)
            shape.append(part or size)
            before = pre * (part or size)
        if before < size:
            shape.append(size // before)
    if devices.size != math.prod(shape):
        raise AuditError(f"replica_groups={text} is not understood")
    grouped = [position[name, pre] for name, pre, _ in used]
    others = [i for i in range(len(shape)) if i not in grouped]
    each = math.prod(shape[i] for i in grouped)
    return devices.reshape(shape).transpose(others + grouped).reshape(-1, each)


def _device_ids(text: str) -> np.ndarray:
    match = _IOTA.fullmatch(text)
    if match is None:
        return np.array(_integers(text))
    dims, _, order = (_integers(part or "") for part in match.groups())
    devices = np.arange(math.prod(dims)).reshape(dims)
    return (devices.transpose(order) if order else devices).ravel()


def axis_of(name: str) -> str:
    """The axis that `"data:(2)4"` or `"~data"` belongs to."""
    return name.lstrip("~").split(":")[0]


class Axes(NamedTuple):
    """The axes of a mesh, in the order of the devices that a program runs on."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh | AbstractMesh) -> "Axes":
        return cls(tuple(map(str, mesh.axis_names)), tuple(mesh.axis_sizes))

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
        if math.prod(self.sizes[i] for i in axes) == groups.shape[1]:
            return tuple(self.names[i] for i in axes)
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
        return self._split(chosen)

    def along(self, pairs: Groups) -> tuple[str, ...]:
        """The axes along which data moves from the first device of each pair to the second."""
        places = np.stack(np.unravel_index(pairs, self.sizes), -1)
        varies = (places[:, 0] != places[:, 1]).any(0)
        return tuple(name for name, does in zip(self.names, varies, strict=True) if does)

    def _parts(self, groups: Groups, axes: Sequence[int]) -> tuple[str, ...]:
        """The names of a group that has only parts of some axes."""
        expected = set(map(frozenset, groups.tolist()))
        choices = [[(i, 1, self.sizes[i]), *_parts_of(i, self.sizes[i])] for i in axes]
        for chosen in _products(choices, groups.shape[1]):
            if set(map(frozenset, self._split(chosen).tolist())) == expected:
                return tuple(
                    self.names[i] if size == self.sizes[i] else f"{self.names[i]}:({pre}){size}"
                    for i, pre, size in chosen
                )
        return ()

    def _split(self, chosen: Sequence[tuple[int, int, int]]) -> Groups:
        shape: list[int] = []
        grouped: list[int] = []
        parts = {i: (pre, size) for i, pre, size in chosen}
        for i, whole in enumerate(self.sizes):
            pre, size = parts.get(i, (whole, 1))
            if i in parts:
                grouped.append(len(shape) + 1)
            shape += [pre, size, whole // pre // size]
        others = [i for i in range(len(shape)) if i not in grouped]
        each = math.prod(shape[i] for i in grouped)
        return np.arange(self.size).reshape(shape).transpose(others + grouped).reshape(-1, each)


def _parts_of(axis: int, size: int) -> list[tuple[int, int, int]]:
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    return [
        (axis, pre, part)
        for pre in divisors
        for part in divisors
        if 1 < part < size and size // pre % part == 0
    ]


def _products(
    choices: Sequence[Sequence[tuple[int, int, int]]], size: int
) -> list[tuple[tuple[int, int, int], ...]]:
    """One of each of the choices, such that their sizes multiply to `size`."""
    products: list[tuple[tuple[int, int, int], ...]] = [()]
    for several in choices:
        products = [(*some, one) for some in products for one in several]
        products = [some for some in products if size % math.prod(n for *_, n in some) == 0]
    return [some for some in products if math.prod(n for *_, n in some) == size]


def axes_in(text: str) -> list[Axes]:
    """The meshes in a program's text, unless XLA has invented their names."""
    meshes: dict[Axes, None] = {}
    for match in re.finditer(r"replica_groups=mesh\[([^\]]*)\](,?)", text):
        sizes = _AXIS.findall(match[1])
        if not match[2] and not all(re.fullmatch(r"axis_\d+", name) for name, _ in sizes):
            meshes[Axes(tuple(n for n, _ in sizes), tuple(int(size) for _, size in sizes))] = None
    return list(meshes)
