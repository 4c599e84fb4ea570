"""Connects processes so that those that are left can go on."""

import os
from typing import Any

import jax

from ..._core.compat import devices_have_started, is_recoverable
from ..._moving.processes import lost

# The exit status of a process after which all should be started again: EX_TEMPFAIL.
RESTART = 75

_COLLECTIVE = "--xla_cpu_collective_timeout_seconds"
_CALL = "--xla_cpu_collective_call_terminate_timeout_seconds"
# JAX's page on fault tolerance names these. They are harmless without GPUs.
_ON_GPUS = {
    "--xla_gpu_nccl_terminate_on_error": "false",
    "--xla_gpu_nccl_async_execution": "true",
    "--xla_gpu_nccl_blocking_communicators": "false",
}
_VARIABLES_ON_GPUS = (
    "XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE",
    "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT",
)


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout_seconds: int = 30,
    **others: Any,
) -> None:
    """`jax.distributed.initialize`, for processes of which some may be lost: those that are left
    are not ended, and their collectives end with an error.

    It sets `jax_enable_recoverability`, and what XLA needs: on CPUs a time-out of collectives, on
    GPUs that they are cancelled. What `XLA_FLAGS` says already stays, if it is possible.

    **Arguments:**

    - `coordinator_address`, `num_processes`, `process_id`, `others`: as for
        `jax.distributed.initialize`.
    - `heartbeat_timeout_seconds`: a process that has not been heard of for this long is lost.

    **Raises:**

    `RuntimeError` if JAX has started its devices, so that it is too late; `ValueError` if
    `XLA_FLAGS` has a value with which the others could not go on.

    !!! Example

        ```python
        def main():
            mylib.elastic.initialize()  # at the start of each process
            return mylib.elastic.Team(data=4, at_least=2)
        ```
    """
    if devices_have_started():
        raise RuntimeError(
            "call mylib.elastic.initialize() at the start of the program: JAX has started its "
            "devices, and has read its settings"
        )
    _set_flags(heartbeat_timeout_seconds)
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        coordinator_address,
        num_processes,
        process_id,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        **others,
    )
    lost()  # The watch begins.


def _set_flags(heartbeat: int) -> None:
    written = os.environ.get("XLA_FLAGS", "")
    parts = [flag.partition("=") for flag in written.split()]
    given = {flag: value for flag, _, value in parts}
    needed = {_COLLECTIVE: str(heartbeat), _CALL: str(heartbeat), **_ON_GPUS}
    for flag, value in needed.items():
        other = given.get(flag, value)
        if flag in _ON_GPUS and other.lower() != value:
            why = "a collective on GPUs waits for a lost process for ever"
        elif flag not in _ON_GPUS and int(other) < heartbeat:
            why = "a collective may fail before it is known that a process is lost"
        else:
            continue
        raise ValueError(f"write {flag}={value} in XLA_FLAGS, or leave it out: with {other} {why}")
    flags = [f"{flag}={value}" for flag, value in needed.items() if flag not in given]
    os.environ["XLA_FLAGS"] = " ".join([written, *flags]).strip()
    for name in _VARIABLES_ON_GPUS:
        os.environ.setdefault(name, "1")


def check_joined() -> None:
    """Raises if processes that are left could not go on."""
    if jax.process_count() > 1 and not is_recoverable():
        raise RuntimeError(
            "call mylib.elastic.initialize() instead of jax.distributed.initialize(): without "
            "jax_enable_recoverability JAX ends all processes when one is lost"
        )
