"""What a test is called in the processes that run it."""

import pytest

_name = pytest.StashKey[str]()


def keep_name(item: pytest.Item) -> None:
    """To be called when the test is collected: pytest-xdist goes on to change the name."""
    item.stash[_name] = item.nodeid


def name_in_processes(item: pytest.Item) -> str:
    return item.stash.get(_name, item.nodeid)
