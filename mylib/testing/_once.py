"""A test that all processes run together is run once, by the process that was told to."""

import pytest
from _pytest.runner import runtestprotocol


class Once:
    """Before plugins that run a test again, or in a process that they fork off: they would do so in
    one of the processes, without the others.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        runtestprotocol(item, nextitem=nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True
