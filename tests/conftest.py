"""What every test may rely on: 8 simulated devices, and examples that are the same in every run.

The time limit of a test is in pyproject.toml.
"""

import importlib.util
import os
from pathlib import Path

# All are read once, when JAX starts. Of a flag given twice the last one counts, so ours go last.
# Machine code that is not optimised is made in half the time, which is most of what the tests
# take. XLA's own passes, which decide what is communicated and kept, are the same.
_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
# The threads that the simulated devices share; by default one for each core. With fewer
# threads than devices, JAX 0.10 aborts when programs with collectives follow each other closely.
os.environ["NPROC"] = "32"

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

import mylib.testing  # noqa: E402

mylib.testing.second_backend("other", devices=4)

# No deadline: the first example of a shape compiles, the next ones don't.
hypothesis.settings.register_profile(
    "steady", derandomize=True, deadline=None, max_examples=50, print_blob=True
)
hypothesis.settings.register_profile("search", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("steady")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        try:
            jax.devices("gpu")
        except RuntimeError:
            pytest.skip("needs a real GPU")


@pytest.fixture(scope="session")
def checkout_env() -> dict[str, str]:
    """The environment of a script that must import the same `mylib` as the tests do."""
    spec = importlib.util.find_spec("mylib")
    assert spec is not None and spec.origin is not None
    here = Path(spec.origin).parent.parent
    return {**os.environ, "PYTHONPATH": str(here)}
