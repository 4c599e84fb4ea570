"""What compilers are known to compile wrongly, without an error. `plan` and `verify` ask this
table, and docs/verify.md shows it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxlib.version import __version__ as VERSION

from ._compat import names
from ._programs import all_equations, line_of
from ._text import some


@dataclass(frozen=True)
class KnownFault:
    """`what` is wrong on these platforms, in these versions of jaxlib (in all, if there are none).
    `told` is where it can be read, and `has` tells whether an equation of a program is concerned.
    """

    what: str
    told: str
    platforms: tuple[str, ...]
    versions: tuple[str, ...]
    has: Callable[[Any], bool]

    def __str__(self) -> str:
        return f"{self.what} ({self.told})"

    def is_on(self, platform: str) -> bool:
        return platform in self.platforms and (not self.versions or VERSION in self.versions)


def _sums_by_group(eqn: Any) -> bool:
    """Whether it is the gradient of the weights of a grouped convolution."""
    is_convolution = eqn.primitive.name == names.CONVOLUTION
    return is_convolution and eqn.params[names.PARAM_BATCH_GROUPS] > 1


# So it is in plain JAX (0.10.2 and 0.12.0.1). XLA has no public issue about it;
# tests/plan/test_planning.py fails once it is fixed, and then this may go.
GROUPED = KnownFault(
    "XLA's gradient of the weights of a grouped convolution is wrong, or ends the process, if its "
    "rows are not split over all devices",
    "the page Layers, Grouped convolutions",
    ("cpu", "gpu", "tpu"),
    (),
    _sums_by_group,
)
# On an H100, with the pass that is on by default in these versions; the text of an issue is in
# tests/interpreter/xla_gpu_copy.md. An equation doesn't say whether its operand is copied.
MISREAD_OFF = "xla_gpu_experimental_gemm_fusion_v2=false"
MISREAD = KnownFault(
    f"XLA may read an operand of a product in the wrong order; XLA_FLAGS=--{MISREAD_OFF} avoids it",
    "the page Verify, Known faults of compilers",
    ("gpu",),
    ("0.12.0", "0.12.0.1"),
    lambda eqn: eqn.primitive.name == names.DOT,
)
KNOWN_FAULTS = (GROUPED, MISREAD)


def known_faults_in(program: Any, platform: str) -> Iterator[str]:
    """What compilers for this platform do wrongly with a program, and at which lines."""
    for fault in KNOWN_FAULTS:
        lines = {line_of(eqn): None for eqn in all_equations(program) if fault.has(eqn)}
        if lines and fault.is_on(platform):
            yield f"{fault.what}: {some([*lines])} ({fault.told})"
