"""`python -m mylib compile`."""

import sys
import textwrap

import pytest
from scripts import run_python

import mylib
from mylib.__main__ import main

PROGRAM = """
    import jax, jax.numpy as jnp
    from jax.sharding import PartitionSpec as P
    import mylib

    def rows(machine):
        mesh = machine.mesh(data=-1)
        x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        return mylib.filter_shard(x, P("data"), mesh=mesh)

    def lowered(machine):
        step = mylib.filter_jit(lambda x: (x @ x.T).sum())
        return step.lower(rows(machine))

    def too_large(machine):
        mesh = machine.mesh(data=-1)
        x = jax.ShapeDtypeStruct((2**19, 2**19), jnp.float32)
        x = mylib.filter_shard(x, P("data"), mesh=mesh)
        return mylib.filter_jit(lambda x: jnp.cumsum(x, axis=1)).lower(x)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    return tmp_path


@pytest.fixture
def run(folder, checkout_env):
    def run(*arguments):
        done = run_python("-m", "mylib", "compile", *arguments, env=checkout_env, cwd=folder)
        return done.returncode, done.stdout, done.stderr

    return run


def test_help_and_version(capsys):
    for option, told in ("--help", "examples:"), ("--version", f"mylib {mylib.__version__}"):
        with pytest.raises(SystemExit) as ended:
            main([option])
        assert ended.value.code == 0 and told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train:lowered"], "the following arguments are required: --machine"),
        (["train:lowered", "--machine", "h100"], "'h100' is not a machine. Write the number of"),
        (["trian:lowered", "--machine", "h100 x 8"], "there is no module 'trian' here"),
        (["train:lowred", "--machine", "h100 x 8"], "train has no function 'lowred'"),
    ],
)
def test_mistakes(folder, arguments, told, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "train", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["compile", *arguments])
    assert ended.value.code == 2 and told in " ".join(capsys.readouterr().err.split())


@pytest.mark.compilers
@pytest.mark.compiles_for("h100 x 8", "v5e 2x4")
def test_a_program(run, machine, tmp_path):
    status, out, err = run("train:lowered", "--machine", str(machine), "--save", "step.mylib")
    assert status == 0, out + err
    assert "traced and lowered in " in out and f"compiled for {machine} in " in out
    assert "the program needs " in out and "all-gather" in out
    size = (tmp_path / "step.mylib").stat().st_size
    assert f"saved in step.mylib, {size:,} bytes" in out


@pytest.mark.compilers
@pytest.mark.compiles_for("h100 x 8", "v5e 2x4")
def test_one_that_does_not_fit(run, machine):
    status, out, err = run("train:too_large", "--machine", str(machine))
    assert status == 1 and "are missing" in out + err and "Traceback" not in err
