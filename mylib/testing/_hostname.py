"""Explains failures to resolve this machine's name, which the CPU's collectives need."""

import socket

from .._compat import names


def why_no_devices(error: RuntimeError) -> RuntimeError:
    """The error for JAX's failure to make its devices: with cause and remedy if the machine's name
    can't be resolved, else JAX's own.
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
            "use this machine's address in their network instead of 127.0.0.1"
        )
    return error
