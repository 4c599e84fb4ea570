"""`python -m mylib plan`."""

import sys
import textwrap

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
        return step, rows, model, {"policies": ("full",)}

    def too_few(machine):
        step, _, model, _ = training(machine)
        return step, jax.ShapeDtypeStruct((1, 64), jnp.float32), model, {"axes": {"data": 8}}
"""


def test_plans_and_saves(tmp_path, monkeypatch, capsys):
    (tmp_path / "planned_train.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = ["--machine", "h100 x 8", "--compile", "0"]
    assert main(["plan", "planned_train:training", *options, "--save", "plan.json"]) == 0
    printed = capsys.readouterr().out
    plan = mylib.Plan.of((tmp_path / "plan.json").read_text())
    assert repr(plan) in printed and str(plan.machine) == "h100 x 8"
    assert main(["plan", "planned_train:too_few", *options]) == 1
    assert "can't be divided over 8 devices" in capsys.readouterr().err
