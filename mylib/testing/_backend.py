"""A second backend made of CPU devices."""

from .._compat import add_cpu_backend


def second_backend(name: str = "other", *, devices: int = 4) -> None:
    """Registers a second backend, so that moves between backends can be tested without an
    accelerator. It is never the default backend.

    The fixture of this name does so where there is no accelerator, and gives the devices of a
    backend that isn't the default one.

    **Arguments:**

    - `name`: what to ask `jax.devices` for.
    - `devices`: how many devices it has.

    !!! Example

        ```python
        mylib.testing.second_backend("other", devices=4)
        jax.devices("other")  # four devices that `jax.devices()` doesn't list
        ```
    """
    add_cpu_backend(name, devices)
