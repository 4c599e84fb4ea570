"""What is told of random programs is what their texts have, by a second reader that is a few lines.
`random_programs.py` reads more of them by hand.
"""

import jax
import pytest
from jax.sharding import PartitionSpec as P
from random_programs import Program, check, draw, faults_of

import mylib

# Their rows go from one device to another, once. There was no sum in it, and it was told as one.
MOVED = Program("product", "2x2x2", "float32", (P("a"), P("a")), None, P(("b", "a")))


def test_a_permutation_without_a_sum_is_no_reduce_scatter():
    compiled, _ = MOVED.compiled(jax.devices())
    report = mylib.audit(compiled)
    told = sorted((c.kind, c.axes, c.bytes, c.times) for c in report.collectives)
    assert told == [
        ("all-gather", ("a",), 64 * 64 * 4, 1),
        ("collective-permute", ("a", "b"), 16 * 64 * 4, 1),
    ]
    assert not faults_of(report, compiled.as_text())
    with pytest.raises(AssertionError, match="collective-permute over a, b"):
        report.expect(mylib.contracts.never("collective-permute"))


def test_a_sum_after_a_permutation_is_no_part_of_it():
    """Of a ring it is: what is added there is another part of the product."""
    added = Program("product and sum", "2x2x2", "float32", (P("a"), P("a")), None, P(("b", "a")))
    assert not check(added, jax.devices())


@pytest.mark.parametrize("seed", range(8))
def test_on_cpus(seed):
    assert not check(draw(seed), jax.devices())


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 200, 10))
def test_more_on_cpus(first):
    found = {n: check(draw(n), jax.devices()) for n in range(first, first + 10)}
    assert not any(found.values()), found


@pytest.mark.compilers
@pytest.mark.compiles_for("h100 x 8")
@pytest.mark.parametrize("program", [MOVED, *map(draw, range(30))], ids=str)
def test_on_machines(machine, program):
    assert not check(program, list(machine.devices))
