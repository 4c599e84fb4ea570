"""A second backend made of CPU devices.

Touches names that JAX keeps private; `tests/test_world.py` fails loudly when they move.
"""

import jaxlib.xla_client
from jax._src import xla_bridge


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
    xla_bridge.register_backend_factory(
        name, lambda: jaxlib.xla_client.make_cpu_client(num_devices=devices), priority=-100
    )
    if xla_bridge.backends_are_initialized():
        # JAX has looked for its backends already, and does so once.
        xla_bridge._backends[name] = xla_bridge._init_backend(name)  # pyright: ignore[reportPrivateUsage]
