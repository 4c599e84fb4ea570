"""Random training steps under their plans, all of them right: does `verify` say so?

python tests/verify/false_alarms.py 0 100
"""

import sys
import traceback
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "plan"))

import conftest  # noqa: F401, I001  (8 simulated devices, before JAX starts)
import equinox as eqx
import jax
from random_steps import build, draw, options_of

import mylib
from mylib.testing import VerifyError, verify


def look(seed):
    program = draw(seed)
    try:
        step, args, _ = build(program)
        shapes = eqx.filter_eval_shape(lambda: tuple(args.values()))
        options = options_of(program, args)
        plan = mylib.plan(step, *shapes, compile=0, policies=(program.policy,), **options)
    except mylib.errors.PlanError as error:
        return "refused", str(error)
    try:
        report = verify(plan.jit(step), *args.values())
    except VerifyError as error:
        return "alarm", str(error)
    return ("passed", "") if report.wide is not None else ("own dtypes only", report.why)


def main(first, last):
    counts = Counter()
    for seed in range(first, last):
        try:
            kind, why = look(seed)
        except Exception:
            kind, why = "failed", traceback.format_exc()
        counts[kind] += 1
        if kind not in ("passed", "refused"):
            print(f"--- seed {seed}: {kind}\n{why}", flush=True)
        jax.clear_caches()
        print(dict(counts), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
