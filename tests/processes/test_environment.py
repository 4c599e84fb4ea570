"""The environment variables that mylib reads."""

import textwrap

import pytest
from scripts import run_python

from mylib._moving.processes.environment import environment


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


DIFFERENT = """
    import os, sys
    import jax, numpy as np
    from jax.sharding import AxisType, Mesh, PartitionSpec as P
    import mylib

    jax.distributed.initialize()
    call, setting, odd = sys.argv[1:]
    if jax.process_index():
        os.environ[setting] = odd
    first, second = (
        Mesh(d, ("data",), axis_types=(AxisType.Auto,)) for d in np.array(jax.devices())[:, None]
    )
    try:
        if call == "place":
            mylib.filter_shard(np.zeros(4), P(), mesh=mylib.make_mesh(d=-1))
        else:
            meshes = (first, second) if call == "send" else (second, first)
            x = mylib.filter_shard(np.zeros(4), P("data"), mesh=meshes[0])
            mylib.mpmd.fetch(mylib.mpmd.transfer(x, P(), mesh=meshes[1]))
    except (ValueError, TimeoutError, mylib.mpmd.TransferError) as error:
        print(type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "setting", "odd", "told"),
    [
        (
            "place",
            "MYLIB_EXCHANGE_TIMEOUT",
            "5m",
            "(ValueError: MYLIB_EXCHANGE_TIMEOUT",
        ),
        ("place", "MYLIB_TRANSPORT", "link", "(ValueError: MYLIB_TRANSPORT is 'link'"),
        ("send", "MYLIB_EXCHANGE_TIMEOUT", "5m", "process 1: MYLIB_EXCHANGE_TIMEOUT is '5m'"),
        ("send", "MYLIB_TRANSPORT", "program", "process 1: MYLIB_TRANSPORT is 'program'"),
        ("receive", "MYLIB_TRANSPORT", "program", "process 1: MYLIB_TRANSPORT is 'program'"),
    ],
)
def test_settings_that_differ(call, setting, odd, told, tmp_path, checkout_env):
    """Told in both processes at once, and not after the 300 s that they wait for each other."""
    path = tmp_path / "differ.py"
    path.write_text(textwrap.dedent(DIFFERENT))
    arguments = "-m", "mylib.testing", "launch", "-n2", path, call, setting, odd
    done = run_python(*arguments, env=checkout_env)
    lines = [line for line in done.stdout.splitlines() if "Error " in line]
    assert len(lines) == 2 and any(told in line for line in lines), done.stdout + done.stderr
