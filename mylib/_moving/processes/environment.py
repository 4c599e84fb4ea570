"""The environment variables that mylib reads: all at once, so that a wrong one is found early."""

import os
from typing import NamedTuple

TIMEOUT, TRANSPORT = "MYLIB_EXCHANGE_TIMEOUT", "MYLIB_TRANSPORT"

# JAX's own timeout for processes to start and end. Hosts that read a checkpoint, or compile for the
# first time, may be minutes apart.
_DEFAULT_TIMEOUT = "300"
# JAX's service counts milliseconds.
_LONGEST = 1e9
_TRANSPORTS = ("links", "program")


class Environment(NamedTuple):
    """For how many seconds processes wait for each other, and how arrays travel between them."""

    patience: float
    transport: str


def environment() -> Environment:
    # Not once for all: a program may set them itself.
    timeout = os.environ.get(TIMEOUT) or _DEFAULT_TIMEOUT
    transport = os.environ.get(TRANSPORT) or _TRANSPORTS[0]
    try:
        seconds = float(timeout)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST:
        raise ValueError(
            f"{TIMEOUT} is {timeout!r}, and can be a number of seconds, such as {_DEFAULT_TIMEOUT}"
        )
    if transport not in _TRANSPORTS:
        raise ValueError(f"{TRANSPORT} is {transport!r}, and can be 'links' or 'program'")
    return Environment(seconds, transport)


def patience() -> float:
    """For how many seconds processes wait for each other."""
    return environment().patience
