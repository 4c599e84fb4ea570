"""Compares gradients with those of one device."""

from typing import Any

import jax
import numpy as np


def assert_close(found: Any, expected: Any, rtol: float = 1e-6) -> None:
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    largest = [np.max(np.abs(y), initial=0) for y in expected]
    for x, y, scale in zip(found, expected, largest, strict=True):
        # What is zero but for rounding (of a bias before BatchNorm) is small beside the others.
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * max(scale, max(largest) / 10))
