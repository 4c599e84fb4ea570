"""Gates, which open when all processes have come."""

import jax
import pytest

from mylib._moving.processes import TIMEOUT, everybody, gate_of

pytestmark = pytest.mark.multihost


def test_they_open_again_and_again():
    # More than the service keeps.
    assert all(gate_of(everybody()).opens(f"step {n}", True) for n in range(200))


def test_one_that_is_not_ready_shuts_it_for_all():
    gate, me = gate_of(everybody()), jax.process_index()
    # The others may have gone on, if nothing was kept, and have come for something else.
    assert not gate.opens("step 1" if me else "reading 2", me == 0)
    assert gate.opens("step 2", True)


def test_it_stays_shut_if_purposes_differ(monkeypatch):
    monkeypatch.setenv(TIMEOUT, "2")
    gate, me = gate_of(everybody()), jax.process_index()
    assert not gate.opens(f"step {me}", True)
    monkeypatch.undo()
    assert gate.opens("step 2", True)
