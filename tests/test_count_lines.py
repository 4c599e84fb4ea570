"""`tools/count_lines.py`."""

import sys

import _pages

sys.path.append(str(_pages.ROOT / "tools"))

import count_lines  # noqa: E402
from count_lines import Lines  # noqa: E402

_SOURCE = '''"""A module,
of two lines."""

# A comment.
x = """no docstring,
# and no comment"""


class A:  # behind code
    """One line."""

    def f(self):
        return (
            x,

            # inside code
        )
'''


def test_kinds_of_lines():
    assert count_lines.count(_SOURCE) == Lines(code=7, docstrings=3, comments=2)


def test_rooms_in_folders_and_stubs():
    sources = ["_core/tree/leaves.py", "_core/lines.py", "_core/__init__.py", "rules.py"]
    sources += ["_testing/pool.py", "__init__.pyi", "_tree/leaves.py"]
    rooms = count_lines.by_room((f"mylib/{path}", "x = 1\n") for path in sources)
    expected = {"_core/tree", "_core/lines", "_core/__init__", "rules", "_testing", "_tree"}
    assert rooms.keys() == expected | {"__init__"}
    assert {"__init__", "rules"} < count_lines.by_room(count_lines.here()).keys()


def test_table_of_two_commits():
    now = count_lines.by_room([("mylib/a/x.py", "x = 1\n"), ("mylib/a/y.py", "y = 1\n# why\n")])
    before = count_lines.by_room([("mylib/b.py", "x = 1\ny = 2\n")])
    assert now == {"a": Lines(2, 0, 1)} and before == {"b": Lines(2, 0, 0)}
    told = [line.split() for line in count_lines.table(now, before)]
    assert told[1] == "a 0 +2 = 2 0 +0 = 0 0 +1 = 1".split()
    assert told[2] == "b 2 -2 = 0 0 +0 = 0 0 +0 = 0".split()
    assert told[3] == "all 2 +0 = 2 0 +0 = 0 0 +1 = 1".split()
