"""What differs between versions of JAX's kernels."""

from typing import Any

from jax.experimental.pallas import tpu as pltpu


def tensor_cores() -> Any:
    """The cores of a TPU that isn't here, for a kernel to run on."""
    if hasattr(pltpu, "TensorCoreMesh"):  # a newer JAX
        return pltpu.TensorCoreMesh(axis_name="core", num_cores=1)
    return pltpu.create_tensorcore_mesh("core", num_cores=1)
