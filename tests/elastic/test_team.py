"""What a team refuses, and its meshes, in one process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mylib
from mylib import elastic

DATA = np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32)


def read(n, rows):
    return DATA[rows]


def step(w, x):
    loss, slope = jax.value_and_grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
    return w - 0.1 * slope, loss


@pytest.fixture
def team():
    return elastic.Team(data=2, at_least=2)


@pytest.fixture
def weights(team):
    return mylib.filter_shard(jnp.zeros(4), P("data"), mesh=team.mesh)


def test_mesh(team):
    assert dict(team.mesh.shape) == {"replica": 4, "data": 2}
    assert [d.id for d in team.mesh.devices.flat] == [*range(8)]
    assert dict(elastic.Team(replica="r", model=4).mesh.shape) == {"r": 2, "model": 4}


@pytest.mark.parametrize("axes", [{"data": 3}, {"data": 16}])
def test_axes_that_do_not_divide(axes):
    with pytest.raises(ValueError, match=r"choose axes whose sizes multiply to a divisor of 8"):
        elastic.Team(**axes)


def test_at_least():
    with pytest.raises(ValueError, match="write at_least=1 to 4"):
        elastic.Team(data=2, at_least=5)


def test_steps(team, weights):
    compiled = mylib.filter_jit(step, out_shardings=(P("data"), P()))
    expected = jnp.zeros(4)
    made = []
    for n, w, loss in team.steps(compiled, weights, read, rows=48, stop=4):
        made.append(n)
        expected, theirs = step(expected, DATA)
        np.testing.assert_allclose(loss, theirs, rtol=1e-5)
        np.testing.assert_allclose(np.asarray(w), expected, rtol=1e-5, atol=1e-6)
    assert made == [0, 1, 2, 3]
    assert team.lost == []


def test_rows_that_do_not_divide(team, weights):
    with pytest.raises(ValueError, match="write rows=24 or 48: rows=32 must divide") as error:
        team.steps(step, weights, read, rows=32, stop=1)
    assert "6 parts with 3 replicas" in str(error.value)


def test_an_array_in_parts_over_the_replicas(team):
    state = {"w": mylib.filter_shard(jnp.zeros(8), P(("replica", "data")), mesh=team.mesh)}
    with pytest.raises(ValueError, match=r"\['w'\] \(8,\) is placed as .*another part"):
        team.steps(step, state, read, rows=48, stop=1)


def test_an_array_on_another_mesh(team):
    state = mylib.filter_shard(jnp.zeros(8), P("data"), mesh=mylib.make_mesh(data=8))
    with pytest.raises(ValueError, match=r"it \(8,\) is placed as .* not over team.mesh"):
        team.steps(step, state, read, rows=48, stop=1)


def test_donation(team, weights):
    donating = mylib.filter_jit(step, donate=("w",), out_shardings=(P("data"), P()))
    with pytest.raises(ValueError, match=r"without donate=\('w',\), or give steps every=10") as e:
        team.steps(donating, weights, read, rows=48, stop=1)
    assert "(64 bytes in this process)" in str(e.value)
    done = [n for n, *_ in team.steps(donating, weights, read, rows=48, stop=5, every=2)]
    assert done == [*range(5)]


def test_a_step_with_a_mesh(team, weights):
    fixed = mylib.filter_jit(step, out_shardings=P(), mesh=team.mesh)
    with pytest.raises(ValueError, match="write step without mesh="):
        team.steps(fixed, weights, read, rows=48, stop=1)


def test_reading_other_rows(team, weights):
    with pytest.raises(ValueError, match=r"return NumPy arrays with the 48 rows .*\(3, 4\)"):
        list(team.steps(step, weights, lambda n, rows: DATA[:3], rows=48, stop=1))


def test_an_error_in_the_step_is_raised_as_it_is(team, weights):
    def wrong(w, x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        list(team.steps(wrong, weights, read, rows=48, stop=1))


def test_pieces(team, weights):
    seen = []

    def in_pieces(w, x, pieces):
        seen.append(pieces)
        return step(w, x)

    compiled = mylib.filter_jit(in_pieces, out_shardings=(P("data"), P()))
    list(team.steps(compiled, weights, read, rows=48, stop=1))
    assert {*seen} == {1}


def test_too_late():
    with pytest.raises(RuntimeError, match="call mylib.elastic.initialize.. at the start"):
        elastic.initialize()
