"""Random programs for each pair of an opcode and a dtype, and what becomes of them: compiled for
the CPU, by `run_here`, and by JAX. `--seeds 0-3` is run by hand, with 8 simulated devices, and
prints a table.
"""

import argparse
import collections
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import mylib
from mylib._core.compat import hlo
from mylib._programs.audit import HloModule
from mylib._programs.interpreter.here import run_text
from mylib.testing import run_here

# Without int2 and uint2: XLA ends the process when it compiles a concatenation of them for a CPU;
# and without float4_e2m1fn and float8_e8m0fnu, whose range next to each result leaves.
DTYPES = """
    bool int4 int8 int16 int32 int64 uint4 uint8 uint16 uint32 uint64 bfloat16
    float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz
    float8_e5m2 float8_e5m2fnuz float16 float32 float64 complex64 complex128
""".split()
ODD = (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0)


@dataclass
class Draw:
    """Draws operands of a dtype."""

    dtype: Any
    random: np.random.Generator

    def __init__(self, dtype: str, seed: int):
        self.dtype, self.random = jnp.dtype(dtype), np.random.default_rng(seed)

    def shape(self, rank: int) -> tuple[int, ...]:
        return tuple(self.random.integers(1, 6, rank).tolist())

    def array(self, shape: Sequence[int] = (4, 6), odd: bool = True, dtype: Any = None) -> Any:
        """Among floating-point numbers are NaN and infinite ones, if `odd`; among others the ends
        of their range.
        """
        dtype, random = jnp.dtype(dtype or self.dtype), self.random
        if jnp.issubdtype(dtype, jnp.complexfloating):
            real, imag = (self.array(shape, False, jnp.float32) for _ in range(2))
            return (real + 1j * imag).astype(dtype)
        if jnp.issubdtype(dtype, jnp.bool_):
            return random.integers(0, 2, shape).astype(bool)
        if jnp.issubdtype(dtype, jnp.integer):
            ends = jnp.iinfo(dtype)
            low, high = max(int(ends.min), -9), min(int(ends.max), 9)
            small = random.integers(low, high, shape, endpoint=True)
            choice = random.integers(0, 8 if odd else 1, shape)
            numbers = np.select([choice == 6, choice == 7], [int(ends.min), 0], small).astype(dtype)
            return np.where(choice == 5, np.array(ends.max, dtype), numbers)
        # Those of a short type must not leave its range on the way.
        numbers = (random.normal(size=shape) * (0.5 if dtype in NO_ODD else 2)).astype(dtype)
        if odd and dtype not in NO_ODD:
            rare = random.integers(0, 4, shape) == 0
            rare |= np.arange(np.prod(shape, dtype=int)).reshape(shape) == 0  # at least one
            numbers = np.where(rare, random.choice(np.array(ODD).astype(dtype), shape), numbers)
        return numbers

    def small(self, shape: Sequence[int] = (4, 6)) -> Any:
        return self.array(shape, False)

    def ids(self, shape: Sequence[int], high: int, low: int = 0) -> Any:
        return self.random.integers(low, high, shape).astype(np.int32)


# They have neither NaN nor infinite numbers, or don't tell them apart.
NO_ODD = {jnp.dtype(x) for x in DTYPES if x.startswith("float8")}
Made = tuple[Callable[..., Any], Sequence[Any]]
PROGRAMS: dict[str, Callable[[Draw], Made]] = {}


def program(*opcodes: str) -> Any:
    def keep(make: Callable[..., Made]) -> Any:
        for opcode in opcodes:
            PROGRAMS[opcode] = make if len(opcodes) == 1 else partial(make, opcode=opcode)
        return make

    return keep


