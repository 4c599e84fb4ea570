"""One operation of a program, as the rules see it that join its dimensions."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..jaxprs import line_of, shape_of
from .dims import Nodes
from .equations import Equation, bytes_of
from .program import Event, Place, Product, Reading, Sum


@dataclass
class Operand:
    """What is known about an operand: the sum that it is, the argument, and in the body of a loop
    the number of the carried value that it is, plus sums, if nothing else uses that.
    """

    nodes: Nodes
    sum: Sum | None = None
    origin: int | None = None
    carried: int | None = None


class Applied:
    """An equation, what is known of its operands, and what its rule says of its results.

    A rule joins dimensions that go together: by `tie`, if it has shown that equal parts of these
    are treated each by itself, and by `dims.join`, if that is only likely. What no `tie` names may
    not be split. `through` walks through a jaxpr with some operands, and returns its results.
    """

    def __init__(
        self,
        program: Reading,
        through: Callable[..., list[Operand]],
        eqn: Equation,
        ins: list[Operand],
        place: Place,
        top: bool,
    ):
        self.program, self.dims, self.through = program, program.dims, through
        self.eqn, self.ins, self.place, self.top = eqn, ins, place, top
        self.in_avals = [var.aval for var in eqn.invars]
        self.out_avals = [var.aval for var in eqn.outvars]
        self.outs = [Operand(program.fresh(aval)) for aval in self.out_avals]
        self._tied: list[int] = []
        # An array that is used twice is here twice.
        self._open = [x for side in (ins, self.outs) for y in side for x in self._large(y.nodes)]

    def _large(self, nodes: Iterable[int]) -> list[int]:
        return [x for x, n in zip(nodes, self.dims.sizes(nodes), strict=True) if n > 1]

    def tie(self, *nodes: int) -> None:
        """Equal parts along these dimensions, one of each array, are treated each by itself."""
        for node in nodes[1:]:
            self.dims.join(nodes[0], node)
        large = self._large(nodes)
        if len(set(self.dims.groups(large))) > 1:
            # No number of parts divides both.
            self.program.undivided += large
        elif large:
            self._tied.append(large[0])
            self.hand_on(large)

    def tie_all(self, *arrays: Iterable[int]) -> None:
        """The same for each dimension of arrays that are alike."""
        for nodes in zip(*arrays, strict=True):
            self.tie(*nodes)

    def hand_on(self, nodes: Iterable[int]) -> None:
        """Leaves it to others whether these may be split: to the operations of a jaxpr."""
        for node in self._large(nodes):
            if node in self._open:
                self._open.remove(node)

    def end_of_part(self, are_apart: bool = True) -> None:
        """The operation is done, or one of several that it consists of."""
        if are_apart and len(self._tied) > 1:
            self.program.apart.append(self._tied)
        self._tied = []

    def end(self) -> None:
        self.end_of_part()
        self.program.undivided += self._open

    def unknown(self) -> None:
        self.program.unknown.setdefault(self.eqn.name, self.line)

    @property
    def line(self) -> str:
        return line_of(self.eqn.source)

    def param(self, name: str) -> Any:
        return self.eqn.params[name]

    def shape(self, i: int) -> tuple[int, ...]:
        return shape_of(self.in_avals[i])

    def keeps_bytes(self) -> bool:
        return bytes_of(self.out_avals[0]) == bytes_of(self.in_avals[0])

    def sum_over(self, over: Iterable[int]) -> None:
        sums, out, size = self.program.sums, self.outs[0], bytes_of(self.out_avals[0])
        out.sum = Sum(self.place, size, out.nodes, tuple(over), len(sums), after=self.place)
        sums.append(out.sum)

    def needs_whole(self, nodes: Iterable[int]) -> None:
        over = tuple(nodes)
        if over and self.outs:
            size = bytes_of(self.out_avals[0])
            self.program.whole.append(Event(self.place, size, self.outs[0].nodes, over))

    def product(self, flops: float, over: Nodes) -> None:
        """A product of the first two operands, which sums over some dimensions."""
        dtype = max((x.dtype for x in self.in_avals[:2]), key=lambda x: x.itemsize)
        self.computes(flops, (*self.outs[0].nodes, *over), dtype, over)
        self.sum_over(over)

    def computes(self, flops: float, dims: Nodes, dtype: Any, over: Nodes = ()) -> None:
        avals, values = (*self.in_avals, *self.out_avals), (*self.ins, *self.outs)
        operands = tuple((bytes_of(a), x.nodes) for a, x in zip(avals, values, strict=True))
        self.program.products.append(Product(self.place, flops, dims, over, str(dtype), operands))


def without(nodes: Iterable[int], places: Collection[int]) -> list[int]:
    return [x for i, x in enumerate(nodes) if i not in places]


Rule = Callable[[Applied], None]
# By the names of primitives.
Rules = Mapping[str, Rule]
