"""This machine's own name, which the collectives of the CPU look up."""

import socket

from .._compat import names


def why_no_devices(error: RuntimeError) -> RuntimeError:
    """What JAX raised when it was to make its devices, or the cause and the way out if that is the
    machine's name.
    """
    name = socket.gethostname()
    if names.TEXT_GLOO not in str(error):
        return error
    try:
        socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as cause:
        return RuntimeError(
            f"this machine can't resolve its own name, {name!r} ({cause}). JAX's collectives on "
            "the CPU (gloo) listen at the address of that name. Add it to /etc/hosts: "
            f'echo "127.0.0.1 {name}" >> /etc/hosts. If processes on other machines take part, '
            "write this machine's address in their network in place of 127.0.0.1"
        )
    return error
