"""The processes that a test needs, and their environment variables.

Imports neither JAX nor pytest: the parent must not take its processes' devices.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._core.text import counted

# Of those on TPUs, processes are started by the cluster only.
PLATFORMS = ("cpu", "cuda", "tpu")
HOST = "127.0.0.1"
_OF_THIS_SESSION = ("PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER")


@dataclass(frozen=True)
class Topology:
    """A number of processes with a number of devices each. Tests with equal topologies share
    processes.
    """

    processes: int
    devices: int
    platform: str = "cpu"
    env: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{counted(self.processes, 'process')} of {self.devices} on {self.platform}"


class Unavailable(Exception):
    """A test can't run on this machine."""


@dataclass(frozen=True)
class TopologyRequest:
    """The arguments of `@pytest.mark.multihost`. None means the platform's default."""

    processes: int | None = None
    devices_per_process: int | None = None
    platform: str | None = None
    timeout: float | None = None
    fresh: bool = False
    env: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name in "processes", "devices_per_process":
            value = getattr(self, name)
            if value is not None and not (_is(int, value) and value > 0):
                raise ValueError(f"{name}={value!r}: write a positive number, or leave it out")
        if self.platform not in (None, *PLATFORMS):
            raise ValueError(f"platform={self.platform!r}: write one of {', '.join(PLATFORMS)}")
        if self.timeout is not None and not (_is(int | float, self.timeout) and self.timeout > 0):
            raise ValueError(f"timeout={self.timeout!r}: write a number of seconds")
        if not isinstance(self.fresh, bool):
            raise ValueError(f"fresh={self.fresh!r}: write True or False")
        pairs = dict(self.env or {}).items()
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in pairs):
            raise ValueError(f"env={self.env!r}: write a dict of strings")

    def topology(self, platform: str) -> Topology:
        """The processes for this request on this machine; `platform` is the default platform."""
        platform = self.platform or platform
        env = tuple(sorted((self.env or {}).items()))
        processes, devices = self.processes, self.devices_per_process
        if platform == "cpu":
            return Topology(processes or 2, devices or 4, platform, env)
        if platform == "tpu":
            raise Unavailable("on TPUs a cluster starts the processes: pytest --multihost=member")
        available = len(gpus())
        processes = processes or max(1, available // (devices or 1))
        devices = devices or max(1, available // processes)
        if processes * devices > available:
            raise Unavailable(
                f"needs {counted(processes, 'process')} with {counted(devices, 'device')} each; "
                f"for {platform} this machine has {available}"
            )
        return Topology(processes, devices, platform, env)


def gpus() -> list[str]:
    """The numbers of this machine's GPUs. Doesn't use JAX, which would take them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [x.strip() for x in visible.split(",") if x.strip() not in ("", "-1")]
    names = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*"))
    return sorted(filter(str.isdigit, names), key=int)


def environment(index: int, topology: Topology) -> dict[str, str]:
    """The environment of process `index` of several on this machine."""
    # Leave out variables of this pytest session.
    env = {k: v for k, v in os.environ.items() if k not in _OF_THIS_SESSION}
    env["PYTHONUNBUFFERED"] = "1"
    # Different on purpose: a program that depends on the order of a set differs between processes,
    # and should fail here rather than on a cluster.
    env["PYTHONHASHSEED"] = str(index + 1)
    if any(name.lower().endswith("_proxy") for name in env):
        # The processes' own connections must not use a proxy.
        for name in "no_proxy", "NO_PROXY":
            env[name] = ",".join(filter(None, [env.get(name), HOST, "localhost"]))
    env["JAX_PLATFORMS"] = topology.platform
    on_cpu = topology.platform == "cpu"
    env |= cpu_settings(topology.devices) if on_cpu else _gpu_settings(index, topology)
    return env | dict(topology.env)


def cpu_settings(devices: int) -> dict[str, str]:
    """The environment of a process with this many simulated devices."""
    return {
        # Takes precedence over XLA_FLAGS.
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        # The number of threads for the simulated devices. With fewer threads than devices JAX 0.10
        # aborts when programs with collectives follow each other closely (seen with 0.10.2; no
        # public issue is known).
        "NPROC": str(max(32, 4 * devices)),
    }


def _gpu_settings(index: int, topology: Topology) -> dict[str, str]:
    first = index * topology.devices
    mine = gpus()[first : first + topology.devices]
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(mine),
        "JAX_LOCAL_DEVICE_IDS": ",".join(str(n) for n in range(len(mine))),
        # Otherwise the first processes would leave no memory for another topology's.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


def _is(kind: Any, x: object) -> bool:
    return isinstance(x, kind) and not isinstance(x, bool)
