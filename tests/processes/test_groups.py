"""Groups of processes as text, which all of them send to one."""

import pytest
from hypothesis import given, strategies as st

from mylib._moving.processes import groups


@given(st.sets(st.integers(0, 50), min_size=1))
def test_the_text_of_a_group(indices):
    group = tuple(sorted(indices))
    assert groups.members(groups.text_of(group)) == list(group)


@pytest.mark.parametrize(
    "group", [range(10_000), range(3, 10_000, 8), [*range(8), *range(5000, 9000, 2)]]
)
def test_the_text_of_a_large_group_is_short(group):
    assert len(groups.text_of(tuple(group))) < 30
