"""A process that takes the place of one that has died. JAX has no way back for the others, with or
without its option for that; everybody has to start again, as under SLURM.
"""

import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

SCRIPT = """
import os, sys
import jax, numpy as np
from jax.sharding import PartitionSpec as P

port, me, recoverable = sys.argv[1:]
jax.config.update("jax_enable_recoverability", recoverable == "recoverable")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(me), cluster_detection_method="deactivate")
import mylib

mesh = mylib.make_mesh(data=-1)
x = np.ones(8, np.float32)
try:
    mylib.filter_shard(x, P("data"), mesh=mesh)
    print("met\\n", end="", flush=True)
    # One dies here, the other goes on when it is told.
    sys.stdin.readline()
    os.environ["MYLIB_EXCHANGE_TIMEOUT"] = "3"
    mylib.filter_shard(x, P("data"), mesh=mesh)
except (RuntimeError, TimeoutError) as error:
    print(f"{type(error).__name__}: {error}\\n", end="", flush=True)
"""


class Started:
    """A process that runs the script."""

    def __init__(self, folder: Path, env: dict[str, str], *arguments: str):
        self.errors = folder / f"{len(list(folder.iterdir()))}.txt"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, *arguments],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def says(self) -> str:
        """What it says next; backends have things to say as well."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith(("met", "RuntimeError", "AbsentError")):
                return line
        raise AssertionError(self.errors.read_text()[-2000:])

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def start(tmp_path: Path, checkout_env):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    env = {**checkout_env, "JAX_NUM_CPU_DEVICES": "2"}
    started: list[Started] = []

    def start(me: int, how: str) -> Started:
        started.append(Started(tmp_path, env, str(port), str(me), how))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def one_is_replaced(start: Callable[[int, str], Started], how: str) -> tuple[Started, Started]:
    """The process that has remained, and the one that is new."""
    remains, dies = start(0, how), start(1, how)
    assert remains.says() == dies.says() == "met\n"
    dies.process.kill()
    dies.process.wait()
    return remains, start(1, how)


def test_the_others_end_at_once(start):
    remains, _ = one_is_replaced(start, "usual")
    assert remains.process.wait(timeout=120) == -signal.SIGABRT
    assert "different incarnation" in remains.errors.read_text()


def test_recoverability_does_not_bring_it_back(start):
    """The others live, and JAX lets the new one in, but they are no longer at the same point."""
    remains, new = one_is_replaced(start, "recoverable")
    told = new.says()
    assert told.startswith("RuntimeError: this process can't compare (placement): it has taken")
    assert "start them again" in told
    remains.go_on()
    assert remains.says().startswith("AbsentError: process 1 has ended, and did not come to comp")
