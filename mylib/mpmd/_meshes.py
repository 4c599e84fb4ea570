"""Meshes that share no devices, cut out of one mesh."""

import numpy as np
from jax.sharding import Mesh

from .._links import get_ready


def split(mesh: Mesh, axis_name: str, /) -> list[Mesh]:
    """Cuts a mesh along one of its axes into meshes that share no devices.

    **Arguments:**

    - `mesh`: the mesh.
    - `axis_name`: the axis, whose size is the number of meshes.

    **Returns:**

    A list of meshes with the other axes, and at least one axis: a mesh with a single axis is cut
    into meshes of one device, with that axis of size 1.

    **Raises:**

    `ValueError` if the mesh has no such axis.

    !!! Example

        ```python
        first, second = mylib.mpmd.split(mylib.make_mesh(stage=2, data=4), "stage")
        ```
    """
    if axis_name not in mesh.axis_names:
        known = ", ".join(map(repr, mesh.axis_names))
        raise ValueError(f"the mesh has no axis {axis_name!r} to split along: its axes are {known}")
    get_ready(mesh.devices.flat)
    position = mesh.axis_names.index(axis_name)
    alone = len(mesh.axis_names) == 1
    kept = [i for i in range(len(mesh.axis_names)) if alone or i != position]
    names = tuple(mesh.axis_names[i] for i in kept)
    types = tuple(mesh.axis_types[i] for i in kept)
    return [
        Mesh(np.take(mesh.devices, [i] if alone else i, position), names, axis_types=types)
        for i in range(mesh.devices.shape[position])
    ]
