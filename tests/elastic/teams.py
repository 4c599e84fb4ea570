"""Runs teams of real processes, in which something happens."""

import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("training.py")
# For a loaded machine: JAX's heartbeats may be late there.
HEARTBEAT = 8
_LIMIT = 200.0

WHEN = (
    "before reading",
    "after reading",
    "in the step",
    "before the commit",
    "in the commit",
    "after the commit",
    "after the step",
)
HOW = ("kill", "exit", "stop")
# Processes of two devices each, and the axes of a replica.
LAYOUTS = (
    (3, {"data": 2}),
    (4, {"data": 2}),
    (3, {"data": 1, "model": 2}),
    (4, {"data": 1, "model": 2}),
)
Told = list[list[dict[str, Any]]]


def strike(process: int, when: str, step: int, how: str, **more: Any) -> dict[str, Any]:
    return {"process": process, "when": when, "step": step, "how": how, **more}


def at_random(seed: int) -> tuple[int, dict[str, Any]]:
    """A number of processes, and what happens to some of them, but not to the first one."""
    choose = random.Random(seed)
    processes, axes = choose.choice(LAYOUTS)
    others = choose.sample(range(1, processes), choose.randint(1, processes - 1))
    # Two at once, or one after the other.
    at_once = choose.random() < 0.3
    every = choose.choice((1, 1, 3))
    strikes = []
    for i, step in zip(others, choose.sample(range(1, 9), len(others)), strict=True):
        when, n = choose.choice(WHEN), 4 if at_once else step
        if "commit" in when:  # steps without one are between
            n += -(n + 1) % every
        strikes.append(strike(i, when, n, choose.choice(HOW)))
    donate = every > 1 and choose.random() < 0.5
    return processes, {"axes": axes, "strikes": strikes, "every": every, "donate": donate}


def seconds_until_on_again(told: Told, strikes: list[dict[str, Any]]) -> float:
    """From a strike until all that are left read without that process: the longest."""
    hit = {s["process"] for s in strikes}
    return max(
        next(e["at"] for e in events if i in e.get("without", ()))
        - next(e["at"] for e in told[i] if "strike" in e)
        for i in hit
        for index, events in enumerate(told)
        if index not in hit
    )


def slowed(seconds: float = 0.02) -> float:
    """How long some work takes now, as a multiple of its CPU time. It is 1 on a machine that has
    nothing else to do.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    while (used := time.process_time() - cpu) < seconds:
        pass
    return (time.perf_counter() - wall) / used


def run(
    processes: int, plan: Mapping[str, Any], env: Mapping[str, str]
) -> tuple[list[int | None], Told, str, float]:
    """Their statuses, None for one that had to be killed; what each told; all their words; and how
    much slower than alone the machine was meanwhile.
    """
    with socket.socket() as found, tempfile.TemporaryDirectory() as folder:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
        found.close()
        plan = {"heartbeat": HEARTBEAT, **plan, "folder": folder}
        files = [Path(folder, f"{i}.txt") for i in range(processes)]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for i, file in enumerate(files):
                command = [sys.executable, SCRIPT, port, processes, i, json.dumps(plan)]
                with file.open("wb") as output:
                    started.append(
                        subprocess.Popen(
                            [*map(str, command)],
                            env={**env, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            slower = _wait(
                started, {s["process"] for s in plan.get("strikes", ()) if s["how"] == "stop"}
            )
            statuses = [process.poll() for process in started]
            texts = [file.read_text(errors="replace") for file in files]
        finally:
            for process in started:
                process.kill()
                process.wait()
    told = [
        [json.loads(line) for line in text.splitlines() if line.startswith('{"')] for text in texts
    ]
    words = "\n".join(f"--- process {i}\n{text[-3000:]}" for i, text in enumerate(texts))
    return statuses, told, words, slower


def _wait(started: list[subprocess.Popen[bytes]], stopped: set[int]) -> float:
    """Until all have ended. One that stops goes on when it has long been taken for lost. Returns
    how much slower than alone this machine was.
    """
    measured: list[float] = []
    deadline, since = time.monotonic() + _LIMIT, dict.fromkeys(stopped, 0.0)
    while time.monotonic() < deadline and any(p.poll() is None for p in started):
        for i in stopped:
            if started[i].poll() is None and _is_stopped(started[i].pid):
                since[i] = since[i] or time.monotonic()
                if time.monotonic() - since[i] > 2 * HEARTBEAT + 6:
                    started[i].send_signal(signal.SIGCONT)
                    since[i] = 0.0
        measured.append(slowed())
        time.sleep(0.3)
    return statistics.fmean(measured)


def _is_stopped(pid: int) -> bool:
    # The state follows the name of the program, which is in brackets.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] == "T"
