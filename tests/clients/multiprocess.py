"""JAX's own multi-process tests, as JAX starts them and by our pytest plugin.

They are in JAX's repository and not in what is released: a checkout is asked for.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path

from outcomes import Outcome

HERE = Path(__file__).resolve().parent
PROCESSES, DEVICES = 4, 2
_FINISHED = re.compile(r"^\[ +(OK|FAILED|SKIPPED) +\] (\w+)\.(\w+)", re.MULTILINE)


def version_of(checkout: Path) -> str:
    text = (checkout / "jax" / "version.py").read_text()
    return re.search(r'^_version = "(.+)"', text, re.MULTILINE)[1]


def tests_in(checkout: Path) -> list[Path]:
    files = sorted((checkout / "tests" / "multiprocess").glob("*_test.py"))
    if not files:
        raise SystemExit(f"{checkout} has no tests/multiprocess/*_test.py")
    return files


def by_launcher(python: Path, checkout: Path) -> dict[str, Outcome]:
    """As JAX starts them: each file as a program that starts four of itself."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "NPROC": "32",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
    }
    found: dict[str, Outcome] = {}
    for file in tests_in(checkout):
        with tempfile.TemporaryDirectory() as folder:
            command = [str(python), str(file), f"--num_processes={PROCESSES}"]
            # The program writes into this folder what its processes print.
            run(command, env | {"TEST_UNDECLARED_OUTPUTS_DIR": folder}, 300)
            for log in sorted(Path(folder).glob("jax_*_stderr.log")):
                for outcome, group, name in _FINISHED.findall(log.read_text(errors="replace")):
                    test = f"{file.stem}.{group}.{name}"
                    error = "fails" if outcome == "FAILED" else None
                    before = found.get(test)
                    if before is None or before.error is None:
                        found[test] = Outcome("", error, {}, outcome == "SKIPPED")
    return found


def by_plugin(python: Path, checkout: Path) -> dict[str, Outcome]:
    """As they are, beside a `conftest.py` of ours."""
    with tempfile.TemporaryDirectory() as folder:
        for file in tests_in(checkout):
            shutil.copy(file, folder)
        shutil.copy(HERE / "multiprocess_conftest.py", Path(folder) / "conftest.py")
        report = Path(folder) / "report.xml"
        options = ["-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider", "-q"]
        command = [str(python), "-m", "pytest", *options, f"--junitxml={report}", folder]
        run(command, {**os.environ, "JAX_PLATFORMS": "cpu"}, 1200)
        if not report.exists():
            raise SystemExit(f"pytest has left no report: {' '.join(command)}")
        found = {}
        for case in xml.parse(report).iter("testcase"):
            bad = [x for x in case if x.tag in ("failure", "error")]
            error = " ".join(bad[0].get("message", "").split())[:200] if bad else None
            skipped = case.find("skipped") is not None
            name = f"{case.get('classname')}.{case.get('name')}"
            found[name] = Outcome("", error, {}, skipped)
        return found


def run(command: list[str], env: dict[str, str], seconds: float) -> None:
    """All its processes are gone when it returns."""
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
