"""The names of other libraries that mylib replaces during some of its calls, and those that it
replaced before. docs/changes-in-other-libraries.md has the former.
"""

import equinox._errors
import jax.core
from jax._src import ad_util
from jax._src.cudnn import fused_attention_stablehlo as attention
from jax._src.interpreters import batching, mlir, partial_eval

NAMES = {
    "equinox._errors._error": lambda: equinox._errors._error,
    "jax._src.interpreters.mlir.warnings": lambda: mlir.warnings,
    "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version": (
        lambda: attention.check_cudnn_version
    ),
    "jax._src.cudnn.fused_attention_stablehlo.check_compute_capability": (
        lambda: attention.check_compute_capability
    ),
}
FORMER = {
    "moveaxis": lambda: batching.moveaxis,
    "zeros": lambda: ad_util.aval_zeros_likers[jax.core.ShapedArray],
    "scan": lambda: {
        str(x): rule for x, rule in partial_eval.partial_eval_jaxpr_custom_rules.items()
    }["scan"],
}


def now():
    """What each name stands for."""
    return {name: find() for name, find in {**NAMES, **FORMER}.items()}
