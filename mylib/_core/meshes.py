"""Meshes of named axes, whose sizes needn't all be given."""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, Never

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh


def make_mesh(
    *unnamed: Never,
    devices: Sequence[Any] | np.ndarray | None = None,
    explicit: Iterable[str] | str = (),
    **axes: int,
) -> Mesh:
    """A mesh of named axes. They are Auto, with which all of Equinox's layers run; with
    `jax.make_mesh` they are Explicit by default.

    **Arguments:**

    - `unnamed`: raises; each axis has a name.
    - `devices`: the devices, in a sequence or an array; `jax.devices()` by default.
    - `explicit`: the names of axes that are Explicit.
    - `axes`: the size of each axis by its name, in order. One may be -1, and is then computed.

    **Returns:**

    A `jax.sharding.Mesh`. Its devices are in the order that JAX chooses for their topology. On
    TPUs, consecutive devices on an axis are physical neighbours only if the axis follows one
    direction of the slice: axes of 8 and 8 do on a slice of 8 x 8, axes of 4 and 16 don't.

    **Raises:**

    `ValueError` if the sizes don't multiply to the number of devices; `TypeError` for arguments
    without a name, and for sizes, names and devices that are none.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=-1, model=2)
        assert dict(mesh.shape) == {"data": 4, "model": 2}
        ```
    """
    if unnamed:
        raise TypeError(
            "make_mesh takes the size of each axis by its name: write make_mesh(data=4, model=2), "
            'not make_mesh((4, 2), ("data", "model"))'
        )
    named = (explicit,) if isinstance(explicit, str) else explicit
    if isinstance(named, bool) or not isinstance(named, Iterable):
        some = ", ".join(map(repr, axes))
        raise TypeError(f"explicit={named!r}: write the names of the Explicit axes, of ({some})")
    named = tuple(named)
    unknown = [name for name in named if name not in axes]
    if unknown:
        raise ValueError(f"explicit={unknown}: the axes of this mesh are {list(axes)}")
    devices = jax.devices() if devices is None else _flat(devices)
    sizes = _sizes(axes, len(devices))
    types = tuple(AxisType.Explicit if name in named else AxisType.Auto for name in axes)
    return Mesh(ordered(devices, sizes), tuple(axes), axis_types=types)


def _flat(devices: object) -> list[Any]:
    if isinstance(devices, Iterable) and not isinstance(devices, str):
        flat = list(devices.flat) if isinstance(devices, np.ndarray) else list(devices)
        # Devices that are only described, as of `mylib.machines`, are no `jax.Device`s.
        if all(hasattr(device, "device_kind") for device in flat):
            return flat
    some = f"jax.devices()[:{devices}]" if isinstance(devices, int) else "jax.devices()[:4]"
    raise TypeError(f"devices={devices!r}: write a sequence of devices, such as {some}")


def _sizes(axes: Mapping[str, int], count: int) -> tuple[int, ...]:
    if not axes:
        raise ValueError("a mesh needs an axis, such as data=-1")
    text = ", ".join(f"{name}={size!r}" for name, size in axes.items())
    odd = [name for name, size in axes.items() if not isinstance(size, Integral | np.integer)]
    if odd:
        known = "data=4, model=2, with devices= and explicit= besides"
        raise TypeError(f"make_mesh({text}): the size of {odd[0]!r} is no integer. Write {known}")
    free = [name for name, size in axes.items() if size == -1]
    wrong = [name for name, size in axes.items() if size < 1 and size != -1]
    if wrong or len(free) > 1:
        raise ValueError(f"a mesh of {text}: sizes are positive, and one of them may be -1")
    product = math.prod(size for size in axes.values() if size != -1)
    if count % product if free else count != product:
        raise ValueError(
            f"a mesh of {text} needs {'a multiple of ' if free else ''}{product} devices, and "
            f"there {'is' if count == 1 else 'are'} {count}. Change a size, or let one be -1"
            f"{_with_other_devices(product, count)}"
        )
    return tuple(count // product if size == -1 else size for size in axes.values())


def _with_other_devices(count: int, there: int) -> str:
    """Another fix: leave devices out, or simulate some to try an example on a machine that has
    one.
    """
    if count < there:
        return f", or leave devices out: devices=jax.devices()[:{count}]"
    if jax.default_backend() != "cpu":
        return ""
    return (
        f". To simulate {count} devices on a CPU, set "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before Python starts"
    )


def ordered(devices: Sequence[object], sizes: tuple[int, ...]) -> np.ndarray:
    try:
        return mesh_utils.create_device_mesh(sizes, list(devices))
    except (NotImplementedError, AssertionError):
        # JAX has no order for this shape on a TPU's topology, whose axes it doesn't split, and
        # asserts that there is one device per chip and that devices fill a box without holes.
        # So take the compiler's own order.
        flat = np.empty(len(devices), object)
        flat[:] = devices
        return flat.reshape(sizes)
