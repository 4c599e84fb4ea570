"""`python -m mylib plan`."""

import sys
import textwrap

import jax
import pytest

import mylib
from mylib.__main__ import main

PROGRAM = """
    import equinox as eqx, jax, jax.numpy as jnp

    def step(batch, model):
        grads = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(batch) ** 2))(model)
        return eqx.apply_updates(model, grads)

    def training(machine):
        key = jax.random.key(0)
        model = eqx.filter_eval_shape(eqx.nn.MLP, 64, 64, 256, 2, key=key)
        rows = jax.ShapeDtypeStruct((machine.count, 64), jnp.float32)
        return step, rows, model, {"policies": ("full",), "compile": 0}

    def too_few(machine):
        step, _, model, _ = training(machine)
        return step, jax.ShapeDtypeStruct((1, 64), jnp.float32), model, {"axes": {"data": 8}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_plans_and_saves(folder, capsys):
    (folder / "planned_train.py").write_text(textwrap.dedent(PROGRAM))
    options = ["--machine", "h100 x 8", "--compile", "0"]
    assert main(["plan", "planned_train:training", *options, "--save", "plan.json"]) == 0
    printed = capsys.readouterr().out
    plan = mylib.Plan.of((folder / "plan.json").read_text())
    assert repr(plan) in printed and str(plan.machine) == "h100 x 8"
    assert main(["plan", "planned_train:too_few", *options]) == 1
    assert "can't be divided over 8 devices" in capsys.readouterr().err


def test_a_module_with_a_mesh(folder, capsys):
    """It sets the mesh, and says in its dict what to compile; the command line may overrule it."""
    program = "import mylib\n" + textwrap.dedent(PROGRAM)
    program += "\njax.set_mesh(mylib.make_mesh(data=-1))\n"
    (folder / "planned_on_mesh.py").write_text(program)
    before = jax.sharding.get_mesh()
    try:
        command = ["plan", "planned_on_mesh:training", "--machine", "h100 x 8"]
        assert main(command) == 0
        assert "nothing was compiled" in capsys.readouterr().out
        with pytest.raises(TypeError, match="compile=-1: write a number of at least 0"):
            main([*command, "--compile", "-1"])
    finally:
        jax.set_mesh(before)
