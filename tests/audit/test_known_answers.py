"""Programs whose collectives are known, exactly: kinds, axes, bytes, and how often they run."""

import jax
import jax.numpy as jnp
import known
import pytest
from hypothesis import given, strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

import mylib

CASES = [case for case in known.cases(jax.devices()) if "cpu" not in case.without]


def test_there_are_enough():
    assert len(CASES) >= 60


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_known_answer(case):
    report = mylib.audit(jax.jit(case.fun), *case.args)
    assert known.answer_of(report) == sorted(case.answer)


def test_bytes_on_the_wire():
    mesh = known.mesh_of(jax.devices(), (8,), ("d",))
    x = known.abstract(mesh, P("d"), (64, 512))
    local = 8 * 512 * 4
    for fun, sent in (
        (lambda x: lax.psum(x, "d"), 2 * local * 7 // 8),
        (lambda x: lax.all_gather(x, "d", tiled=True), local * 7),
        (lambda x: lax.psum_scatter(x, "d", tiled=True), local * 7 // 8),
        (lambda x: lax.all_to_all(x, "d", 0, 0, tiled=True), local * 7 // 8),
        (lambda x: lax.ppermute(x, "d", [(0, 1), (1, 2)]), local),
    ):
        report = mylib.audit(jax.jit(known.mapped(mesh, P("d"), fun)), x)
        assert report.wire_bytes() == sent


def test_unknown_trips_are_no_number():
    mesh = known.mesh_of(jax.devices(), (8,), ("d",))
    x = known.abstract(mesh, P("d"), (8, 4))
    grow = known.mapped(
        mesh, P("d"), lambda x: lax.while_loop(lambda x: x.sum() < 9, lambda x: lax.psum(x, "d"), x)
    )
    report = mylib.audit(jax.jit(grow), x)
    with pytest.raises(mylib.errors.AuditError, match="unknown how often the all-reduce"):
        report.count("all-reduce")
    assert report.count("all-gather") == 0
    assert "in a call, and 1 collective runs an unknown number of times" in str(report)


def test_branches_are_an_upper_bound():
    (case,) = [case for case in CASES if case.name == "cond"]
    report = mylib.audit(jax.jit(case.fun), *case.args)
    assert all(c.sometimes for c in report.collectives)
    assert "≤ 1" in str(report) and "at most" in str(report)


_STEP = st.sampled_from(["psum", "gather", "scatter", "permute", "scan"])


@given(st.lists(_STEP, min_size=1, max_size=4), st.sampled_from(["a", "b", "c"]), st.integers(2, 5))
def test_random_programs(steps, axis, turns):
    """What a chain of primitives does is the sum of what they do."""
    mesh = known.mesh_of(jax.devices(), (2, 2, 2), known.AXES)
    expected: known.Answer = []

    def fun(x):
        for step in steps:
            x = jnp.sin(x)  # so that no two are joined
            size = x.size * 4
            match step:
                case "psum":
                    x = lax.psum(x, axis)
                    expected.append(("all-reduce", (axis,), size, 1))
                case "gather":
                    x = lax.all_gather(x, axis, tiled=True)
                    expected.append(("all-gather", (axis,), 2 * size, 1))
                case "scatter":
                    x = lax.psum_scatter(x, axis, tiled=True)
                    expected.append(("reduce-scatter", (axis,), size, 1))
                case "permute":
                    x = lax.ppermute(x, axis, [(0, 1), (1, 0)])
                    expected.append(("collective-permute", (axis,), size, 1))
                case "scan":
                    x, _ = lax.scan(
                        lambda x, _: (jnp.sin(lax.psum(x, axis)), None), x, None, length=turns
                    )
                    expected.append(("all-reduce", (axis,), size, turns))
        return x

    x = known.abstract(mesh, P("a", "b", "c"), (64, 64, 64))
    mapped = jax.jit(known.mapped(mesh, P("a", "b", "c"), fun))
    lowered = mapped.lower(x)
    before = list(expected)
    assert known.answer_of(mylib.audit(lowered.compile())) == sorted(before)
