"""Functions for the body of a test that runs in several processes."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from .._moving.processes import everybody, exchange, gather_messages

# Show at most this many lines of a difference: about a screen.
_DIFFERENCE = 40


@dataclass(frozen=True)
class Info:
    """Describes this process and its group.

    **Attributes:**

    - `process_index`, `process_count`: as in JAX.
    - `local_device_count`, `device_count`: the number of devices of this process, and of all.
    - `platform`: of the devices.

    !!! Example

        ```python
        info = mylib.testing.info()
        print(info.process_index, "of", info.process_count, info.platform)
        ```
    """

    process_index: int
    process_count: int
    local_device_count: int
    device_count: int
    platform: str


def info() -> Info:
    """Describes this process and its group.

    **Returns:**

    A `mylib.testing.Info`.

    !!! Example

        ```python
        if mylib.testing.info().process_index == 0:
            print("only once")
        ```
    """
    return Info(
        jax.process_index(),
        jax.process_count(),
        jax.local_device_count(),
        jax.device_count(),
        jax.default_backend(),
    )


def barrier(timeout: float = 60.0) -> None:
    """Waits until all processes have called it. It uses no devices, so it also works while devices
    are busy, or waiting for each other.

    **Arguments:**

    - `timeout`: seconds before a `TimeoutError` that names the missing processes.

    !!! Example

        ```python
        mylib.testing.barrier()
        ```
    """
    gather(None, timeout)


def gather(value: Any, timeout: float = 60.0) -> list[Any]:
    """Returns the values of all processes, in their order, to each of them.

    **Arguments:**

    - `value`: anything small that JSON can represent.
    - `timeout`: seconds before a `TimeoutError` that names the missing processes.

    **Returns:**

    A list with one value for each process.

    !!! Example

        ```python
        assert mylib.testing.gather(jax.process_index()) == list(
            range(jax.process_count())
        )
        ```
    """
    return gather_messages("testing", value, everybody(), timeout=timeout)


def same_program(
    fun: Callable[..., Any], /, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> None:
    """Asserts that all processes lower a call to the same program; if not, it fails in all.

    JAX doesn't detect that processes run different programs: they wait for each other forever, or
    mix up numbers.

    **Arguments:**

    - `fun`: a function, or the result of `jax.jit` or `mylib.filter_jit`.
    - `args`, `kwargs`: its arguments.
    - `timeout`: as in `mylib.testing.gather`.

    **Raises:**

    `AssertionError` with the first lines that differ, in all processes.

    !!! Example

        ```python
        mylib.testing.same_program(lambda x: x + 1, jnp.ones(8))
        ```
    """
    __tracebackhide__ = True
    jitted: Any = fun if hasattr(fun, "lower") else jax.jit(fun)
    mine = jitted.lower(*args, **kwargs).as_text()
    first = exchange("same_program", mine, everybody(), lambda texts: texts[0], timeout=timeout)
    differing = [i for i, same in enumerate(gather(mine == first, timeout)) if not same]
    if differing:
        lines = difflib.unified_diff(
            first.splitlines(), mine.splitlines(), "process 0", "this process", lineterm="", n=1
        )
        difference = "\n".join([*lines][:_DIFFERENCE])
        raise AssertionError(
            f"process 0 has a different program than process {', '.join(map(str, differing))}\n"
            f"{difference}".rstrip()
        )
