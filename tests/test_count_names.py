"""`tools/count_names.py`."""

import sys

import _pages

sys.path.append(str(_pages.ROOT / "tools"))

import count_names  # noqa: E402


def test_uses_and_parameters():
    source = "from typing import Any\n\ndef f(x: Any, y: int = 0):\n    return g(x=y, z=x.x)\n"
    assert count_names.counted(source) == {"Any": 1, "x": 2}


def test_a_table():
    told = count_names.table([("mylib/_core/tree/a.py", "x = 1\n" * 4), ("mylib/b.py", "y = 1\n")])
    assert [line.split() for line in told[1:]] == [
        ["_core/tree", "4", "0", "1000"],
        ["b", "1", "0", "0"],
        ["all", "5", "0", "800"],
    ]
