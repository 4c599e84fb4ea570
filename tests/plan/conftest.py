"""Plans are not kept between tests, unless a test says where."""

import pytest

from mylib._plan import cache


@pytest.fixture(autouse=True)
def plans(monkeypatch, tmp_path):
    """Calling it makes plans be kept in the folder that it returns."""
    monkeypatch.setattr(cache, "folder", lambda: None)

    def keep():
        monkeypatch.setattr(cache, "folder", lambda: tmp_path / "plans")
        return tmp_path / "plans"

    return keep
