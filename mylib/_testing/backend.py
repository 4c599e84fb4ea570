"""A second backend made of CPU devices."""

from .._core.compat import add_cpu_backend


def second_backend(name: str = "other", *, devices: int = 4) -> None:
    """Registers a second backend, to test moves between backends without an accelerator. It is
    never the default backend.

    The fixture of this name calls it if there is no accelerator, and returns the devices of a
    backend that is not the default.

    **Arguments:**

    - `name`: the backend's name in `jax.devices`.
    - `devices`: the number of its devices.

    !!! Example

        ```python
        mylib.testing.second_backend("other", devices=4)
        jax.devices("other")  # four devices that `jax.devices()` doesn't list
        ```
    """
    add_cpu_backend(name, devices)