UNARY = {
    "abs": lax.abs, "cbrt": lax.cbrt, "ceil": lax.ceil,
    "cosine": lax.cos, "count-leading-zeros": lax.clz, "erf": lax.erf, "exponential": lax.exp,
    "exponential-minus-one": lax.expm1, "floor": lax.floor, "imag": lax.imag,
    "is-finite": lax.is_finite, "log": lax.log, "log-plus-one": lax.log1p,
    "negate": lax.neg, "not": lax.bitwise_not,
    "opt-barrier": lax.optimization_barrier, "popcnt": lax.population_count, "real": lax.real,
    "round-nearest-afz": lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO),
    "round-nearest-even": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
    "rsqrt": lax.rsqrt, "sign": lax.sign, "sine": lax.sin, "sqrt": lax.sqrt, "tan": lax.tan,
    "tanh": lax.tanh, "tuple": lambda x: (x, x),
}  # fmt: skip
BINARY = {
    "add": lax.add, "and": lax.bitwise_and, "atan2": lax.atan2, "complex": lax.complex,
    "divide": lax.div, "maximum": lax.max, "minimum": lax.min, "multiply": lax.mul,
    "or": lax.bitwise_or, "power": lax.pow, "remainder": lax.rem, "subtract": lax.sub,
    "xor": lax.bitwise_xor, "shift-left": lax.shift_left,
    "shift-right-arithmetic": lax.shift_right_arithmetic,
    "shift-right-logical": lax.shift_right_logical,
}  # fmt: skip


@program(*UNARY)
def unary(draw: Draw, opcode: str) -> Made:
    odd = not jnp.issubdtype(draw.dtype, jnp.complexfloating)
    return UNARY[opcode], [draw.array(draw.shape(2), odd)]


@program(*BINARY)
def binary(draw: Draw, opcode: str) -> Made:
    shape = draw.shape(2)
    return BINARY[opcode], [draw.array(shape, "shift" not in opcode), draw.array(shape)]


@program("reduce-precision")
def reduce_precision(draw: Draw) -> Made:
    info = jnp.finfo(draw.dtype)
    return lambda x: lax.reduce_precision(x, info.nexp, info.nmant), [draw.array()]


@program("compare")
def compare(draw: Draw) -> Made:
    orders = (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge, lax.eq_to_p.bind, lax.lt_to_p.bind)
    if jnp.issubdtype(draw.dtype, jnp.complexfloating):
        orders = orders[:2]
    return lambda x, y: [order(x, y) for order in orders], [draw.array(), draw.array()]


@program("select")
def select(draw: Draw) -> Made:
    which = draw.array((4, 6), dtype=bool)
    chosen = lambda which, x, y: (lax.select(which, x, y), lax.select(which[0, 0], x, y))  # noqa: E731
    return chosen, [which, draw.array(), draw.array()]


@program("clamp")
def clamp(draw: Draw) -> Made:
    return lax.clamp, [draw.array(()), draw.array(), draw.array(())]


@program("convert")
def convert(draw: Draw) -> Made:
    def to_all(x: Any) -> Any:
        return [lax.convert_element_type(x, dtype) for dtype in others]

    # A complex number is no other.
    is_complex = jnp.issubdtype(draw.dtype, jnp.complexfloating)
    others = [x for x in DTYPES if not is_complex or x.startswith("complex")]
    others = [x for x in others if not x.startswith("float8")] + [draw.dtype]
    return to_all, [draw.array()]


@program("bitcast-convert")
def bitcast_convert(draw: Draw) -> Made:
    bits = 8 * draw.dtype.itemsize
    if draw.dtype.kind == "V" and jnp.issubdtype(draw.dtype, jnp.integer):
        bits = jnp.iinfo(draw.dtype).bits
    targets = [f"{sign}int{n}" for sign in ("", "u") for n in {bits, 8}]
    return lambda x: [lax.bitcast_convert_type(x, y) for y in targets], [draw.array()]


@program("broadcast")
def broadcast(draw: Draw) -> Made:
    return lambda x: lax.broadcast_in_dim(x, (3, 4, 2, 6), (1, 3)), [draw.array()]


@program("reshape")
def reshape(draw: Draw) -> Made:
    return lambda x: lax.reshape(x, (3, 8)), [draw.array()]


@program("transpose")
def transpose(draw: Draw) -> Made:
    return lambda x: lax.transpose(x, (2, 0, 1)), [draw.array(draw.shape(3))]


@program("iota")
def iota(draw: Draw) -> Made:
    return lambda x: x + lax.broadcasted_iota(draw.dtype, (4, 6), 1), [draw.small()]


@program("slice")
def slice_(draw: Draw) -> Made:
    return lambda x: lax.slice(x, (1, 0), (4, 6), (2, 3)), [draw.array()]


@program("concatenate")
def concatenate(draw: Draw) -> Made:
    return lambda x, y: lax.concatenate([x, y], 1), [draw.array(), draw.array((4, 3))]


@program("reverse")
def reverse(draw: Draw) -> Made:
    return lambda x: lax.rev(x, (1,)), [draw.array()]


