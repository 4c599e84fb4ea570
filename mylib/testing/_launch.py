"""`python -m mylib.testing launch`: runs a script in several processes on this machine."""

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._group import Group, Guard
from ._pool import named_status
from ._topology import HOST, PLATFORMS, Topology, TopologyRequest, Unavailable, cpu_settings

# Runs a script, or a module after -m, as Python does, but exits at once after an exception: JAX
# would wait five minutes for the other processes, and they for this one. If the
# processes never met, the first one says so at the end.
_RUN = """
import os, runpy, sys, traceback
arguments = sys.argv[1:]
try:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
    jax, processes = sys.modules.get("jax"), os.environ.get("SLURM_NTASKS", "1")
    first = processes != "1" and os.environ.get("SLURM_PROCID") == "0"
    # Last, because counting processes starts JAX's backends if the script has not.
    if jax and first and not jax.distributed.is_initialized() and jax.process_count() == 1:
        print(
            f"Each of the {processes} processes ran the program alone: call "
            "jax.distributed.initialize() before anything else in JAX",
            file=sys.stderr,
        )
    status = 0
except SystemExit as end:
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
    status = end.code if isinstance(end.code, int) else int(end.code is not None)
except BaseException:
    traceback.print_exc()
    status = 1
if status:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""
# Seconds that the others may continue after one has failed.
_GRACE = 3.0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mylib.testing launch",
        description="Runs a script in several processes on this machine. In each of them "
        "jax.distributed.initialize() finds the others.",
    )
    parser.add_argument("-n", "--processes", type=int, required=True, metavar="N")
    parser.add_argument("--devices-per-process", type=int, metavar="K", help="on cpu 1 by default")
    parser.add_argument("--platform", choices=PLATFORMS, default="cpu")
    parser.add_argument(
        "--print",
        dest="engine",
        choices=["slurm", "mpi"],
        help="run nothing: print the command that starts the same processes under this engine",
    )
    rest = argparse.REMAINDER
    parser.add_argument("-m", dest="module", nargs=rest, help="a module to run, and its arguments")
    parser.add_argument("script", nargs=rest, help="or a script, and its arguments")
    options = parser.parse_args(arguments)
    script = options.script[1:] if options.script[:1] == ["--"] else options.script
    command = ["-m", *options.module] if options.module else script
    if not command:
        parser.error("name a script, or a module after -m")
    devices = options.devices_per_process
    if devices is None and options.platform == "cpu":
        devices = 1
    if options.engine:
        print(_under(options.engine, command, options.processes, devices, options.platform))
        return 0
    try:
        topology = TopologyRequest(options.processes, devices).topology(options.platform)
    except (ValueError, Unavailable) as error:
        parser.error(str(error))
    return _launch(command, topology)


def _under(
    engine: str, command: Sequence[str], processes: int, devices: int | None, platform: str
) -> str:
    settings = {"JAX_PLATFORMS": platform}
    if platform == "cpu":
        settings |= cpu_settings(devices or 1)
    script = shlex.join(["env", *(f"{k}={v}" for k, v in settings.items()), "python", *command])
    if engine == "mpi":
        return f"mpirun -n {processes} {script}"
    gpus = ""
    if platform == "cuda":
        # Under SLURM, JAX gives each task the one GPU of its number on the node. So there is a task
        # for each GPU, and it must see those of the others: not so with --gpus-per-task.
        processes *= devices or 1
        gpus = f" --gpus={processes}"
    # Without the last option the others wait for a task that has failed.
    return f"srun --ntasks={processes}{gpus} --kill-on-bad-exit=1 {script}"


def _launch(command: Sequence[str], topology: Topology) -> int:
    guard = Guard()
    group = Group(topology, guard)
    # Like Ctrl-C, so that everything below is cleaned up.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for index in range(topology.processes):
            group.start([sys.executable, "-c", _RUN, *command], _joining(group, index))
        return _Follower(group).follow()
    finally:
        signal.signal(signal.SIGTERM, before)
        group.end()
        guard.close()


def _joining(group: Group, index: int) -> dict[str, str]:
    """The environment for `jax.distributed.initialize()`: a step of a SLURM job on one machine."""
    return {
        "JAX_COORDINATOR_ADDRESS": group.coordinator,
        "JAX_COORDINATOR_BIND_ADDRESS": group.coordinator,
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": HOST,
        "SLURM_NTASKS": str(group.topology.processes),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
    }


class _Follower:
    """Shows the output of processes until all have ended or must be stopped."""

    def __init__(self, group: Group) -> None:
        self._processes = group.processes
        self._screens = [
            _Screen(index, path, where)
            for index, process in enumerate(group.processes)
            for path, where in ((process.output, sys.stdout), (process.errors, sys.stderr))
        ]
        self._status = 0
        self._deadline = float("inf")

    def follow(self) -> int:
        """The status of the first process that fails."""
        while True:
            try:
                if self._is_over():
                    return self._status
                time.sleep(0.05)
            except KeyboardInterrupt:
                # They lead their own sessions, so the terminal's Ctrl-C doesn't reach them.
                for process in self._processes:
                    process.popen.send_signal(signal.SIGINT)
                self._fail(128 + signal.SIGINT)

    def _is_over(self) -> bool:
        statuses = [process.status() for process in self._processes]
        ended = None not in statuses
        for screen in self._screens:
            screen.show(all_of_it=ended)
        for index, status in enumerate(statuses):
            if status and not self._status:
                self._fail(status if status > 0 else 128 - status)
                print(f"process {index} ended with {named_status(status)}", file=sys.stderr)
        late = not ended and time.monotonic() > self._deadline
        if late:
            running = [str(i) for i, status in enumerate(statuses) if status is None]
            print(f"stopping process {', '.join(running)}", file=sys.stderr)
        return ended or late

    def _fail(self, status: int) -> None:
        self._status = self._status or status
        self._deadline = min(self._deadline, time.monotonic() + _GRACE)


class _Screen:
    """Shows a process's output file, each line with the process's index in front."""

    def __init__(self, index: int, path: Path, where: Any) -> None:
        self._prefix, self._path, self._where = f"[{index}] ", path, where
        self._shown = 0

    def show(self, all_of_it: bool) -> None:
        with self._path.open("rb") as file:
            file.seek(self._shown)
            new = file.read()
        *lines, rest = new.split(b"\n")
        self._shown += len(new) - len(rest)
        for line in [*lines, rest] if all_of_it and rest else lines:
            self._where.write(f"{self._prefix}{line.decode(errors='replace')}\n")
        self._where.flush()
