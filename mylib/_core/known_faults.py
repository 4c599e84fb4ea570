"""What compilers are known to compile wrongly, without an error. `plan` and `verify` ask this
table, and docs/verify.md shows it.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jaxlib.version import __version__ as VERSION

from .compat import Program, devices_of_lowered, names
from .jaxprs import all_equations, line_of, shape_of
from .text import some


@dataclass(frozen=True)
class KnownFault:
    """`what` is wrong on these platforms, in these versions of jaxlib (in all, if there are none).
    `told` is where it can be read, and `has` tells whether an equation of a program is concerned,
    where equations tell.
    """

    what: str
    told: str
    platforms: tuple[str, ...]
    has: Callable[[JaxprEqn], bool] = lambda eqn: False
    versions: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} ({self.told})"

    def is_on(self, platform: str) -> bool:
        return platform in self.platforms and (not self.versions or VERSION in self.versions)


def _is_of_weights(eqn: JaxprEqn) -> bool:
    """Whether it is the gradient of the weights of a convolution, which is grouped or has windows
    of several positions. In JAX's rule for it, rows and features have changed places.
    """
    if eqn.primitive.name != names.CONVOLUTION:
        return False
    numbers, shape = eqn.params[names.PARAM_DIMENSION_NUMBERS], shape_of(eqn.outvars[0].aval)
    is_large = numbers.lhs_spec[0] != 0 and any(shape[i] > 1 for i in numbers.out_spec[2:])
    return is_large or eqn.params[names.PARAM_BATCH_GROUPS] > 1


# So it is in plain JAX (0.10.2 and 0.12.0.1). XLA has no public issue about it;
# tests/plan/test_planning.py fails once it is fixed, and then this may go.
CONVOLVED = KnownFault(
    "XLA's gradient of a convolution's weights is wrong, or ends the process, if its rows are not "
    "split over all devices, and it is grouped or its positions are split",
    "the page Layers, Grouped convolutions",
    ("cpu", "gpu", "tpu"),
    _is_of_weights,
)
# On an H100, with the pass that is on by default in these versions; the text of an issue is in
# tests/interpreter/xla_gpu_copy.md. Only the compiled program says whether an operand was copied:
# `verify` looks for such a place, and whether its results are right with a copy there.
MISREAD_OFF = "xla_gpu_experimental_gemm_fusion_v2=false"
MISREAD = KnownFault(
    f"XLA may read an operand of a product in the wrong order; XLA_FLAGS=--{MISREAD_OFF} avoids it",
    "the page Verify, Known faults of compilers",
    ("gpu",),
    versions=("0.12.0", "0.12.0.1"),
)


def _has_two_bits(eqn: JaxprEqn) -> bool:
    values = (*eqn.invars, *eqn.outvars)
    return any(getattr(x.aval, "dtype", None) in (jnp.int2, jnp.uint2) for x in values)


# So it is in plain JAX (0.10.2 and 0.12.0.1), and XLA has no public issue about it.
# tests/jit/test_placed_after.py fails once it is fixed, and then this may go.
TWO_BITS = KnownFault(
    "XLA sends int2 and uint2 wrongly between CPU devices, or ends the process; int4 is right",
    "the page Verify, Known faults of compilers",
    ("cpu",),
    _has_two_bits,
)
KNOWN_FAULTS = (CONVOLVED, MISREAD, TWO_BITS)


def refuse_two_bits(name: str, traced: jax.stages.Traced) -> None:
    """Raises if the program, once compiled, sends what XLA sends wrongly between these devices."""
    if any(map(TWO_BITS.has, all_equations(traced.jaxpr))):
        lowered = traced.lower()
        on_cpus = TWO_BITS.is_on(devices_of_lowered(lowered)[0].platform)
        sent = on_cpus and _SENT.search(lowered.compile().as_text() or "")
        if sent:
            raise ValueError(
                f"use int4 or int8 on CPUs: {name} is compiled to {sent[1]} of 2-bit integers. "
                f"{TWO_BITS}"
            )


# An instruction that sends them, alone or among others.
_SENT = re.compile(
    r" = .*?\b[su]2\[.*? "
    r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|ragged-all-to-all)\("
)


def known_faults_in(program: Program, platform: str) -> Iterator[str]:
    """What compilers for this platform do wrongly with a program, and at which lines."""
    for fault in KNOWN_FAULTS:
        lines = {line_of(eqn): None for eqn in all_equations(program) if fault.has(eqn)}
        if lines and fault.is_on(platform):
            yield f"{fault.what}: {some([*lines])} ({fault.told})"
