"""Which dimensions of a program's arrays must be split alike, and what is computed and summed.

A program is traced once, without a mesh or a compiler. Dimensions that an operation maps to each
other are joined; what remains are groups, and a mesh axis is assigned to a group, not to an array.
What the program computes, sums and holds is noted with its dimensions, so that any assignment is
priced in milliseconds.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from string import ascii_lowercase
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._compat import names, opened
from .._products import flops_of_kernel, products_of_equation
from .._programs import (
    KERNEL,
    is_on_host,
    jaxprs_in,
    kernel_of,
    line_of,
    loop_of,
    only_calls_back,
)
from .dims import Dims, Nodes
from .equations import (
    Equation,
    bytes_of,
    equations_of,
    is_kept,
    is_literal,
    is_of_plan,
    shape_of,
)


@dataclass(eq=False)
class Place:
    """The body of a loop, or the program outside of loops, whose `number` is 0. It runs as many
    `times` in a call. `outside` is the number of the place where the loop is.
    """

    number: int = 0
    times: int = 1
    outside: int = 0


@dataclass(eq=False)
class Event:
    """Something that takes time, with the dimensions that divide it.

    - `place`: where it happens.
    - `dims`: the nodes that divide `amount`.
    - `over`: the nodes that are summed over, or needed whole.
    """

    place: Place
    amount: float
    dims: Nodes
    over: Nodes = ()


@dataclass(eq=False)
class Product(Event):
    """A product: `amount` is in FLOPs, and `operands` are what it reads and writes, as bytes and
    their nodes.
    """

    dtype: str = ""
    operands: tuple[tuple[int, Nodes], ...] = ()


@dataclass(eq=False)
class Sum(Event):
    """A sum of as many bytes. Sums that are added to each other first are summed together:
    `first` is one of them. `scattered` if the result is constrained to where weights are kept.
    `after` is where it is all-reduced: outside of loops whose iterations only add to it.
    """

    number: int = 0
    first: "Sum | None" = None
    scattered: bool = False
    after: Place = field(default_factory=Place)

    @property
    def root(self) -> "Sum":
        return self if self.first is None else self.first.root


class Scope(NamedTuple):
    """A jaxpr that was read: its equations, and when each begins and ends; its results; the
    dimensions of its arrays; when it ends; `times` is how often it runs in a
    call; `top` if it is outside of loops and layers.
    """

    moments: Sequence[tuple[Equation, int, int]]
    returned: set[Any]
    nodes: Mapping[Any, Nodes]
    end: int
    times: int
    top: bool


@dataclass(eq=False)
class Reading:
    """What a jaxpr computes.

    - `inputs`, `results`: the nodes of its arguments and results.
    - `places`: its loops, by their number.
    - `products`, `sums`: its products, and its sums over dimensions.
    - `moves`: weights that are gathered where a layer is called.
    - `whole`: dimensions that an operation needs whole.
    - `offloads`: what is copied to the host's memory, and back.
    - `scopes`: its jaxprs, from which follows what it holds.
    - `loops`: the first dimensions of what loops iterate over.
    - `origins`: for each name of `jax.ad_checkpoint.checkpoint_name`, the arguments that the named
        arrays are, by their number.
    - `named`: for each such name the bytes of the array.
    - `undivided`: dimensions of which parts can't be computed each by itself, as if it were all:
        what an operation takes and doesn't return, a constant's, and those along which it matters
        where a number is.
    - `unknown`: primitives whose dimensions are unknown, with a line that has them.
    - `placed`: the shardings on meshes of the step's own that it constrains arrays to.
    - `counted_once`: the lines of loops whose length depends on data.
    - `kernels`: the names of kernels, with the dimensions of their operands.
    - `alone`: kernels that are known, and that compilers can't split, with a line that has them.
    - `unpriced`: the lines of kernels of which it is unknown what they compute.
    - `grouped`: the lines of gradients of the weights of grouped convolutions, and the dimension of
        rows that each sums over.
    """

    dims: Dims = field(default_factory=Dims)
    inputs: list[Nodes] = field(default_factory=list)
    results: list[Nodes] = field(default_factory=list)
    places: list[Place] = field(default_factory=lambda: [Place()])
    products: list[Product] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    moves: list[Event] = field(default_factory=list)
    whole: list[Event] = field(default_factory=list)
    offloads: list[Event] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)
    loops: set[int] = field(default_factory=set)
    origins: dict[str, int | None] = field(default_factory=dict)
    named: dict[str, Event] = field(default_factory=dict)
    undivided: list[int] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    placed: list[Any] = field(default_factory=list)
    counted_once: list[str] = field(default_factory=list)
    kernels: list[tuple[str, list[Nodes]]] = field(default_factory=list)
    alone: dict[str, str] = field(default_factory=dict)
    unpriced: list[str] = field(default_factory=list)
    grouped: list[tuple[str, int]] = field(default_factory=list)


def program_of(closed: Any) -> Reading:
    """Reads a closed jaxpr."""
    reader = _Reader()
    jaxpr = opened(closed)
    program = reader.program
    program.inputs = [reader.fresh(var.aval) for var in jaxpr.invars]
    operands = [_Operand(nodes, origin=i) for i, nodes in enumerate(program.inputs)]
    results = reader.through(jaxpr, operands, program.places[0], top=True)
    program.results = [x.nodes for x in results]
    return program


@dataclass
class _Operand:
    """What is known about an operand: the sum that it is, the argument, and in the body of a loop
    the number of the carried value that it is, plus sums, if nothing else uses that.
    """

    nodes: Nodes
    sum: Sum | None = None
    origin: int | None = None
    carried: int | None = None


class _Reader:
    def __init__(self) -> None:
        self.program = Reading()
        self.dims = self.program.dims
        self.clock = 0

    def fresh(self, aval: Any) -> Nodes:
        return self.dims.new(shape_of(aval))

    def constant(self, var: Any) -> _Operand:
        nodes = self.fresh(var.aval)
        self.program.undivided += nodes
        return _Operand(nodes)

    def through(
        self,
        jaxpr: Any,
        operands: Sequence[_Operand],
        place: Place,
        top: bool = False,
    ) -> list[_Operand]:
        """Walks through a jaxpr with these arguments; its results."""
        # Not `followed` of `_programs`, which opens no calls: the uses of a value are counted over
        # all equations, and when each begins and ends tells what is held at the same time. By way
        # of it this would be as long, and as fast: 1.00 of the time for a transformer of 4 layers.
        values = dict(zip(jaxpr.invars, operands, strict=True))
        values |= {var: self.constant(var) for var in jaxpr.constvars}

        def read(var: Any) -> _Operand:
            if is_literal(var):
                return self.constant(var)
            value = values[var]
            # If a turn also uses what it adds to, the sum is needed in each turn.
            is_used_once = value.carried is None or uses[var] == 1
            return value if is_used_once else replace(value, carried=None)

        eqns, results = equations_of(jaxpr)
        used = itertools.chain(results, *(eqn.invars for eqn in eqns))
        uses = Counter(var for var in used if not is_literal(var))
        moments: list[tuple[Equation, int, int]] = []
        for eqn in eqns:
            self.clock += 1
            start = self.clock
            ins = [read(var) for var in eqn.invars]
            apply = _Apply(self, eqn, ins, place, top)
            values.update(zip(eqn.outvars, apply.results(), strict=True))
            moments.append((eqn, start, self.clock))
        returned = {var for var in results if not is_literal(var)}
        nodes = {var: value.nodes for var, value in values.items()}
        self.program.scopes.append(Scope(moments, returned, nodes, self.clock, place.times, top))
        return [read(var) for var in results]


class _Apply:
    """Joins the dimensions of one operation."""

    def __init__(
        self, reader: _Reader, eqn: Equation, ins: list[_Operand], place: Place, top: bool
    ):
        self.reader, self.program, self.dims = reader, reader.program, reader.dims
        self.eqn, self.ins, self.place, self.top = eqn, ins, place, top
        self.in_avals = [var.aval for var in eqn.invars]
        self.out_avals = [var.aval for var in eqn.outvars]
        self.outs = [_Operand(reader.fresh(aval)) for aval in self.out_avals]

    def results(self) -> list[_Operand]:
        rule = _RULES.get(self.eqn.name)
        if rule is not None:
            rule(self)
        elif self.eqn.name not in names.SHOWS:
            self.unknown()
        if self.eqn.name in names.SAME_NUMBERS and self._keeps_bytes():
            self.outs[0].sum = self.ins[0].sum
        self.program.undivided += self.ends()
        return self.outs

    def ends(self) -> list[int]:
        """The dimensions that no result has, what is made of these, and where places matter."""
        group = self.dims.group
        taken, returned = (
            {group(node): node for x in side for node in x.nodes if self.dims.parts(node) > 1}
            for side in (self.ins, self.outs)
        )
        ends = [node for x, node in taken.items() if x not in returned]
        if ends:
            ends += [node for x, node in returned.items() if x not in taken]
        places = _PLACES.get(self.eqn.name)
        return ends if places is None else [*ends, *places(self)]

    def unknown(self) -> None:
        self.program.unknown.setdefault(self.eqn.name, _line(self.eqn))

    def param(self, name: str) -> Any:
        return self.eqn.params[name]

    def shape(self, i: int) -> tuple[int, ...]:
        return shape_of(self.in_avals[i])

    def _keeps_bytes(self) -> bool:
        return bytes_of(self.out_avals[0]) == bytes_of(self.in_avals[0])

    def sum_over(self, over: Iterable[int]) -> None:
        sums, out, size = self.program.sums, self.outs[0], bytes_of(self.out_avals[0])
        out.sum = Sum(self.place, size, out.nodes, tuple(over), len(sums), after=self.place)
        sums.append(out.sum)

    def product(self, flops: float, over: Nodes) -> None:
        """A product of the first two operands, which sums over some dimensions."""
        dtype = max((x.dtype for x in self.in_avals[:2]), key=lambda x: x.itemsize)
        self._computes(flops, (*self.outs[0].nodes, *over), dtype, over)
        self.sum_over(over)

    def _computes(self, flops: float, dims: Nodes, dtype: Any, over: Nodes = ()) -> None:
        avals, values = (*self.in_avals, *self.out_avals), (*self.ins, *self.outs)
        operands = tuple((bytes_of(a), x.nodes) for a, x in zip(avals, values, strict=True))
        self.program.products.append(Product(self.place, flops, dims, over, str(dtype), operands))

    # --- each method below is the rule of some primitives ---

    def dot(self) -> None:
        numbers = self.param(names.PARAM_DIMENSION_NUMBERS)
        self.dims.join_all(self.outs[0].nodes, self._factors(numbers))
        over = tuple(self.ins[0].nodes[i] for i in numbers[0][0])
        self.product(2.0 * products_of_equation(self.eqn.source), over)

    def _factors(self, numbers: Any, grouped: Sequence[int] = ()) -> list[int]:
        """Joins the dimensions that two factors share. Returns those of the result, in JAX's order:
        rows of both, then the free dimensions of each factor.
        """
        (left, right), (left_rows, right_rows) = numbers
        a, b = (x.nodes for x in self.ins[:2])
        for i, j in zip((*left, *left_rows), (*right, *right_rows), strict=True):
            self.dims.join(a[i], b[j])
        free = [*_without(a, (*left, *left_rows)), *_without(b, (*right, *right_rows, *grouped))]
        return [*(a[i] for i in left_rows), *free]

    def convolution(self) -> None:
        numbers = self.param(names.PARAM_DIMENSION_NUMBERS)
        lhs, rhs, out = (list(x) for x in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
        by_batch = self.param(names.PARAM_BATCH_GROUPS) > 1
        by_feature = self.param(names.PARAM_FEATURE_GROUPS) > 1
        a, b = (x.nodes for x in self.ins[:2])
        out_nodes = self.outs[0].nodes
        # Dimensions of space stay apart: a window reaches over the border of a part.
        if by_batch:
            self.program.grouped.append((_line(self.eqn), a[lhs[1]]))
        else:
            self.dims.join(a[lhs[0]], out_nodes[out[0]])
        if not by_batch and not by_feature:
            self.dims.join(a[lhs[1]], b[rhs[1]])
        self.dims.join(b[rhs[0]], out_nodes[out[1]])
        self.product(2.0 * products_of_equation(self.eqn.source), (b[rhs[1]],))

    def kernel(self) -> None:
        """A call that `mylib.opaque` was told how to split."""
        call, splits = kernel_of(self.eqn)
        self.program.kernels.append((call.name, [x.nodes for x in self.ins]))
        work = call.work(self.in_avals)
        if work is None:
            self.program.unpriced.append(_line(self.eqn))
        self._by_letters((*splits.operands, *splits.results), splits.parts, work or 0.0)

    def _by_letters(
        self, letters: Iterable[Sequence[str]], split: Collection[str], flops: float
    ) -> None:
        """Operands and results whose dimensions have letters: those in `split` are split alike, and
        all others are whole.
        """
        first: dict[str, int] = {}
        whole: list[int] = []
        values = (*self.ins, *self.outs)
        for x, names_of in zip(values, letters, strict=True):
            for node, letter in zip(x.nodes, names_of, strict=True):
                if letter in split:
                    self.dims.join(first.setdefault(letter, node), node)
                else:
                    whole.append(node)
        self._needs_whole(whole)
        avals = (*self.in_avals, *self.out_avals)
        floats = [x.dtype for x in avals if jnp.issubdtype(x.dtype, jnp.floating)]
        dtype = max(floats, key=lambda x: x.itemsize, default="float32")
        self._computes(flops, tuple(first.values()), dtype)

    def attended(self) -> None:
        """Attention of cuDNN, whose rows and heads are independent."""
        order = (
            ("b", "t", "n", "h") if self.param(names.PARAM_LAYOUT) == 0 else ("b", "n", "t", "h")
        )
        avals = (*self.in_avals, *self.out_avals)
        of_rank = {4: order, 3: "bnt"}
        letters = [of_rank.get(len(shape_of(x)), "-" * len(shape_of(x))) for x in avals]
        (b, n, t, h), s = (self.shape(0)[order.index(x)] for x in "bnth"), self.shape(1)
        # Two products forward, and five backward.
        count = 2 if self.eqn.name == names.CUDNN_FORWARD else 5
        self._by_letters(letters, "bn", 2.0 * count * b * n * t * h * s[order.index("t")])

    def pallas(self) -> None:
        """A kernel of splash attention, known by its name, whose rows and heads are independent:
        all but the last two dimensions of what isn't a mask. All other kernels are unknown.
        """
        name = self.eqn.params.get(names.PARAM_NAME) or ""
        if not re.search(names.KERNEL_SPLASH, name):
            self.unknown()
            return
        self.program.alone.setdefault(name, _line(self.eqn))

        def letters(aval: Any) -> str:
            rank = len(shape_of(aval))
            is_mask = not jnp.issubdtype(aval.dtype, jnp.floating)
            return "-" * rank if is_mask else ascii_lowercase[: rank - 2] + "--"

        flops = flops_of_kernel(self.eqn.source)
        each = map(letters, (*self.in_avals, *self.out_avals))
        self._by_letters(each, ascii_lowercase, flops or 0.0)

    def ragged(self) -> None:
        """A product of each expert's rows, which are whole, as their number depends on data."""
        numbers = self.param(names.PARAM_RAGGED)
        (left, right), (_, right_rows) = numbers.dot_dimension_numbers
        ragged, grouped = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
        a, b, out = (x.nodes for x in (*self.ins[:2], self.outs[0]))
        is_weights = not grouped  # the gradient of the experts' weights has a dimension for them
        made = self._factors(numbers.dot_dimension_numbers, grouped)
        self.dims.join_all(out[is_weights:], made)
        self._needs_whole([*(a[i] for i in ragged), *(b[i] for i in grouped), *out[:is_weights]])
        free = _without(self.shape(1), (*right, *right_rows, *grouped))
        over = tuple(a[i] for i in left if i not in ragged)
        self.product(2.0 * math.prod((*self.shape(0), *free)), over)

    def loop(self) -> None:
        """A scan, or a `while_loop`: how often that runs depends on data, so it counts once."""
        loop = loop_of(self.eqn.source, self.ins)
        assert loop is not None, self.eqn.name
        before, carry, xs = loop.constants, loop.carry, loop.slices
        body, start, carried = opened(loop.body), len(before), len(carry)
        inside = [self.reader.fresh(var.aval) for var in body.invars[start : start + carried]]
        for nodes, value in zip(inside, carry, strict=True):
            self.dims.join_all(nodes, value.nodes)
        # Iterations follow each other, so their dimension can't be split to any use.
        self.program.loops.update(x.nodes[0] for x in xs if x.nodes)
        operands = [_Operand(x.nodes, origin=x.origin) for x in before]
        operands += [
            _Operand(nodes, origin=x.origin, carried=i)
            for i, (nodes, x) in enumerate(zip(inside, carry, strict=True))
        ]
        operands += [_Operand(x.nodes[1:], origin=x.origin) for x in xs]
        # A loop over micro-batches is outside of layers, and iterates over no weights.
        top = self.top and all(x.origin is None for x in xs)
        results = self.reader.through(body, operands, self._iterations(), top)
        for i, (nodes, value, out) in enumerate(zip(inside, results, self.outs, strict=False)):
            self.dims.join_all(nodes, value.nodes)
            self.dims.join_all(nodes, out.nodes)
            # Each iteration only adds to it: XLA all-reduces it once, after the loop.
            if value.carried == i and value.sum is not None:
                out.sum, value.sum.root.after = value.sum, self.place
        for out, value in zip(self.outs[carried:], results[carried:], strict=True):
            self.dims.join_all(out.nodes[1:], value.nodes)

    def _iterations(self) -> Place:
        """The body of a loop here."""
        places, is_scan = self.program.places, self.eqn.name == names.SCAN
        count = self.param(names.PARAM_LENGTH) if is_scan else 1
        if not is_scan:
            self.program.counted_once.append(_line(self.eqn))
        places.append(Place(len(places), self.place.times * count, self.place.number))
        return places[-1]

    def call(self) -> None:
        """A checkpoint, or the branches of a condition, all of which are counted."""
        called = [x for x in jaxprs_in(self.eqn.source) if not only_calls_back(x)]
        for inner in map(opened, called):
            operands = self.ins[len(self.ins) - len(inner.invars) :]
            results = self.reader.through(inner, operands, self.place)
            for out, value in zip(self.outs, results, strict=True):
                self.dims.join_all(out.nodes, value.nodes)
                out.origin = value.origin
                # Which of several branches makes the sum is known only while the program runs.
                if len(called) == 1:
                    out.sum, out.carried = value.sum, value.carried

    def by_matrix(self) -> None:
        """The updates of `by_matrix`, whose price is that of its layout on each mesh."""
        if not is_of_plan(self.eqn):
            self.unknown()
            return
        for x, out in zip(self.ins, self.outs, strict=False):
            if len(x.nodes) == len(out.nodes):
                self.dims.join_all(x.nodes, out.nodes)

    def transposed(self) -> None:
        order = self.param(names.PARAM_PERMUTATION)
        self.dims.join_all(self.outs[0].nodes, [self.ins[0].nodes[i] for i in order])

    def reshaped(self) -> None:
        xs, ys = self.ins[0].nodes, self.outs[0].nodes
        self.dims.join_reshaped(self.shape(0), shape_of(self.out_avals[0]), xs, ys)

    def broadcast(self) -> None:
        out_shape = shape_of(self.out_avals[0])
        for i, j in enumerate(self.param(names.PARAM_BROADCAST_DIMENSIONS)):
            # A dimension of size 1 that is repeated has no parts.
            if self.shape(0)[i] == out_shape[j]:
                self.dims.join(self.ins[0].nodes[i], self.outs[0].nodes[j])

    def reduced(self) -> None:
        axes, nodes = self.param(names.PARAM_AXES), self.ins[0].nodes
        # Otherwise it is a collective.
        if not all(isinstance(axis, Integral) for axis in axes):
            self.unknown()
            return
        for x, out in zip(self.ins, self.outs, strict=True):
            self.dims.join_all(out.nodes, _without(x.nodes, axes))
        # Over dimensions of size 1 nothing is reduced.
        if not self._keeps_bytes():
            self.sum_over(nodes[i] for i in axes)
        # A maximum takes a collective of the same size, but no part of a later sum.
        if self.eqn.name not in names.SUMS:
            self.outs[0].sum = None

    def along(self) -> None:
        """It runs along some dimensions, which one side may lack. The others stay as they are."""
        params = (names.PARAM_AXIS, names.PARAM_DIMENSION, names.PARAM_DIMENSIONS)
        along = next(self.param(name) for name in params if name in self.eqn.params)
        axes = along if isinstance(along, tuple) else (along,)
        sides = [x.nodes for x in self.ins], [x.nodes for x in self.outs]
        rank = max(map(len, itertools.chain(*sides)))
        kept = [[_without(x, axes) if len(x) == rank else x for x in side] for side in sides]
        for x, out in itertools.product(*kept):
            self.dims.join_all(x, out)
        first, shape = self.ins[0].nodes, self.shape(0)
        self._needs_whole(first[i] for i in axes if len(first) == rank and shape[i] > 1)

    def numbered(self) -> Nodes:
        dim = self.eqn.params.get(names.PARAM_DIMENSION)
        nodes = self.outs[0].nodes
        return nodes if dim is None else nodes[dim : dim + 1]

    def windowed(self) -> list[int]:
        window = self.param(names.PARAM_WINDOW)
        return [x for x, n in zip(self.ins[-1].nodes, window, strict=True) if n > 1]

    def padded(self) -> list[int]:
        config = self.param(names.PARAM_PADDING_CONFIG)
        return [x for x, n in zip(self.ins[0].nodes, config, strict=True) if any(n)]

    def written(self) -> list[int]:
        numbers = self.param(names.PARAM_DIMENSION_NUMBERS)
        return [self.ins[0].nodes[i] for i in numbers.scatter_dims_to_operand_dims]

    def cut(self) -> None:
        whole: list[int] = []
        operands = zip(self.ins, self.in_avals, strict=True)
        results = zip(self.outs, self.out_avals, strict=True)
        for (x, aval), (out, out_aval) in itertools.product(operands, results):
            # A scalar operand, such as the start of a slice, has no dimensions.
            dims = zip(x.nodes, out.nodes, shape_of(aval), shape_of(out_aval), strict=False)
            for a, b, before, after in dims:
                if before == after:
                    self.dims.join(a, b)
                elif before > 1:
                    whole.append(a)
        self._needs_whole(whole)

    def _needs_whole(self, nodes: Iterable[int]) -> None:
        over = tuple(nodes)
        if over and self.outs:
            size = bytes_of(self.out_avals[0])
            self.program.whole.append(Event(self.place, size, self.outs[0].nodes, over))

    def gathered(self) -> None:
        numbers = self.param(names.PARAM_DIMENSION_NUMBERS)
        sizes, gone = self.param(names.PARAM_SLICE_SIZES), numbers.collapsed_slice_dims
        of_indices = numbers.start_indices_batching_dims
        out = self.outs[0], shape_of(self.out_avals[0])
        _, parts = self._slices(*out, numbers.offset_dims, gone, of_indices)
        table = self.ins[0].nodes
        # A slice of several places may reach over the border of a part.
        looked_up = [table[i] for i in (*gone, *(i for i in parts if sizes[i] == 1))]
        # Each device looks up the rows that it has, and the results are summed.
        self.sum_over(looked_up)
        self.outs[0].sum = None
        self._needs_whole(table[i] for i in parts if sizes[i] != 1)

    def scattered(self) -> None:
        numbers = self.param(names.PARAM_DIMENSION_NUMBERS)
        self.dims.join_all(self.outs[0].nodes, self.ins[0].nodes)
        window, gone = numbers.update_window_dims, numbers.inserted_window_dims
        of_indices = numbers.scatter_indices_batching_dims
        rows, _ = self._slices(self.ins[2], self.shape(2), window, gone, of_indices)
        # Each device adds the rows that it has to a table of its own.
        self.sum_over(rows)

    def _slices(
        self,
        slices: _Operand,
        shape: Sequence[int],
        window: Sequence[int],
        gone: Sequence[int],
        of_indices: Sequence[int],
    ) -> tuple[list[int], list[int]]:
        """Joins the dimensions of a table, of indices, and of slices of the table there, whose
        dimensions `window` are the table's without those that are `gone`. Returns the slices' rows,
        and the dimensions of the table that a slice has only a part of.
        """
        table, indices = (x.nodes for x in self.ins[:2])
        of_table = self.param(names.PARAM_DIMENSION_NUMBERS).operand_batching_dims
        parts: list[int] = []
        for u, i in zip(window, _without(range(len(table)), (*gone, *of_table)), strict=True):
            if shape[u] == self.shape(0)[i]:
                self.dims.join(slices.nodes[u], table[i])
            else:
                parts.append(i)
        rows = _without(slices.nodes, window)
        # The last dimension of the indices has the coordinates of each.
        self.dims.join_all(rows, indices[:-1])
        for i, j in zip(of_table, of_indices, strict=True):
            self.dims.join(table[i], indices[j])
        return rows, parts

    def barrier(self) -> None:
        for x, out in zip(self.ins, self.outs, strict=True):
            self.dims.join_all(x.nodes, out.nodes)
            out.sum, out.origin = x.sum, x.origin

    def by_element(self) -> None:
        out, size = self.outs[0], shape_of(self.out_avals[0])
        # The others are single numbers.
        alike = [x for x, a in zip(self.ins, self.in_avals, strict=True) if shape_of(a) == size]
        for x, aval in zip(self.ins, self.in_avals, strict=True):
            # Dimensions of size 1 are broadcast, and not joined.
            if len(shape_of(aval)) == len(size):
                self.dims.join_all(out.nodes, x.nodes)
        out.origin = next((x.origin for x in alike if x.origin is not None), None)
        special = _SPECIAL.get(self.eqn.name)
        if special is not None:
            special(self)

    def added(self) -> None:
        sums = [x.sum for x in self.ins if x.sum is not None]
        carried = [x.carried for x in self.ins if x.carried is not None]
        # What a turn adds to what is carried may be summed after the loop.
        if sums and len(carried) == 1:
            self.outs[0].sum, self.outs[0].carried = sums[0], carried[0]
        if len(sums) == len(self.ins) == 2 and sums[0].amount == sums[1].amount:
            first, other = sorted((x.root for x in sums), key=lambda x: x.number)
            # XLA adds first, and then sums over devices; but not over the border of a loop.
            if first is not other and first.place is other.place:
                other.first = first
            self.outs[0].sum = sums[0]

    def constrained(self) -> None:
        x = self.ins[0]
        if not is_of_plan(self.eqn):
            self.program.placed.append(self.param(names.PARAM_SHARDING))
        if is_kept(self.eqn):
            if x.sum is not None:
                x.sum.scattered = True
        # `fully_shard` constrains a weight to where it is used; what is still a sum is no weight.
        elif x.sum is None:
            size = bytes_of(self.in_avals[0])
            self.program.moves.append(Event(self.place, size, x.nodes))

    def converted(self) -> None:
        sum_ = self.ins[0].sum
        if sum_ is not None:
            # It may be summed before it is converted.
            sum_.amount = min(sum_.amount, bytes_of(self.out_avals[0]))
            self.outs[0].sum = sum_

    def named(self) -> None:
        name = self.param(names.PARAM_NAME)
        self.program.origins[name] = self.ins[0].origin
        self.program.named[name] = Event(self.place, bytes_of(self.in_avals[0]), self.ins[0].nodes)

    def put(self) -> None:
        aval, out = self.in_avals[0], self.out_avals[0]
        if is_on_host(aval) != is_on_host(out):
            event = Event(self.place, bytes_of(aval), self.ins[0].nodes)
            self.program.offloads.append(event)


