"""The checks of tests/clients/ can fail, and benchmarks/results/clients.md lists them.

The checks themselves need other people's packages, and are run by hand: see CONTRIBUTING.md.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

CLIENTS = Path(__file__).parent / "clients"
PAGE = Path(__file__).parent.parent / "benchmarks" / "results" / "clients.md"

CHECKS = '''
"""A client that exists for this test only."""

import os

import equinox as eqx
import jax.numpy as jnp
from common import check, mesh, shard

OWN = {own!r}


@check
def compiled():
    """what uses a verb"""
    return eqx.filter_jit(lambda x: x * 2)(shard(jnp.arange(8.0), "data"))


@check
def dies():
    """what ends the process"""
    os._exit(3)


@check
def plain():
    """what uses none"""
    return jnp.ones(3)


@check
def raises():
    """what is wrong"""
    raise ValueError("no such thing")
'''


def run(tmp_path, checkout_env, verbs, own=None):
    """What child.py writes, run until it gets to the end."""
    (tmp_path / "check_pretend.py").write_text(CHECKS.format(own=own))
    env = {**checkout_env, "PYTHONPATH": f"{tmp_path}:{checkout_env['PYTHONPATH']}"}
    command = [sys.executable, CLIENTS / "child.py", "pretend", verbs, tmp_path / verbs]
    for _ in range(2):
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    records = map(json.loads, (tmp_path / verbs).read_text().splitlines())
    return {record["check"]: record for record in records}


@pytest.mark.thorough
@pytest.mark.parametrize("verbs", ["equinox", "mylib"])
def test_a_process_that_dies_costs_one_check(tmp_path, checkout_env, verbs):
    found = run(tmp_path, checkout_env, verbs)
    assert found["compiled"]["error"] is None
    assert found["dies"]["error"] == "the process died, or did not finish"
    assert found["raises"]["error"] == "ValueError: no such thing"
    kind, where, values = found["compiled"]["results"][""]
    assert (kind, where) == ("float32[8]", "('data',) of 8 devices")
    assert values == [2.0 * i for i in range(8)]


@pytest.mark.thorough
def test_calls_of_our_verbs_are_counted(tmp_path, checkout_env):
    assert run(tmp_path, checkout_env, "equinox")["plain"]["error"] is None
    found = run(tmp_path, checkout_env, "mylib")
    assert found["plain"]["error"] == "none of mylib's verbs was called"


@pytest.mark.thorough
def test_calls_have_to_be_the_clients_own(tmp_path, checkout_env):
    found = run(tmp_path, checkout_env, "mylib", own="elsewhere")
    assert found["compiled"]["error"] == "elsewhere itself called none of mylib's verbs"


@pytest.fixture
def outcomes(monkeypatch):
    monkeypatch.syspath_prepend(str(CLIENTS))
    import outcomes

    return outcomes


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (["float32[2]", "here", [1.0, 2.0]], None),
        (["float32[2]", "here", [1.0, 2.00001]], None),
        (["float32[2]", "here", [1.0, 2.1]], "2.0 and 2.1"),
        (["float32[2]", "here", [1.0, float("nan")]], "2.0 and nan"),
        (["float64[2]", "here", [1.0, 2.0]], "float32[2] and float64[2]"),
        (["float32[2]", "there", [1.0, 2.0]], "at here and at there"),
        ("a text", "a text"),
    ],
)
def test_results_are_compared(outcomes, other, words):
    difference = outcomes.difference({".x": ["float32[2]", "here", [1.0, 2.0]]}, {".x": other})
    assert (difference is None) if words is None else (words in difference)
    assert "only one has" in outcomes.difference({".x": other}, {})


def test_a_row_tells_ours_from_the_clients_failures(outcomes):
    def good(value):
        return outcomes.Outcome("about", None, {"": ["float32[]", "here", [value]]})

    def bad(text):
        return outcomes.Outcome("about", text, None)

    plain = {"a": good(1.0), "b": good(1.0), "c": bad("gone"), "d": bad("gone"), "e": good(1.0)}
    ours = {"a": good(1.0), "b": good(3.0), "c": bad("gone"), "d": bad("other"), "e": bad("no")}
    row = outcomes.row("client", "1.0", plain, ours)
    assert (row.checks, row.passed, row.ours) == (5, 3, 1)
    assert row.failures == ["`c`: gone", "`d`: gone"]
    assert row.differences == ["`b`: result: 1.0 and 3.0", "`d`: other", "`e`: no"]


def test_results_may_be_split_that_were_replicated(outcomes):
    def placed(where):
        return outcomes.Outcome("about", None, {".x": ["float32[8]", where, [1.0] * 8]})

    whole, split = "() of 8 devices", "('data',) of 8 devices"
    plain = {"a": placed(whole), "b": placed(split), "c": placed(whole), "d": placed(whole)}
    ours = {"a": placed(split), "b": placed(whole), "c": placed("('data',) of 4 devices")}
    row = outcomes.row("client", "1.0", plain, ours | {"d": placed(whole)})
    assert (row.ours, row.split) == (2, ["a"])
    assert row.differences == [
        f"`b`: result.x: at {split} and at {whole}",
        f"`c`: result.x: at {whole} and at ('data',) of 4 devices",
    ]


FILES = sorted(CLIENTS.glob("check_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_page_lists_every_check(file):
    client = file.stem.removeprefix("check_")
    listed = PAGE.read_text().partition("## What is run")[2]
    listed = listed.partition(f"**{client}**")[2].partition("\n**")[0]
    tree = ast.parse(file.read_text())
    functions = [x for x in tree.body if isinstance(x, ast.FunctionDef)]
    checks = [x for x in functions if any("check" in ast.unparse(d) for d in x.decorator_list)]
    abouts = [ast.get_docstring(x) for x in checks]
    assert abouts and all(abouts)
    found = [x.removeprefix("- ") for x in listed.splitlines() if x.startswith("- ")]
    assert found == abouts, "run tests/clients/run.py --write"
