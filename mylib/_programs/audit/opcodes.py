"""What each opcode of a compiled program does: one row for each, which all analyses ask.

An opcode that has no row is an `AuditError` in each of them. `-start`, `-update` and `-done` are
forms of an opcode, and have its row.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal


class Likeness(IntEnum):
    """How much of its first operand an operation returns. Each level includes those above it."""

    NOTHING = 0
    PART = 1  # elements of it: some or all, in another order, or with others around them
    ELEMENTS = 2  # all of its elements, perhaps laid out otherwise, or as another type
    VALUE = 3  # the same array, perhaps of another shape or rounded
    MEMORY = 4  # the same array in the same memory


@dataclass(frozen=True)
class Meaning:
    """What an opcode does.

    **Attributes:**

    - `sends`: the kind of a collective, as in a report.
    - `calls`: how it runs the computations that it names: `"run"` one, whose parameters are its
        operands, and whose result is its own; a `"loop"`; a `"branch"` of several; `"each"` for
        pairs of elements, as a reduction. Empty if it names none.
    - `like`: how much of its first operand it returns.
    - `elementwise`: it combines its operands element by element.
    - `takes`: it reads only a part of its first operand.
    - `puts`: it writes only a part of its first operand: the number of the operand that is written.
    - `data`: how many of its operands are data; the others are indices.
    - `product`: what it returns is a product of its operands, or what a kernel makes of them.
    - `count`: the function of `products.py` that counts its products. `"unknown"` if they are not
        in the program; empty if there are none.
    - `free`: it does nothing by itself: it only names a value.
    - `lazy`: in a fusion, only what is used of its result is computed.
    - `outside`: its result is from outside the program.
    - `of_device`: its result is the device's own number.
    - `starts`: it has a form that runs beside others.
    - `requires`: the attributes that are always written. HLO leaves others out where they have
        their default.
    - `reserves`: it makes room for a result, and writes nothing there.
    - `window`: a part of a collective that the TPU's compiler has taken apart: its `"start"` or its
        `"end"`.
    - `gathers`: all its operands are parts of the result.
    - `workspace`: a library's call, whose last result is its workspace.
    - `kernel`: a kernel of its own, such as attention, and no plain product.
    """

    sends: str | None = None
    calls: Literal["", "run", "loop", "branch", "each"] = ""
    like: Likeness = Likeness.NOTHING
    elementwise: bool = False
    takes: bool = False
    puts: int | None = None
    data: int | None = None
    product: bool = False
    count: str = ""
    free: bool = False
    lazy: bool = False
    outside: bool = False
    of_device: bool = False
    starts: bool = False
    requires: tuple[str, ...] = ()
    reserves: bool = False
    window: Literal["", "start", "end"] = ""
    gathers: bool = False
    workspace: bool = False
    kernel: bool = False

    @property
    def works(self) -> bool:
        """Whether it computes while something is being sent."""
        return self.product or self.calls in ("run", "loop", "branch")


def rows(names: str, *requires: str, **columns: Any) -> dict[str, Meaning]:
    """A row for each of these names."""
    return dict.fromkeys(names.split(), Meaning(requires=requires, **columns))


def _sends(name: str, *requires: str, kind: str = "", **columns: Any) -> dict[str, Meaning]:
    return rows(name, *requires, sends=kind or name, starts=True, **columns)


_MEMORY: dict[str, Any] = dict(like=Likeness.MEMORY, free=True)
_PERMUTES: dict[str, Any] = dict(kind="collective-permute", like=Likeness.PART)

OPCODES: dict[str, Meaning] = {
    # Between devices.
    **_sends("all-reduce", "replica_groups", calls="each"),
    **_sends("reduce-scatter", "replica_groups", "dimensions", calls="each"),
    **_sends("all-gather", "replica_groups", "dimensions", like=Likeness.PART),
    **_sends("all-to-all", "replica_groups", like=Likeness.PART, gathers=True),
    **_sends("ragged-all-to-all", "replica_groups"),
    **_sends("collective-broadcast", "replica_groups", kind="broadcast"),
    **_sends("collective-permute", "source_target_pairs", **_PERMUTES),
    **_sends("send", kind="collective-permute"),
    # Of another device or of the host: `send` is where the two are told apart.
    **rows("recv", outside=True, free=True),
    # Computations.
    **rows("fusion", "kind", calls="run", starts=True),
    **rows("call async", calls="run", starts=True),
    **rows("while", calls="loop"),
    **rows("conditional", calls="branch"),
    # Values that are only named.
    **rows("parameter constant tuple", free=True),
    **rows("get-tuple-element", "index", free=True),
    **rows("partition-id replica-id", free=True, of_device=True),
    **rows("add-dependency after-all domain opt-barrier optimization-barrier", **_MEMORY),
    **rows("bitcast", lazy=True, **_MEMORY),
    # What moves, or takes apart.
    **rows("copy", like=Likeness.VALUE, starts=True),
    **rows("convert", like=Likeness.VALUE, lazy=True),
    **rows("reshape", like=Likeness.VALUE),
    **rows("bitcast-convert reduce-precision", like=Likeness.ELEMENTS),
    **rows("transpose", "dimensions", like=Likeness.ELEMENTS),
    **rows("reverse", like=Likeness.PART),
    **rows("pad", "padding", like=Likeness.PART, lazy=True, data=2),
    **rows("slice", "slice", like=Likeness.PART, takes=True, starts=True),
    **rows("dynamic-slice", like=Likeness.PART, takes=True, starts=True, data=1),
    **rows("gather", takes=True, data=1),
    **rows("dynamic-update-slice", puts=1, starts=True, data=2),
    **rows(
        "scatter", "update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims",
        "index_vector_dim", calls="each", puts=-1,
    ),
    # Element by element.
    **rows(
        """
        abs add and atan2 cbrt ceil clamp complex cosine divide erf exponential
        exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum negate
        not or power real remainder round-nearest-afz round-nearest-even rsqrt select sign sine sqrt
        subtract tan tanh xor
        """,
        elementwise=True,
    ),
    **rows("multiply", elementwise=True, count="multiplied"),
    **rows("compare", "direction", elementwise=True),
    # Each element is one of an operand's.
    **rows("concatenate", "dimensions", elementwise=True, gathers=True),
    # Products.
    **rows("dot", "lhs_contracting_dims", "rhs_contracting_dims", product=True, count="dot"),
    **rows("scaled-dot", "lhs_contracting_dims", product=True, count="dot"),
    **rows("convolution", "dim_labels", product=True, count="convolution"),
    # How many rows each group has isn't in the program.
    **rows("ragged-dot", product=True, count="unknown"),
    # Decompositions of matrices.
    **rows("cholesky triangular-solve", count="unknown"),
    # Others that stay on their device.
    **rows("broadcast", "dimensions"),
    **rows("reduce", "dimensions", calls="each", count="reduced"),
    **rows("reduce-window select-and-scatter map sort scan", calls="each"),
    **rows("infeed rng", outside=True),
    **rows(
        """
        acos acosh asin asinh atan atanh batch-norm-grad batch-norm-inference batch-norm-training
        count-leading-zeros cosh dynamic-reshape fft get-dimension-size iota mulhi multiply-add
        outfeed popcnt rng-bit-generator rng-get-and-update-state set-dimension-size shift-left
        shift-right-arithmetic shift-right-logical sinh stochastic-convert topk
        """
    ),
}  # fmt: skip

# The kinds of collectives.
KINDS = tuple(dict.fromkeys(row.sends for row in OPCODES.values() if row.sends))
