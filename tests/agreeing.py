"""Tests in two and in four processes, and whether all of them have the same value."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from mylib.testing import gather


def _in(processes: int, devices: int):
    mark = pytest.mark.multihost(processes=processes, devices_per_process=devices)
    return pytest.param(processes, id=f"{processes}x{devices}", marks=mark)


TWO_AND_FOUR = [_in(2, 4), _in(4, 2)]
# For what four processes do as two.
TWO_OF_THEM = pytest.mark.everyday("2x4", rest="thorough")


def all_equal(value: Any) -> None:
    """Compares values that JSON can represent as they are printed: NaN is equal to itself."""
    values = gather(value)
    assert len({json.dumps(x, sort_keys=True) for x in values}) == 1, values


def fails(kind: type[Exception], fun: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The words of an error that is the same in all processes."""
    with pytest.raises(kind) as caught:
        fun(*args, **kwargs)
    all_equal(str(caught.value))
    return str(caught.value)
