"""What XLA compiles."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from mylib._core.compat import names


@contextmanager
def compilations() -> Iterator[list[str]]:
    """What is compiled meanwhile, by this process: an item for each program."""
    found: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: object) -> None:
        if event == names.EVENT_COMPILED:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
