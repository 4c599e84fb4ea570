"""Do all processes of a test have the same value?"""

import json
from typing import Any

from mylib.testing import gather


def all_equal(value: Any) -> None:
    """Compares values that JSON can represent as they are printed: NaN is equal to itself."""
    values = gather(value)
    assert len({json.dumps(x, sort_keys=True) for x in values}) == 1, values
