"""The instructions that move data between devices, and those known not to."""

import json

from .._errors import AuditError
from .hlo import Instruction
from .targets import LOCAL
from .values import target_of

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

_LOCAL = frozenset(
    """
    abs acos acosh add add-dependency after-all and asin asinh atan2 atan atanh batch-norm-grad
    batch-norm-inference batch-norm-training bitcast bitcast-convert broadcast call cbrt ceil
    cholesky clamp compare complex concatenate conditional constant convert convolution copy cosh
    cosine count-leading-zeros divide domain dot dynamic-reshape dynamic-slice
    dynamic-update-slice erf exponential exponential-minus-one fft floor fusion gather
    get-dimension-size get-tuple-element imag iota is-finite log log-plus-one logistic map maximum
    minimum mulhi multiply multiply-add negate not opt-barrier optimization-barrier or pad parameter
    partition-id popcnt power ragged-dot real reduce reduce-precision reduce-window remainder
    replica-id reshape reverse rng rng-bit-generator rng-get-and-update-state
    round-nearest-afz round-nearest-even rsqrt scaled-dot scan scatter select select-and-scatter
    set-dimension-size shift-left shift-right-arithmetic shift-right-logical sign sine sinh slice
    sort sqrt stochastic-convert subtract tan tanh topk transpose triangular-solve tuple while xor
    infeed outfeed async copy-start copy-done slice-start slice-done dynamic-slice-start
    dynamic-update-slice-start async-start async-update async-done
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
        return None if opcode == "send" and _to_host(x) else KINDS[opcode]
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


def _to_host(x: Instruction) -> bool:
    return x.attribute("is_host_transfer") == "true"


def _check_target(x: Instruction, local: frozenset[str]) -> None:
    target = target_of(x)
    if target in local:
        return
    if target not in LOCAL:
        raise AuditError(
            f"{x} calls {target!r}, which is not in the program: it may move data between devices. "
            f"If it doesn't, pass local=({target!r},)"
        )
    if target == "tpu_custom_call" and _communicates(x):
        name = x.op_names[0] if x.op_names else "a kernel"
        raise AuditError(
            f"{x} ({name}) is a kernel that moves data between devices by itself. What it moves is "
            "not in the program; pass local=('tpu_custom_call',) to count everything else"
        )


def _communicates(x: Instruction) -> bool:
    settings = x.attribute("backend_config") or "{}"
    try:
        config = json.loads(settings).get("custom_call_config", {})
    except json.JSONDecodeError:
        return '"has_communication":true' in settings.replace(" ", "")
    return bool(config.get("has_communication"))
