"""Published training steps, from what their estimates read of compiled programs. None of this
compiles: `benchmarks/estimate.py --compile` does.
"""

import importlib
import sys
from itertools import groupby

import _pages
import pytest

from mylib._audit.roofline import estimate
from mylib.machines import CHIPS


@pytest.fixture(scope="module")
def benchmarks():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_pages.ROOT / "benchmarks")
        yield importlib.import_module("published"), importlib.import_module("stored")


def estimates(benchmarks):
    """The rows that were compiled and are judged, and their estimates."""
    published, stored = benchmarks
    kept = stored.load()
    read = ((row, stored.read(row, kept)) for row in published.ROWS if row.judged)
    return [(row, estimate(*found, row.axes, row.machine)) for row, found in read if found]


def test_estimates_are_near_published_times(benchmarks):
    ratios = {row.name: found.seconds / row.seconds for row, found in estimates(benchmarks)}
    outside = {name: ratio for name, ratio in ratios.items() if not 0.8 <= ratio <= 1.25}
    assert len(outside) <= 2, outside


def test_published_times_are_in_their_intervals(benchmarks):
    for row, found in estimates(benchmarks):
        low, high = found.interval
        assert low <= row.seconds <= high, row.name


def test_half_of_the_rows_of_each_generation_are_held_out(benchmarks):
    held_out = {}
    for row, _ in estimates(benchmarks):
        held_out.setdefault(row.machine.chip.name, []).append(row.held_out)
    assert {"a100-80gb", "h100", "v5e", "v5p", "v6e"} <= set(held_out)
    for name, rows in held_out.items():
        assert sum(rows) >= len(rows) // 2 and not all(rows), name


def test_shares_are_of_generations_with_published_steps(benchmarks):
    """Other chips take those of one that has them, and the estimate says so."""
    compared = {row.machine.chip.name for row, _ in estimates(benchmarks)}
    for chip in CHIPS.values():
        assert not chip.reached or chip.name in {*compared, "a100-40gb"}
        assert all(0.3 <= share <= 1 for share in chip.reached.values())
