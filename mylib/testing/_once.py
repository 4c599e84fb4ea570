"""Runs a test of all processes only once in each."""

import pytest
from _pytest.runner import runtestprotocol


class Once:
    """Comes before plugins that rerun a test or fork a process for it: they would do so in one of
    the processes, without the others.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        runtestprotocol(item, nextitem=nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True
