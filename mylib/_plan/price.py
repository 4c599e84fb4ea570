"""What a strategy costs: memory, bytes and seconds, without a compiler.

Rates and links are those of `mylib.audit(...).estimate`. What of the communication is hidden is
assumed here, because without a compiler there is no schedule.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .._audit import Message, seconds, speeds
from ..machines import Chip, Machine
from .dims import Nodes
from .equations import bytes_of
from .groups import Sum
from .lifetimes import Live
from .strategy import MODEL, Strategy
from .trace import SMALL, TracedStep

# The part of the gathers of weights and the sums of gradients that computation hides, and of the
# sums of tensor parallelism, which must end before computation goes on. TPUs split these.
_HIDDEN = 0.85
_HIDDEN_TENSOR = {"tpu": 0.5}
# A layer whose input is saved in parts gathers it again in the backward pass, which takes about a
# tenth of what its sums over "model" take: 88 to 80 GiB in a stack like Llama's.
_REGATHERED = 1.1
# XLA combines collectives of fewer bytes.
_COMBINED = 30e6
# Of simulated devices, which have no data sheet: rough figures, only for an order.
_ASSUMED = {
    "flops": dict.fromkeys(("float16", "bfloat16", "float32", "float64", "int8", "int32"), 6e9),
    "memory_bandwidth": 3e9,
    "links": 1,
    "link_bandwidth": 6e8,
    "network_bandwidth": 6e8,
}


def with_figures(machine: Machine) -> tuple[Machine, bool]:
    """A machine whose figures are all known, and whether some of them had to be assumed."""
    chip = machine.chip
    missing = {name: x for name, x in _ASSUMED.items() if not getattr(chip, name)}
    if not missing:
        return machine, False
    known: Chip = dataclasses.replace(chip, **missing)
    return dataclasses.replace(machine, chip=known), True


@dataclass(frozen=True)
class Price:
    """The price of a strategy.

    - `seconds`, `interval`: of a call, and at least and at most, as those of an estimate.
    - `memory`: the bytes that each device holds at most; `held` of them between calls.
    - `parts`: the seconds of each part.
    - `sent`: bytes by kind, as `Collective.bytes` counts them.
    """

    seconds: float
    interval: tuple[float, float]
    memory: int
    held: int
    parts: Mapping[str, float]
    sent: Mapping[str, float]


class Prices:
    """The prices of strategies of one traced step on one machine."""

    def __init__(self, traced: TracedStep, machine: Machine):
        self.traced, self.machine = traced, machine
        reading = traced.program
        self.group = _Groups(reading.dims.group)
        dtypes = {one.dtype for one in reading.products}
        self.ideal, self.real, self.assumptions = speeds(machine.chip, dtypes)
        self.times = _Times([(x.start, x.stop) for x in reading.lives])
        self._links: dict[Any, float] = {}

    @cached_property
    def sums(self) -> list[tuple[Sum, bool, Nodes]]:
        """Sums that happen together: the largest of them, whether it is a gradient of a weight that
        is kept in parts, and what it sums over.
        """
        together: dict[int, list[Sum]] = {}
        for one in self.traced.program.sums:
            together.setdefault(id(one.root), []).append(one)
        weights = [set(dims) for dims, _ in self.traced.weights]
        found: list[tuple[Sum, bool, Nodes]] = []
        for ones in together.values():
            largest = max(ones, key=lambda one: one.amount)
            dims = {self.group[x] for x in largest.dims}
            scattered = any(x.scattered for x in ones) or any(dims <= own for own in weights)
            over = tuple({self.group[x] for one in ones for x in one.over})
            found.append((largest, scattered, over))
        return found

    def price(self, strategy: Strategy) -> Price:
        return _Pricing(self, strategy).price()

    def collective(self, kind: str, nbytes: float, axes: tuple[str, ...], sizes: Any) -> float:
        """Seconds of a collective of as many bytes, as `Collective.bytes` counts them."""
        count = math.prod(sizes[axis] for axis in axes)
        if count <= 1 or nbytes <= 0:
            return 0.0
        wire = int(nbytes * (count - 1) / count * (2 if kind == "all-reduce" else 1))
        key = kind, axes, wire, tuple(sizes.items())
        if key not in self._links:
            message = Message(kind, axes, wire, 1)
            self._links[key] = seconds(message, sizes, self.machine)[0]
        return self._links[key]


class _Times:
    """The moments at which arrays begin and end to be held, in order."""

    def __init__(self, spans: list[tuple[float, float]]):
        moments = sorted({x for span in spans for x in span} or {0.0})
        self.count = len(moments)
        self.start = np.searchsorted(moments, [start for start, _ in spans])
        self.stop = np.searchsorted(moments, [stop for _, stop in spans])


class _Groups(dict[int, int]):
    """The group of each node, looked up once."""

    def __init__(self, group: Callable[[int], int]):
        self._of = group

    def __missing__(self, node: int) -> int:
        found = self[node] = self._of(node)
        return found


class _Pricing:
    """One price: which mesh axes divide each group."""

    def __init__(self, prices: Prices, strategy: Strategy):
        self.prices, self.strategy, self.traced = prices, strategy, prices.traced
        self.sizes = strategy.sizes
        rows = frozenset(strategy.rows)
        self.axes: dict[int, frozenset[str]] = dict.fromkeys(self.traced.rows, rows)
        self.axes |= dict.fromkeys(strategy.tensor, frozenset((MODEL,)))
        self.parts = self.size(strategy.over)
        self.sent: dict[str, float] = {}

    def over(self, nodes: Iterable[int]) -> frozenset[str]:
        group = self.prices.group
        found = (self.axes.get(group[x]) for x in nodes)
        return frozenset().union(*(x for x in found if x is not None))

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def divided(self, amount: float, nodes: Iterable[int]) -> float:
        return amount / self.size(self.over(nodes))

    def ordered(self, axes: Iterable[str]) -> tuple[str, ...]:
        given = set(axes)
        return tuple(axis for axis in self.sizes if axis in given)

    def send(self, kind: str, nbytes: float, axes: Iterable[str], times: int) -> float:
        """The seconds of a collective in all its times. Its bytes are noted."""
        over = self.ordered(axes)
        if self.size(over) > 1:
            name = f"{kind} over {', '.join(over)}"
            self.sent[name] = self.sent.get(name, 0.0) + times * nbytes
        return times * self.prices.collective(kind, nbytes, over, self.sizes)

    def price(self) -> Price:
        low, body = self.computed()
        tensor = self.tensor()
        gathers, gradients = self.gathers(), self.gradients()
        moved = gathers + gradients
        hidden = min(_HIDDEN * moved, body)
        exposed = tensor * (1 - _HIDDEN_TENSOR.get(self.prices.machine.chip.platform, 0.0))
        held, peak = self.memory()
        parts = {
            "computation": body,
            "gathers of weights": gathers,
            "sums of gradients": gradients,
            "tensor parallelism": tensor,
        }
        return Price(
            seconds=body + exposed + moved - hidden,
            interval=(max(low, moved + tensor), body + moved + tensor),
            memory=peak,
            held=held,
            parts={name: x for name, x in parts.items() if x},
            sent=dict(sorted(self.sent.items())),
        )

    def computed(self) -> tuple[float, float]:
        """At the data sheet's rates, and as it is assumed."""
        ideal, real = self.prices.ideal, self.prices.real
        low = body = 0.0
        for one in self.traced.program.products:
            flops = self.divided(one.amount, one.dims)
            moved = sum(self.divided(size, nodes) for size, nodes in one.operands)
            at = flops / ideal.flops[one.dtype], moved / ideal.memory
            low += one.times * max(at)
            body += one.times * max(at[0] / real.of_products, at[1] / real.of_memory)
        # The optimiser reads and writes all of its state.
        update = 2 * self.kept_bytes() / ideal.memory
        return low + update, body + update / real.of_memory

    def gathers(self) -> float:
        total = 0.0
        for one in self.traced.program.moves if self.parts > 1 else ():
            if one.amount / 4 >= SMALL:
                nbytes = self.divided(one.amount, one.dims)
                total += self.send("all-gather", nbytes, self.strategy.over, one.times)
        return total

    def gradients(self) -> float:
        combined: dict[tuple[str, tuple[str, ...], int], list[float]] = {}
        for one, is_gradient, over in self.prices.sums:
            axes = self.over(over) - self.over(one.dims) - {MODEL}
            nbytes = self.divided(one.amount, one.dims)
            if not axes:
                continue
            if is_gradient and self.parts > 1 and one.amount / 4 >= SMALL:
                kept = self.strategy.over
                scattered = "reduce-scatter", kept, one.times
                combined.setdefault(scattered, []).append(nbytes)
                rest = self.ordered(axes - set(kept))
                combined.setdefault(("all-reduce", rest, one.times), []).append(nbytes / self.parts)
            else:
                key = "all-reduce", self.ordered(axes), one.times
                combined.setdefault(key, []).append(nbytes)
        total = 0.0
        for (kind, axes_, times), sizes in combined.items():
            small = sum(x for x in sizes if x < _COMBINED)
            count = math.ceil(small / _COMBINED)
            large = [x for x in sizes if x >= _COMBINED]
            for nbytes in [*large, *([small / count] * count if count else [])]:
                total += self.send(kind, nbytes, axes_, times)
        return total

    def tensor(self) -> float:
        total = 0.0
        for one, _, over in self.prices.sums:
            if MODEL in self.over(over) - self.over(one.dims):
                nbytes = self.divided(one.amount, one.dims)
                total += self.send("all-reduce", nbytes, (MODEL,), one.times)
        for one in self.traced.program.whole:
            axes = self.over(one.over) - self.over(one.dims)
            if axes:
                nbytes = self.divided(one.amount, one.dims)
                total += self.send("all-gather", nbytes, axes, one.times)
        return total if self.strategy.saved is None else total * _REGATHERED

    def kept_bytes(self) -> float:
        return sum(
            self.kept(bytes_of(leaf.aval), leaf.groups, leaf.is_small)
            for leaf in self.traced.leaves
            if not leaf.is_data
        )

    def kept(self, nbytes: float, nodes: Nodes, is_small: bool) -> float:
        return self.divided(nbytes, nodes) / (1 if is_small else self.parts)

    def saved_parts(self, live: Live) -> int:
        """In how many more parts an array is saved, if it is held between layers."""
        between = live.top and not live.gathered and live.times == 1
        split = self.strategy.saved is not None and MODEL not in self.over(live.nodes)
        return self.sizes[MODEL] if between and split else 1

    def memory(self) -> tuple[int, int]:
        """What each device holds between calls, and at the peak."""
        data = sum(
            self.divided(bytes_of(leaf.aval), leaf.groups)
            for leaf in self.traced.leaves
            if leaf.is_data
        )
        held = data + self.kept_bytes()
        weights, group = self.traced.weights, self.prices.group
        sizes: list[float] = []
        for live in self.traced.program.lives:
            groups = tuple(group[x] for x in live.nodes)
            if live.top and not live.gathered and (groups, live.shape) in weights:
                sizes.append(self.kept(live.bytes, live.nodes, math.prod(live.shape) < SMALL))
            else:
                sizes.append(self.divided(live.bytes, live.nodes) / self.saved_parts(live))
        times = self.prices.times
        line = np.zeros(times.count + 1)
        np.add.at(line, times.start, sizes)
        np.add.at(line, times.stop, np.negative(sizes))
        return int(held), int(held + float(np.cumsum(line).max()))