@program("pad")
def pad(draw: Draw) -> Made:
    return lambda x, y: lax.pad(x, y, [(1, 2, 1), (-1, 2, 0)]), [draw.array(), draw.array(())]


@program("dynamic-slice")
def dynamic_slice(draw: Draw) -> Made:
    starts = draw.ids((2,), 8, -8)
    return lambda x, i: lax.dynamic_slice(x, (i[0], i[1]), (2, 3)), [draw.array(), starts]


@program("dynamic-update-slice")
def dynamic_update_slice(draw: Draw) -> Made:
    put = lambda x, y, i: lax.dynamic_update_slice(x, y, (i[0], i[1]))  # noqa: E731
    return put, [draw.array(), draw.array((2, 3)), draw.ids((2,), 8, -8)]


@program("gather")
def gather(draw: Draw) -> Made:
    def picked(x: Any, i: Any) -> Any:
        return x[i], jnp.take_along_axis(x, i[:, None], 1), x.at[i, i].get(mode="clip")

    return picked, [draw.array(), draw.ids((4,), 4)]


def mixed(a: Any, b: Any) -> Any:
    """Combines two of any numbers, so that the order in which more are combined is the same."""
    if jnp.issubdtype(a.dtype, jnp.bool_):
        return lax.bitwise_xor(a, b)
    return lax.add(lax.add(a, b), lax.mul(a, b))


def combiners(dtype: Any) -> list[Callable[..., Any]]:
    if jnp.issubdtype(dtype, jnp.bool_):
        return [lax.bitwise_and, lax.bitwise_or, mixed]
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return [lax.add, lax.mul, mixed]
    integer = jnp.issubdtype(dtype, jnp.integer)
    return [lax.add, lax.mul, lax.max, lax.min, *[lax.bitwise_xor] * integer, mixed]


@program("reduce")
def reduce(draw: Draw) -> Made:
    def pair(a: Any, b: Any) -> Any:
        return mixed(a[0], b[0]), jnp.minimum(a[1], b[1])

    def reduced(x: Any, start: Any) -> Any:
        ways = [lax.reduce(x, start, how, (1,)) for how in combiners(draw.dtype)]
        is_complex = jnp.issubdtype(draw.dtype, jnp.complexfloating)
        both = () if is_complex else lax.reduce((x, x), (start, start), pair, (0,))
        return ways, both

    return reduced, [draw.small((4, 5)), draw.small(())]


@program("reduce-window")
def reduce_window(draw: Draw) -> Made:
    random = draw.random
    size, stride, holes, dilation = (tuple(random.integers(1, n, 2).tolist()) for n in (4, 3, 3, 3))
    pads = [tuple(random.integers(0, 3, 2).tolist()) for _ in range(2)]
    # What XLA does with numbers around the array is defined for such starts only.
    neutral = {lax.mul: 1, lax.bitwise_and: True}

    def windows(x: Any) -> Any:
        return [
            lax.reduce_window(
                x, jnp.asarray(start_of(how, draw.dtype, neutral)), how, size, stride, pads, holes,
                dilation,
            )
            for how in combiners(draw.dtype)
        ]  # fmt: skip

    return windows, [draw.small((5, 6))]


def start_of(how: Any, dtype: Any, neutral: Any) -> Any:
    if how in (lax.max, lax.min):
        sign = 1 if how is lax.min else -1
        if jnp.issubdtype(dtype, jnp.integer):
            ends = jnp.iinfo(dtype)
            return np.array(ends.max if sign > 0 else ends.min, dtype)
        return np.array(sign * float(jnp.finfo(dtype).max), dtype)
    return np.array(neutral.get(how, 0), dtype)


@program("select-and-scatter")
def select_and_scatter(draw: Draw) -> Made:
    if not jnp.issubdtype(draw.dtype, jnp.floating):
        raise TypeError("whole numbers have no gradient")
    size, stride = (1, 2), (1, int(draw.random.integers(1, 3)))

    def gradient(x: Any, y: Any) -> Any:
        largest = lambda x: lax.reduce_window(  # noqa: E731
            x, np.array(-np.inf, draw.dtype), lax.max, size, stride, "VALID"
        )
        result, back = jax.vjp(largest, x)
        return back(y[: result.shape[0], : result.shape[1]])

    return gradient, [draw.small((4, 6)), draw.small((4, 6))]


