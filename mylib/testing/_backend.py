"""A second backend made of CPU devices.

Touches names that JAX keeps private; `tests/test_world.py` fails loudly when they move.
"""

import jaxlib.xla_client
from jax._src import xla_bridge


def second_backend(name: str = "other", *, devices: int = 4) -> None:
    """Registers a second backend, so that moves between backends can be tested without an
    accelerator.

    Call it before JAX's first look at its devices, in `conftest.py` for example. It is never the
    default backend.

    **Arguments:**

    - `name`: what to ask `jax.devices` for.
    - `devices`: how many devices it has.

    !!! Example

        ```python
        mylib.testing.second_backend("other", devices=4)
        jax.devices("other")  # four devices that `jax.devices()` doesn't list
        ```
    """
    if xla_bridge.backends_are_initialized():
        raise RuntimeError(
            "second_backend() has to be called before JAX first looks at its devices, "
            "for example at the top of conftest.py"
        )
    xla_bridge.register_backend_factory(
        name, lambda: jaxlib.xla_client.make_cpu_client(num_devices=devices), priority=-100
    )
