"""Each opcode with each dtype that it takes: what `run_here` computes is what JAX computes."""

import jax
import pytest
from pairs import DTYPES, PROGRAMS, outcome

from mylib._programs.audit.opcodes import OPCODES

# JAX lowers none of its functions to them, or only for other machines; test_interpreter.py and
# test_run_here.py have some of them.
WITHOUT = """
    acos acosh add-dependency after-all asin asinh async atan atanh bitcast cholesky
    collective-broadcast constant copy cosh domain fusion get-tuple-element logistic map
    optimization-barrier parameter replica-id sinh
"""


def test_each_opcode_has_a_program():
    from test_interpreter import UNKNOWN

    without = {*WITHOUT.split(), *UNKNOWN.split()}
    assert sorted(OPCODES.keys() - PROGRAMS.keys()) == sorted(without)


WRONG = {"atan2": ["complex64", "complex128"]}
# XLA of JAX 0.10, without its newer emitters, has NaN for small numbers of these types.
if jax.__version_info__ < (0, 11):
    WRONG["reduce-window"] = ["float8_e4m3b11fnuz", "float8_e4m3fnuz"]


# Of JAX's own, about dtypes.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("opcode", PROGRAMS)
def test_pairs(opcode):
    seed = 0
    outcomes = {dtype: outcome(opcode, dtype, seed) for dtype in DTYPES}
    # A compiler's memory for so many programs.
    jax.clear_caches()
    wrong = [dtype for dtype, text in outcomes.items() if text.startswith(("WRONG", "refused"))]
    assert wrong == WRONG.get(opcode, [])
    assert "right" in outcomes.values()
