"""The instructions that move data between devices, and those known not to."""

from .._errors import AuditError
from .hlo import Instruction
from .targets import LOCAL

# Opcodes, with their names in a report.
KINDS = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "ragged-all-to-all",
    "collective-permute": "collective-permute",
    "collective-broadcast": "broadcast",
    "send": "collective-permute",
}

# Those that combine their operands element by element.
ELEMENTWISE = frozenset(
    """
    abs add and atan2 cbrt ceil clamp compare complex concatenate cosine divide erf exponential
    exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply
    negate not or power real remainder round-nearest-afz round-nearest-even rsqrt select sign sine
    sqrt subtract tan tanh xor
    """.split()
)
_LOCAL = ELEMENTWISE | set(
    """
    acos acosh add-dependency after-all asin asinh atan atanh batch-norm-grad batch-norm-inference
    batch-norm-training bitcast bitcast-convert broadcast call cholesky conditional constant convert
    convolution copy cosh count-leading-zeros domain dot dynamic-reshape dynamic-slice
    dynamic-update-slice fft fusion gather get-dimension-size get-tuple-element iota map mulhi
    multiply-add opt-barrier optimization-barrier pad parameter partition-id popcnt ragged-dot
    reduce reduce-precision reduce-window replica-id reshape reverse rng rng-bit-generator
    rng-get-and-update-state scaled-dot scan scatter select-and-scatter set-dimension-size
    shift-left shift-right-arithmetic shift-right-logical sinh slice sort stochastic-convert topk
    transpose triangular-solve tuple while infeed outfeed async copy-start copy-done slice-start
    slice-done dynamic-slice-start dynamic-update-slice-start async-start async-update async-done
    """.split()
)


def opcode_of(x: Instruction) -> str:
    """The opcode without `-start` or `-done`."""
    return x.opcode.removesuffix("-start")


def moves(x: Instruction, local: frozenset[str]) -> str | None:
    """The kind of collective of an instruction, or None if it moves no data between devices.
    `local` are more targets of custom calls that don't.

    **Raises:**

    `AuditError` if it is unknown.
    """
    opcode = opcode_of(x)
    if opcode in KINDS:
        to_host = opcode == "send" and x.attribute("is_host_transfer") == "true"
        return None if to_host else KINDS[opcode]
    if opcode in _LOCAL:
        # A TPU's SparseCores run a part of the program in parallel, which is started by a call.
        is_local = x.opcode in _LOCAL or x.opcode == "call-start" or "calls" in x.attributes
        if "-start" in x.opcode and not is_local:
            raise AuditError(f"{x} starts something that is not understood")
        return None
    if opcode == "custom-call":
        _check_target(x, local)
        return None
    if opcode.endswith("-done") or opcode.endswith("-update"):
        start = x.operand(0).opcode
        if not start.endswith(("-start", "-update")) and start not in ("send", "recv"):
            raise AuditError(f"{x} waits for {x.operand(0)}, which starts nothing")
        return None
    if opcode == "recv":  # the other end of a send
        return None
    raise AuditError(
        f"{x}: the opcode {x.opcode!r} is not known, so it is not known either whether it moves "
        "data between devices"
    )


def _check_target(x: Instruction, local: frozenset[str]) -> None:
    target = x.target
    if target in local:
        return
    if target not in LOCAL:
        raise AuditError(
            f"{x} calls {target!r}, which is not in the program: it may move data between devices. "
            f"If it doesn't, pass local=({target!r},)"
        )
    settings = x.attribute("backend_config").replace(" ", "")
    if target == "tpu_custom_call" and '"has_communication":true' in settings:
        name = x.op_names[0] if x.op_names else "a kernel"
        raise AuditError(
            f"{x} ({name}) is a kernel that moves data between devices by itself. What it moves is "
            "not in the program; pass local=('tpu_custom_call',) to count everything else"
        )
