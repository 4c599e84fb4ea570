"""The environment variables that mylib reads."""

import pytest

from mylib._processes import environment


@pytest.mark.parametrize("value", ["5m", "0", "-1", "nan", "inf", "1e300", "0x10", " "])
def test_no_number_of_seconds(value, monkeypatch):
    monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", value)
    with pytest.raises(ValueError) as caught:
        environment()
    assert str(caught.value) == (
        f"MYLIB_EXCHANGE_TIMEOUT is {value!r}, and can be a number of seconds, such as 300"
    )


def test_settings(monkeypatch):
    for name in "MYLIB_EXCHANGE_TIMEOUT", "MYLIB_TRANSPORT":
        monkeypatch.setenv(name, "")
    assert environment() == (300, "links")
    monkeypatch.setenv("MYLIB_EXCHANGE_TIMEOUT", "2.5")
    monkeypatch.setenv("MYLIB_TRANSPORT", "program")
    assert environment() == (2.5, "program")
