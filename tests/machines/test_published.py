"""The table of published steps on docs/communication.md, compared with what is printed today."""

import _pages
import jax
import pytest
from scripts import printed_by

pytestmark = [pytest.mark.compilers, pytest.mark.slow]


@pytest.mark.compiles_for("h100 x 8")
@pytest.mark.skipif(jax.__version__.startswith("0.10."), reason="the table is of the newest JAX")
def test_the_table_of_the_docs(machine):
    # The cheapest two: one within a host, and one over 16 hosts with what that takes to send.
    names = ["8B, 8 H100", "8B, 128 H100"]
    printed = printed_by(_pages.ROOT / "benchmarks" / "estimate.py", "--only", *names)
    rows = [line for line in printed.splitlines() if line.startswith("| 8B, ")]
    assert len(rows) == 2
    page = (_pages.ROOT / "docs" / "communication.md").read_text().splitlines()
    assert [row for row in rows if row not in page] == []
