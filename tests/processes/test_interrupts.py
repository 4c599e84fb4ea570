"""Interrupts at each line: the call fails in both processes, and the next ones work."""

from pathlib import Path

import pytest
from scripts import run_python


@pytest.mark.slow
@pytest.mark.parametrize("case", ["placement", "rows", "rule", "check_replicas", "to_global"])
def test_interrupts_at_each_line(case, checkout_env):
    script = Path(__file__).with_name("interrupts.py")
    done = run_python("-m", "mylib.testing", "launch", "-n2", script, case, env=checkout_env)
    told = done.stdout + done.stderr
    assert f"{case}: " in done.stdout and "wrong: []" in done.stdout, told
