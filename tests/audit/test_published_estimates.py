"""Published training steps, from what their estimates read of compiled programs. None of this
compiles: `benchmarks/estimate.py --compile` does.
"""

import importlib

import _pages
import pytest

from mylib._programs.audit.roofline import estimate
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
    """Shares of other chips are not known, and the estimate says so."""
    held_out = {}
    for row in benchmarks[0].ROWS:
        held_out.setdefault(row.machine.chip.name, []).append(row.held_out)
    assert {chip.name for chip in CHIPS.values() if chip.reached} - {"a100-40gb"} <= set(held_out)
    for name, rows in held_out.items():
        assert len(rows) // 2 <= sum(rows) < len(rows), name


def test_the_table_of_the_docs(benchmarks):
    """Its rows are printed by benchmarks/estimate.py, which isn't imported: it sets a platform."""
    page = (_pages.ROOT / "docs" / "estimates.md").read_text()
    for row, found in estimates(benchmarks):
        start = f"| {row.name} |"
        (line,) = (line for line in page.splitlines() if line.startswith(start))
        assert f" {row.seconds:.2f} | {found.seconds:.2f} | " in line
