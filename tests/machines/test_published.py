"""The table of published steps on docs/estimates.md, compared with what is printed today."""

import _pages
import jax
import pytest
from scripts import printed_by

pytestmark = [pytest.mark.compilers, pytest.mark.slow]


@pytest.mark.compiles_for("h100 x 8")
@pytest.mark.skipif(jax.__version__.startswith("0.10."), reason="the table is of the newest JAX")
def test_the_table_of_the_docs(machine, checkout_env):
    # A cheap one, over several hosts.
    name = "8B, 128 H100"
    script = _pages.ROOT / "benchmarks" / "estimate.py"
    printed = printed_by(script, "--compile", "--only", name, env=checkout_env)
    (row,) = (line for line in printed.splitlines() if line.startswith(f"| {name} |"))
    assert row in (_pages.ROOT / "docs" / "estimates.md").read_text().splitlines()