def _without(nodes: Iterable[int], places: Collection[int]) -> list[int]:
    return [x for i, x in enumerate(nodes) if i not in places]


def _line(eqn: Equation) -> str:
    return line_of(eqn.source)


_Rule = Callable[[_Apply], None]
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(names.BY_ELEMENT, _Apply.by_element),
    **dict.fromkeys(names.REDUCTIONS, _Apply.reduced),
    **dict.fromkeys(names.ALONG, _Apply.along),
    **dict.fromkeys(names.CUTS | names.MADE, _Apply.cut),
    **dict.fromkeys(names.SCATTERS, _Apply.scattered),
    names.BARRIER: _Apply.barrier,
    names.BROADCAST: _Apply.broadcast,
    names.COND: _Apply.call,
    names.CONVOLUTION: _Apply.convolution,
    KERNEL: _Apply.kernel,
    names.CUDNN_BACKWARD: _Apply.attended,
    names.CUDNN_FORWARD: _Apply.attended,
    names.PALLAS: _Apply.pallas,
    names.RAGGED_DOT: _Apply.ragged,
    names.DOT: _Apply.dot,
    names.GATHER: _Apply.gathered,
    names.REMAT: _Apply.call,
    names.RESHAPE: _Apply.reshaped,
    names.SCAN: _Apply.loop,
    names.SHARD_MAP: _Apply.by_matrix,
    names.TRANSPOSE: _Apply.transposed,
    names.WHILE: _Apply.loop,
}
# The dimensions along which an operation depends on the places of numbers, though its results have
# them, too.
_PLACES: dict[str, Callable[[_Apply], Sequence[int]]] = {
    **dict.fromkeys(names.NUMBERED, _Apply.numbered),
    **dict.fromkeys(names.SCATTERS, _Apply.written),
    **dict.fromkeys(names.WINDOWS, _Apply.windowed),
    names.PAD: _Apply.padded,
}
# What else some of the operations by element tell.
_SPECIAL: dict[str, _Rule] = {
    **dict.fromkeys(names.ADDS, _Apply.added),
    names.CHECKPOINT_NAME: _Apply.named,
    names.CONSTRAINT: _Apply.constrained,
    names.CONVERT: _Apply.converted,
    names.DEVICE_PUT: _Apply.put,
}


def relate_as_operands(primitive: Any) -> None:
    """Says of a primitive that each result has the dimensions of the operand at its place."""
    _RULES[primitive.name] = _Apply.barrier
