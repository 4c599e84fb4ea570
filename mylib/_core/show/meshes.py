"""The meshes of several rows, with numbers if there are several."""

from collections.abc import Iterable

from jax.sharding import NamedSharding, Sharding

from ..placement import AnyMesh, axis_types, devices_of, show_mesh
from .rows import Row
from .text import show_devices


class Meshes:
    def __init__(self, rows: Iterable[Row | None]):
        places = (row.place for row in rows if row is not None)
        meshes = [place.mesh for place in places if isinstance(place, NamedSharding)]
        self._numbers = {mesh: i + 1 for i, mesh in enumerate(dict.fromkeys(meshes))}

    def suffix(self, place: Sharding | None) -> str:
        """The name of a sharding's mesh, if there are several meshes."""
        if len(self._numbers) < 2 or not isinstance(place, NamedSharding):
            return ""
        return f" on mesh {self._numbers[place.mesh]}"

    def lines(self) -> list[str]:
        many = len(self._numbers) > 1
        return [
            show_mesh(mesh).replace("mesh", f"mesh {number}" if many else "mesh", 1)
            + f"{_types(mesh)}: {show_devices(devices_of(mesh))}"
            for mesh, number in self._numbers.items()
        ]


def _types(mesh: AnyMesh) -> str:
    types = axis_types(mesh)
    if len(set(types.values())) == 1:
        return f", {next(iter(types.values())).name} axes"
    return "".join(f", {name!r} {kind.name}" for name, kind in types.items())