@program("scatter")
def scatter(draw: Draw) -> Made:
    kind = draw.dtype
    if jnp.issubdtype(kind, jnp.bool_):
        ways = ["min", "max"]
    elif jnp.issubdtype(kind, jnp.complexfloating):
        ways = ["add", "multiply"]
    else:
        ways = ["add", "multiply", "min", "max"]

    def put(x: Any, i: Any, rows: Any, numbers: Any) -> Any:
        i = jnp.where(i < 0, 9, i)  # what is beside the array is left out
        row = jax.vmap(lambda x, i, v: x.at[i].set(v, mode="drop"))
        return [
            *(getattr(x.at[i], way)(rows, mode="drop") for way in ways),
            x.at[i].apply(lambda v: mixed(v, v)),
            x.at[i, 1].set(numbers[0, 0]),
            x.at[:, i[:3]].set(numbers),
            row(x, i[:4, None], numbers),
        ]

    return put, [draw.small((4, 6)), draw.ids((7,), 6, -2), draw.small((7, 6)), draw.small((4, 1))]


@program("sort")
def sort(draw: Draw) -> Made:
    return lambda x: (lax.sort(x, 1), jnp.argsort(x, 0)), [draw.array((4, 6))]


@program("topk")
def topk(draw: Draw) -> Made:
    return lambda x: lax.top_k(x, int(draw.random.integers(1, 7))), [draw.array((4, 6))]


@program("dot")
def dot(draw: Draw) -> Made:
    whole, wider = jnp.issubdtype(draw.dtype, jnp.integer), wider_than(draw.dtype)

    def products(x: Any, y: Any) -> Any:
        plain = (((1,), (0,)), ((), ()))
        batched = (((2,), (2,)), ((0,), (0,)))
        own = lax.dot_general(x, y, plain, preferred_element_type=draw.dtype)
        more = lax.dot_general(x, y, plain, preferred_element_type=wider)
        x3, y3 = x.reshape(2, 2, 6), y.reshape(2, 3, 6)[:, :2]
        return own, more, lax.dot_general(x3, y3, batched, preferred_element_type=wider)

    return products, [draw.array((4, 6), whole), draw.array((6, 6), whole)]


def wider_than(dtype: Any) -> Any:
    is_short = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 32
    return jnp.int32 if is_short else dtype


@program("convolution")
def convolution(draw: Draw) -> Made:
    whole, wider = jnp.issubdtype(draw.dtype, jnp.integer), wider_than(draw.dtype)
    how = dict(window_strides=(2,), padding=[(1, 2)], rhs_dilation=(2,))

    def convolved(x: Any, w: Any) -> Any:
        return [
            lax.conv_general_dilated(x, w, **how, preferred_element_type=dtype)
            for dtype in {draw.dtype, jnp.dtype(wider)}
        ]

    return convolved, [draw.array((2, 3, 8), whole), draw.array((4, 3, 3), whole)]


@program("while")
def loop(draw: Draw) -> Made:
    def run(x: Any, n: Any) -> Any:
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, mixed(c[1], x)), (0, x))

    return run, [draw.small(), draw.ids((), 3)]


@program("conditional")
def conditional(draw: Draw) -> Made:
    branches = [lambda x, y: x, lambda x, y: y, mixed]
    chosen = lambda i, *xs: lax.switch(i, branches, *xs)  # noqa: E731
    return chosen, [draw.ids((), 6, -2), draw.small(), draw.small()]


@program("call")
def call(draw: Draw) -> Made:
    inner = jax.jit(lambda x: lax.select(jnp.ones(x.shape, bool), x, x), inline=False)
    return lambda x: (inner(x), inner(x[:2])), [draw.array()]


DEVICES = 4


SENT = {
    "all-reduce": lambda x: (lax.psum(x, "d"), lax.pmax(x, "d")),
    "reduce-scatter": lambda x: lax.psum_scatter(x, "d", tiled=True),
    "all-gather": lambda x: lax.all_gather(x, "d", tiled=True, axis=1),
    "all-to-all": lambda x: lax.all_to_all(x, "d", 0, 1, tiled=True),
    "collective-permute": lambda x: lax.ppermute(x, "d", [(0, 1), (1, 3), (2, 2)]),
}  # fmt: skip
NUMBERS = {"partition-id": lambda x: x + lax.axis_index("d").astype(x.dtype)}


