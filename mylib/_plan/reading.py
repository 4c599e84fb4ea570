"""What reading a program finds: events, and when it holds which arrays."""

from dataclasses import dataclass, field

from .dims import Dims, Nodes
from .lifetimes import Live


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
class Named(Event):
    """An array with a name, and the number of the argument that it is, if any."""

    name: str = ""
    origin: int | None = None


@dataclass(eq=False)
class Sum(Event):
    """A sum of as many bytes. Sums that are added to each other first are summed together:
    `first` is one of them. `scattered` if the result is constrained to where weights are kept.
    `after` is where it is all-reduced: outside of loops whose turns only add to it.
    """

    number: int = 0
    first: "Sum | None" = None
    scattered: bool = False
    after: Place = field(default_factory=Place)

    @property
    def root(self) -> "Sum":
        return self if self.first is None else self.first.root


@dataclass(eq=False)
class Reading:
    """What a jaxpr computes.

    - `inputs`, `results`: the nodes of its arguments and results.
    - `places`: its loops, by their number.
    - `products`, `sums`: its products, and its sums over dimensions.
    - `moves`: weights that are gathered where a layer is called.
    - `whole`: dimensions that an operation needs whole.
    - `lives`: the arrays that it holds.
    - `loops`: the first dimensions of what loops iterate over.
    - `named`: arrays with a name of `jax.ad_checkpoint.checkpoint_name`.
    - `unknown`: primitives whose dimensions are unknown, with a line that has them.
    - `counted_once`: the lines of loops whose length depends on data.
    """

    dims: Dims = field(default_factory=Dims)
    inputs: list[Nodes] = field(default_factory=list)
    results: list[Nodes] = field(default_factory=list)
    places: list[Place] = field(default_factory=lambda: [Place()])
    products: list[Product] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    moves: list[Event] = field(default_factory=list)
    whole: list[Event] = field(default_factory=list)
    lives: list[Live] = field(default_factory=list)
    loops: set[int] = field(default_factory=set)
    named: list[Named] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    counted_once: list[str] = field(default_factory=list)


@dataclass
class Operand:
    """What is known about an operand: the sum that it is, the argument, and in the body of a loop
    the number of the carried value that it is, plus sums, if nothing else uses that.
    """

    nodes: Nodes
    sum: Sum | None = None
    origin: int | None = None
    carried: int | None = None
