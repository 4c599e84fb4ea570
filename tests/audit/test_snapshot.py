"""Snapshots of programs: a change shows as the lines that differ."""

import jax
import jax.numpy as jnp
import known
import pytest
from jax.sharding import PartitionSpec as P

import mylib
from mylib.testing import check_snapshot

ONE = known.mesh_of(jax.devices(), (8,), ("data",))


def report_of(spec: P) -> mylib.results.Report:
    w, x = known.abstract(ONE, spec, (64, 64)), known.abstract(ONE, P("data"), (4096, 64))
    return mylib.audit(jax.jit(lambda w, x: jnp.tanh(x @ w)), w, x)


def test_a_change_shows_by_leaf_and_by_collective(tmp_path):
    path = tmp_path / "snapshots" / "step.txt"
    with pytest.raises(AssertionError, match="--snapshot-update to write it"):
        check_snapshot(report_of(P("data")), path, update=False)
    check_snapshot(report_of(P("data")), path, update=True)
    check_snapshot(report_of(P("data")), path, update=False)
    assert path.read_text().splitlines() == [
        "mesh: data=8",
        "",
        "placements, with each device's part:",
        "  w: f32[8, 64] data",
        "  x: f32[512, 64] data",
        "",
        "communicated in a call, in bytes:",
        "  all-gather over data: 16384",
    ]
    with pytest.raises(AssertionError) as raised:
        check_snapshot(report_of(P()), path, update=False)
    told = str(raised.value)
    for line in (
        "-  w: f32[8, 64] data",
        "+  w: f32[64, 64] whole",
        "-  all-gather over data: 16384",
        "+  nothing",
    ):
        assert line in told
    assert "x: f32" not in told


def test_the_option(pytester):
    pytester.makepyfile(
        test_step="""
        import jax, jax.numpy as jnp
        import mylib

        def test_step(program_snapshot):
            program_snapshot(mylib.audit(jnp.sin, jnp.ones(3)))
        """
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(failed=1)
    pytester.runpytest_inprocess("--snapshot-update").assert_outcomes(passed=1)
    assert (pytester.path / "snapshots" / "test_step" / "test_step.txt").exists()
    pytester.runpytest_inprocess().assert_outcomes(passed=1)
