"""One line on a terminal, for what takes more than two seconds."""

import sys
import time

import jax.numpy as jnp
import pytest

import mylib
from mylib._core import status
from mylib._core.status import StatusLine


def _on_terminal(monkeypatch, after=0.05):
    """In the test, as pytest has another stderr in fixtures."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(status, "_AFTER", after)
    monkeypatch.setattr(status, "_EVERY", 0.01)


def test_the_latest_text_and_then_nothing(monkeypatch, capsys):
    _on_terminal(monkeypatch)
    with StatusLine("first of all") as line:
        time.sleep(0.2)
        line.write("second")
        with StatusLine("inside of it"):
            time.sleep(0.2)
    written = capsys.readouterr().err
    assert written.startswith("\rfirst of all") and "\rsecond      " in written
    assert "inside" not in written and written.rsplit("\r", 2)[1:] == [" " * 6, ""]


def test_not_of_what_is_quick(monkeypatch, capsys):
    _on_terminal(monkeypatch)
    with StatusLine("quick"):
        pass
    with pytest.raises(ZeroDivisionError), StatusLine("quick, too"):
        raise ZeroDivisionError
    with StatusLine("slow"):
        time.sleep(0.2)
    assert "quick" not in capsys.readouterr().err


def test_only_on_a_terminal_or_where_it_is_asked_for(monkeypatch, capsys):
    monkeypatch.setattr(status, "_AFTER", 0.0)
    with StatusLine("nowhere"):
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
    with StatusLine("asked for", is_on=True):
        assert capsys.readouterr().err == "\rasked for"


def test_what_is_compiled_and_computed(monkeypatch, capsys):
    _on_terminal(monkeypatch, after=0.0)
    step = mylib.filter_jit(lambda x: jnp.sin(x) @ x)
    mylib.testing.run_here(step.lower(jnp.ones(8)).compile(), jnp.ones(8))
    mylib.audit(lambda x: x + 1, jnp.ones(8))
    written = capsys.readouterr().err
    for words in ("compiling <lambda>", "computing"):
        assert f"\r{words}" in written
