"""What a program computes, sums and holds, with the dimensions that divide it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..jaxprs import shape_of
from .dims import Dims, Nodes
from .equations import Equation


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
    - `undivided`: dimensions that may not be split: constants', and each that an operation takes or
        returns without that its rule has shown that parts are treated each by itself.
    - `apart`: dimensions of one operation that may be split, but no two of them alike: of `x @ x.T`
        equal parts of both would be the blocks on the diagonal.
    - `unknown`: primitives whose dimensions are unknown, with a line that has them.
    - `placed`: the shardings on meshes of the step's own that it constrains arrays to.
    - `counted_once`: the lines of loops whose length depends on data.
    - `kernels`: the names of kernels, with the dimensions of their operands.
    - `alone`: kernels that are known, and that compilers can't split, with a line that has them.
    - `unpriced`: the lines of kernels of which it is unknown what they compute.
    - `convolved`: the lines of gradients of the weights of convolutions, the dimension of rows that
        each sums over, and whether it is grouped.
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
    apart: list[Sequence[int]] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    placed: list[Any] = field(default_factory=list)
    counted_once: list[str] = field(default_factory=list)
    kernels: list[tuple[str, list[Nodes]]] = field(default_factory=list)
    alone: dict[str, str] = field(default_factory=dict)
    unpriced: list[str] = field(default_factory=list)
    convolved: list[tuple[str, int, bool]] = field(default_factory=list)

    def fresh(self, aval: Any) -> Nodes:
        """New dimensions for a value of this type."""
        return self.dims.new(shape_of(aval))
