"""The names of tests in the processes that run them."""

import pytest

_name = pytest.StashKey[str]()


def keep_name(item: pytest.Item) -> None:
    """Called when the test is collected, because pytest-xdist changes the name later."""
    item.stash[_name] = item.nodeid


def name_in_processes(item: pytest.Item) -> str:
    return item.stash.get(_name, item.nodeid)