@program(*SENT, *NUMBERS)
def sent(draw: Draw, opcode: str) -> Made:
    f = (SENT | NUMBERS)[opcode]
    if opcode == "all-reduce" and jnp.issubdtype(draw.dtype, jnp.complexfloating):
        f = lambda x: lax.psum(x, "d")  # noqa: E731
    mesh = Mesh(jax.devices()[:DEVICES], "d")
    rows = P("d")
    on_devices = jax.shard_map(f, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    return on_devices, [draw.small((16, 6))]


def unoptimised(lowered: Any) -> str:
    options = hlo.HloPrintOptions()
    options.print_large_constants, options.print_metadata = True, False
    return lowered.compiler_ir("hlo").as_hlo_module().to_string(options)


def outcome(opcode: str, dtype: str, seed: int) -> str:
    """`"right"`; or who refuses the program (JAX, XLA, or `"refused"`), and why; `"absent"` if it
    has no such opcode; or what is `"WRONG"`.
    """
    with jax.enable_x64(True):
        try:
            f, args = PROGRAMS[opcode](Draw(dtype, seed))
            lowered = jax.jit(f).lower(*map(jnp.asarray, args))
        except (TypeError, ValueError, NotImplementedError) as error:
            return f"JAX: {error}"
        text = unoptimised(lowered)
        try:
            compiled = lowered.compile()
            wanted = jax.tree.leaves(compiled(*map(jnp.asarray, args)))
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            return f"XLA: {error}"
        module = HloModule(text)
        if opcode not in {x.does for x in module.instructions()}:
            return "absent: JAX lowers it to others"
    found = {}
    try:
        found["compiled"] = jax.tree.leaves(run_here(compiled, *args))
        # XLA changes programs of types smaller than a byte before it runs them.
        if opcode not in (*SENT, *NUMBERS) and not dtype.endswith(("int2", "int4")):
            one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            results = [(x.shape, one) for x in wanted]
            given = [(np.asarray(x), one) for x in args]
            with jax.enable_x64(True):
                found["unoptimised"] = run_text(text, given, results)
    except mylib.errors.AuditError as error:
        return f"refused: {error}"
    for name, results in found.items():
        for a, b in zip(results, wanted, strict=True):
            if not agree(np.asarray(a), np.asarray(b)):
                return f"WRONG, {name}: {str(a.tolist())[:300]} for {str(b.tolist())[:300]}"
    return "right"


def agree(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether float64's numbers are another dtype's but for its rounding."""
    if not jnp.issubdtype(b.dtype, jnp.inexact):
        return bool(np.array_equal(np.asarray(a).astype(b.dtype), b))
    info = jnp.finfo(b.dtype)
    wide = np.complex128 if np.iscomplexobj(b) else np.float64
    a, b = np.asarray(a, wide), np.asarray(b).astype(wide)
    with np.errstate(all="ignore"):
        # Some have no infinite numbers.
        beyond = float(np.array(np.inf).astype(info.dtype))
        a = np.where(np.abs(a) > float(info.max), np.sign(a) * beyond, a)
        b = np.where(np.abs(b) >= float(info.max), np.sign(b) * np.inf, b)
        near = np.abs(a - b) <= 64 * float(info.eps) * np.maximum(np.abs(b), 1)
    return bool(np.all(near | (a == b) | (np.isnan(a) & np.isnan(b))))


def table(seeds: range, dtypes: Sequence[str]) -> str:
    """For each opcode the dtypes of each outcome."""
    lines = ["| opcode | outcome | dtypes |", "|---|---|---|"]
    for opcode in PROGRAMS:
        found: dict[str, dict[str, None]] = collections.defaultdict(dict)
        for dtype in dtypes:
            for seed in seeds:
                text = outcome(opcode, dtype, seed)
                found[text if text.startswith("WRONG") else text.partition(":")[0]][dtype] = None
        lines += [f"| {opcode} | {key} | {' '.join(names)} |" for key, names in found.items()]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-0", help="from and to, as in 0-3")
    parser.add_argument("--dtypes", default=" ".join(DTYPES))
    args = parser.parse_args()
    first, last = map(int, args.seeds.split("-"))
    text = table(range(first, last + 1), args.dtypes.split())
    print(text)
    return "WRONG" in text


if __name__ == "__main__":
    sys.exit(main())
