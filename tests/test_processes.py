"""Placement in two real processes, joined by `jax.distributed`."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

BODY = Path(__file__).with_name("process_body.py")
TESTS = [
    line.split("(")[0].removeprefix("def ")
    for line in BODY.read_text().splitlines()
    if line.startswith("def test_")
]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, checkout_env) -> tuple[list[str], Path]:
    folder = tmp_path_factory.mktemp("processes")
    env = {k: v for k, v in checkout_env.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    port = str(_free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, str(BODY), str(index), port, str(folder)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for index in range(2)
    ]
    try:
        return [process.communicate(timeout=90)[0] for process in processes], folder
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.parametrize("name", TESTS)
def test_in_both_processes(outputs, name):
    texts, _ = outputs
    for index, text in enumerate(texts):
        assert f"passed {name}" in text, f"process {index}:\n{text}"


def test_both_processes_are_told_the_same(outputs):
    _, folder = outputs
    for said in "words", "differs":
        assert (folder / f"{said}0").read_text() == (folder / f"{said}1").read_text()
