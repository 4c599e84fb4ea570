"""What a strategy costs: memory, bytes and seconds, without a compiler.

Rates and links are those of `mylib.audit(...).estimate`. What of the communication is hidden is
assumed here, because without a compiler there is no schedule.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from jax.core import ShapedArray

from ..._core.dims import bytes_of
from ..._core.jaxprs import OptimiserProduct, products_of_optimisers
from ..._core.products import products_of_equation
from ..._programs.audit import Message, seconds, speeds
from ..._programs.machines import Machine
from .fixes import MODEL, axes_of
from .matrices import seconds_of, sent_by, state_bytes, states_on
from .strategy import Strategy, used_spec
from .tables import ArgumentTable, EventTable, GroupTable, LifeTable, ProductTable, SumTable
from .trace import SMALL, TracedStep

# A guess, as there is no schedule without a compiler: the part of the gathers of weights and of the
# sums of gradients that computation hides. Only what follows from it is checked: which candidate
# comes first, against the compiled ones (benchmarks/plan_search.py) and published steps
# (benchmarks/plan.py).
_GUESSED_HIDDEN = 0.85
# Another guess, checked in the same way: of the sums of tensor parallelism, which must end before
# computation goes on, except that TPUs split these.
_GUESSED_HIDDEN_OF_TENSOR = {"tpu": 0.5}
# A layer whose input is saved in parts gathers it in the forward pass and when it is computed
# again, and gathers the gradient of its result. Its sums stay what they are.
_GATHERED = 3
# XLA's own threshold for combining collectives, kDefaultAllReduceCombineThreshold in its
# xla/service/collective_utils.h. Of TPUs, whose compiler is closed, it is a guess.
_COMBINED = 30 * 2**20 + 7
# `SMALL` as bytes, as if all weights were float32: amounts don't say their dtype.
_SMALL_BYTES = 4 * SMALL
# Guesses for simulated devices, which have no data sheet, and for figures that a data sheet lacks.
# They were never checked, and plans that need them say so.
_GUESSED_FIGURES = {
    "flops": dict.fromkeys(("float16", "bfloat16", "float32", "float64", "int8", "int32"), 6e9),
    "memory_bandwidth": 3e9,
    "links": 1,
    "link_bandwidth": 6e8,
    "network_bandwidth": 6e8,
}
# Between a chip and its host, where a data sheet lacks it: what the scaling book calls typical of
# TPUs (https://jax-ml.github.io/scaling-book/tpus/).
_TYPICAL_OF_HOSTS = 1.5e10


def with_figures(machine: Machine) -> tuple[Machine, bool]:
    """A machine whose figures are all known, and whether some of them had to be assumed."""
    chip = machine.chip
    missing = {name: guess for name, guess in _GUESSED_FIGURES.items() if not getattr(chip, name)}
    figures = {"host_bandwidth": chip.host_bandwidth or _TYPICAL_OF_HOSTS, **missing}
    return replace(machine, chip=replace(chip, **figures)), bool(missing)


# Of a mesh.
Axes = tuple[str, ...]


@dataclass(frozen=True)
class Price:
    """The price of a strategy.

    - `seconds`, `interval`: of a call, and at least and at most, as those of an estimate.
    - `memory`: the bytes that each device holds at most.
    - `parts`: the seconds of each part.
    - `sent`: bytes by kind, as `Collective.bytes` counts them.
    """

    seconds: float
    interval: tuple[float, float]
    memory: int
    parts: Mapping[str, float]
    sent: Mapping[str, float]


class Prices:
    """What the prices of all strategies of one traced step on one machine have in common.

    - `ideal`, `real`: the machine's speed by its data sheet, and the part of it that is reached.
    - `times`: how often each place runs in a call.
    - `moves`: gathers of weights.
    - `whole`: arrays that an operation needs whole.
    - `offloads`: copies to the host's memory, and back.
    - `inputs`: the inputs of layers.
    - `matrices`: products of an optimiser of matrices, and their FLOPs.
    """

    def __init__(self, traced: TracedStep, machine: Machine):
        self.traced, self.machine = traced, machine
        program, group = traced.program, cache(traced.program.dims.group)
        self.ideal, self.real, _ = speeds(machine.chip, _dtypes(traced))
        self.times = np.array([x.times for x in program.places])
        self.products = ProductTable(traced, self.ideal.flops, group)
        self.sums = SumTable(traced, group)
        # Small weights are whole, as `rules.fsdp` has it, so they are not gathered.
        large = [move for move in program.moves if move.amount >= _SMALL_BYTES]
        self.moves = EventTable(large, group)
        self.whole = EventTable(program.whole, group)
        self.offloads = EventTable(program.offloads, group)
        self.inputs = EventTable([x for x in traced.inputs if x is not None], group)
        self.arguments = ArgumentTable(traced, group)
        self.lives = LifeTable(traced, machine.chip.platform != "tpu", group)
        self.matrices = [
            (x, 2.0 * x.times * products_of_equation(x.eqn))
            for x in products_of_optimisers(traced.jaxpr)
            if _factor(x).size >= SMALL
        ]
        self._seconds: dict[tuple[Message, tuple[tuple[str, int], ...]], float] = {}

    def collective(self, kind: str, nbytes: float, strategy: Strategy, axes: Axes) -> float:
        """Seconds of a collective of as many bytes, as `Collective.bytes` counts them."""
        sizes = strategy.sizes
        count = math.prod(sizes[axis] for axis in axes)
        # In a ring each device sends all parts but one, and an all-reduce goes around twice.
        wire = int(nbytes * (count - 1) / count * (2 if kind == "all-reduce" else 1))
        key = Message(kind, axes, wire, 1), strategy.axes
        if key not in self._seconds:
            self._seconds[key] = seconds(key[0], sizes, self.machine)[0]
        return self._seconds[key]


def _dtypes(traced: TracedStep) -> set[str]:
    """Those of products."""
    groups = [group for state in traced.states.values() for group in state.layout.groups]
    products = {product.dtype for product in traced.program.products}
    return products | {str(group.dtype) for group in groups}


def _factor(product: OptimiserProduct) -> ShapedArray:
    """With FSDP each device computes its rows of the product of an optimiser without
    `mylib.by_matrix`, and needs the whole second factor: XLA gathers it, for each product.
    """
    second = product.eqn.invars[1].aval
    assert isinstance(second, ShapedArray)
    return second


class Pricing:
    """The price of one strategy. What is sent, computed and moved is in seconds, or in bytes, by
    the place where that happens.
    """

    def __init__(self, prices: Prices, strategy: Strategy):
        self.prices, self.strategy = prices, strategy
        self.sizes, self.data = strategy.sizes, tuple(prices.traced.rows)
        self.rows, self.model = self.size(strategy.rows), self.sizes.get(MODEL, 1)
        self.sent: dict[str, float] = defaultdict(float)
        self.fixed = self._fixed()
        self.by_matrix = [*states_on(prices.traced, strategy).values()]

    def _fixed(self) -> dict[frozenset[int], Axes]:
        """For the dimensions of each weight that is fixed: over which axes it is sharded where it
        is kept, and not where it is used.
        """
        axes_by_dims: dict[frozenset[int], Axes] = {}
        traced, strategy = self.prices.traced, self.strategy
        for leaf in traced.leaves if strategy.fixes.kept else ():
            if leaf.path in strategy.fixes.kept and leaf.path in traced.in_models:
                axes = axes_of(strategy.fixes.kept[leaf.path])
                axes -= axes_of(tuple(used_spec(leaf, strategy, traced)))
                over = tuple(axis for axis in self.sizes if axis in axes)
                # A loop takes the dimension of stacked layers.
                inside = leaf.groups[int(traced.is_iterated(leaf)) :]
                axes_by_dims |= dict.fromkeys((frozenset(leaf.groups), frozenset(inside)), over)
        return axes_by_dims

    def kept_over(self, weights: GroupTable) -> dict[Axes, np.ndarray]:
        """Over which axes each of these weights is sharded where it is kept, and not where it is
        used.
        """
        usual = self.strategy.over
        if not self.fixed:
            return {usual: np.ones(len(weights.of_each), bool)}
        each = [self.fixed.get(dims, usual) for dims in weights.of_each]
        return {axes: np.array([x == axes for x in each], bool) for axes in {usual, *each}}

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def splits(self, arrays: GroupTable) -> np.ndarray:
        """In how many parts each of these arrays is."""
        by_rows, by_model = arrays.has(self.data), arrays.has(self.strategy.tensor)
        return np.where(by_rows, self.rows, 1) * np.where(by_model, self.model, 1)

    def on_each(self, nbytes: np.ndarray, arrays: GroupTable, are_kept: np.ndarray) -> np.ndarray:
        """The bytes of these arrays on each device; of those that `are_kept` as weights are, the
        part that it keeps.
        """
        nbytes = nbytes / self.splits(arrays)
        for axes, which in self.kept_over(arrays).items():
            nbytes = np.where(are_kept & which, nbytes / self.size(axes), nbytes)
        return nbytes

    def crossed(self, events: EventTable) -> tuple[np.ndarray, np.ndarray]:
        """Which events need what is split over the axes of the batch, and over "model"."""
        rows, model = (
            events.over.has(groups) & ~events.dims.has(groups)
            for groups in (self.data, self.strategy.tensor)
        )
        return rows, model

    def send(
        self, kind: str, axes: Iterable[str], nbytes: np.ndarray, places: np.ndarray
    ) -> np.ndarray:
        """The seconds of collectives in each place. Their bytes are noted."""
        over, took = tuple(axis for axis in self.sizes if axis in set(axes)), self.nothing()
        if self.size(over) <= 1 or not len(nbytes):
            return took
        times = self.prices.times[places]
        self.sent[f"{kind} over {', '.join(over)}"] += float(np.dot(nbytes, times))
        # Most weights have one of a few sizes.
        different, which = np.unique(nbytes, return_inverse=True)
        once = [self.prices.collective(kind, size, self.strategy, over) for size in different]
        np.add.at(took, places, np.array(once)[which] * times)
        return took

    def nothing(self) -> np.ndarray:
        return np.zeros(len(self.prices.times))

    def price(self) -> Price:
        low, body = self.computed()
        tensor = self.tensor().sum()
        gathers, gradients, offloads = self.gathers(), self.gradients(), self.offloads()
        moved = gathers + gradients + offloads
        hidden, moved = self.hidden(moved, body), moved.sum()
        platform = self.prices.machine.chip.platform
        exposed = tensor * (1 - _GUESSED_HIDDEN_OF_TENSOR.get(platform, 0.0))
        matrices, computed = self.matrices()
        body, low = body.sum() + computed / self.prices.real.of_products, low + computed
        sent = moved + tensor + matrices
        parts = {
            "computation": body,
            "gathers of weights": gathers.sum(),
            "sums of gradients": gradients.sum(),
            "tensor parallelism": tensor,
            "what the optimiser sends": matrices,
            "offloading": offloads.sum(),
        }
        return Price(
            seconds=float(body + exposed + matrices + moved - hidden),
            interval=(float(max(low, sent)), float(body + sent)),
            memory=self.memory(),
            parts={name: float(part) for name, part in parts.items() if part},
            sent=dict(sorted(self.sent.items())),
        )

    def hidden(self, moved: np.ndarray, body: np.ndarray) -> float:
        """How much of what is sent computation hides: only that of the same iteration of a loop,
        and of the loops in it.
        """
        total, left = 0.0, body.copy()
        # A loop comes after what is around it, which may use the time that it leaves.
        for place in reversed(self.prices.traced.program.places):
            hidden = min(_GUESSED_HIDDEN * moved[place.number], left[place.number])
            total += hidden
            left[place.outside] += (left[place.number] - hidden) * (place.number != place.outside)
        return total

    def computed(self) -> tuple[float, np.ndarray]:
        """At the data sheet's rates, and as it is assumed, in each place."""
        prices, products, body = self.prices, self.prices.products, self.nothing()
        operands, is_data = products.operands, prices.arguments.is_data
        moved = operands.bytes / self.splits(operands.dims)
        moved = np.bincount(operands.product, moved, len(products.rate))
        flops = products.amount / self.splits(products.dims) / products.rate
        times = prices.times[products.place]
        low = np.dot(times, prices.ideal.multiplying(flops, moved))
        np.add.at(body, products.place, times * prices.real.multiplying(flops, moved))
        added = self.added()
        # The optimiser reads and writes all of its state.
        added[0] += 2 * (self.held()[~is_data].sum() + self.with_owners())
        return float(low + prices.ideal.moving(added).sum()), body + prices.real.moving(added)

    def added(self) -> np.ndarray:
        """The bytes of sums that each iteration of a loop reads and writes, to add to them."""
        sums, added = self.prices.sums, self.nothing()
        nbytes = self.on_each(2 * sums.amount, sums.dims, sums.is_gradient)
        are_looped = sums.place != sums.after
        np.add.at(added, sums.place, nbytes * are_looped * self.prices.times[sums.place])
        return added

    def gathers(self) -> np.ndarray:
        moves, took = self.prices.moves, self.nothing()
        nbytes = moves.amount / self.splits(moves.dims)
        for axes, which in self.kept_over(moves.dims).items():
            took += self.send("all-gather", axes, nbytes[which], moves.place[which])
        return took

    def gradients(self) -> np.ndarray:
        sums, took = self.prices.sums, self.nothing()
        rows, (crossed, _) = set(self.strategy.rows), self.crossed(sums)
        nbytes = sums.amount / self.splits(sums.dims)
        large = sums.is_gradient & (sums.amount >= _SMALL_BYTES)
        # A gradient is reduce-scattered to where its weight is kept, and all-reduced over the other
        # axes of the rows.
        scattered = {
            axes: large & which
            for axes, which in self.kept_over(sums.dims).items()
            if self.size(axes) > 1
        }
        rest = ~np.logical_or.reduce([np.zeros_like(large), *scattered.values()])
        # What is scattered is scattered in each iteration; the rest is summed after the loop.
        places = np.where(rest, sums.after, sums.place)
        for place in np.unique(places[crossed]):
            are_here = crossed & (places == place)
            collectives = [("all-reduce", rows, nbytes[are_here & rest])]
            for axes, which in scattered.items():
                sizes = nbytes[are_here & which]
                collectives += [("reduce-scatter", set(axes), sizes)]
                collectives += [("all-reduce", rows - set(axes), sizes / self.size(axes))]
            for kind, over, sizes in collectives:
                combined = _combined(sizes)
                took += self.send(kind, over, combined, np.full(len(combined), place))
        return took

    def offloads(self) -> np.ndarray:
        """The seconds of copies to the host's memory, and back."""
        offloads, took = self.prices.offloads, self.nothing()
        once = self.prices.ideal.copying(offloads.amount / self.splits(offloads.dims))
        np.add.at(took, offloads.place, once * self.prices.times[offloads.place])
        return took

    def tensor(self) -> np.ndarray:
        sums, whole = self.prices.sums, self.prices.whole
        _, crossed = self.crossed(sums)
        nbytes = sums.amount / self.splits(sums.dims)
        took = self.send("all-reduce", (MODEL,), nbytes[crossed], sums.after[crossed])
        by_rows, by_model = self.crossed(whole)
        nbytes = whole.amount / self.splits(whole.dims)
        for axes, are_crossed in (
            (self.strategy.rows, by_rows & ~by_model),
            ((MODEL,), by_model & ~by_rows),
            ((*self.strategy.rows, MODEL), by_rows & by_model),
        ):
            took += self.send("all-gather", axes, nbytes[are_crossed], whole.place[are_crossed])
        if self.strategy.saved is not None:
            inputs = self.prices.inputs
            nbytes = np.repeat(inputs.amount / self.splits(inputs.dims), _GATHERED)
            took += self.send("all-gather", (MODEL,), nbytes, np.repeat(inputs.place, _GATHERED))
        return took

    def matrices(self) -> tuple[float, float]:
        """The seconds of what an optimiser of whole matrices sends, which nothing hides, as each
        product waits for the one before it; and what it computes more at the data sheet's rates
        than was counted: less than nothing where each device computes its rows of products.
        """
        products, over = self.prices.matrices, self.strategy.over
        sent: dict[tuple[str, Axes], list[float]] = defaultdict(list)
        for product, _ in products:
            size = bytes_of(_factor(product)) / self.model
            sent["all-gather", over] += [size] * product.times
        for state in self.by_matrix:
            for kind, axes, nbytes in sent_by(state):
                sent[kind, axes].append(nbytes)
        took = [
            self.send(kind, axes, np.array(sizes), np.zeros(len(sizes), int)).sum()
            for (kind, axes), sizes in sent.items()
        ]
        rates = self.prices.ideal.flops
        # They are divided over "model" already, as weights are.
        alone = sum(flops / rates[str(_factor(x).dtype)] / self.model for x, flops in products)
        owned = sum(seconds_of(state, rates) for state in self.by_matrix)
        return float(sum(took)), owned - alone * (1 - 1 / self.size(over))

    def held(self) -> np.ndarray:
        """The bytes of each argument on each device."""
        arguments = self.prices.arguments
        return self.on_each(arguments.bytes, arguments.dims, ~arguments.is_whole)

    def with_owners(self) -> int:
        """The bytes of the states of `by_matrix` on each device."""
        return sum(map(state_bytes, self.by_matrix))

    def memory(self) -> int:
        """What each device holds at the peak."""
        lives = self.prices.lives
        nbytes = self.on_each(lives.bytes, lives.dims, lives.is_kept)
        if self.strategy.saved is not None:
            # `saved=` divides what layers hand to each other, if "model" doesn't divide it already.
            saved = lives.is_between & ~lives.dims.has(self.strategy.tensor)
            nbytes = np.where(saved, nbytes / self.model, nbytes)
        # The peak is found by adding up changes, in an array with a place for each moment.
        changes = np.zeros(lives.stop.max(initial=0) + 1)
        np.add.at(changes, lives.start, nbytes)
        np.add.at(changes, lives.stop, -nbytes)
        return int(self.held().sum() + self.with_owners() + np.cumsum(changes).max())


def _combined(nbytes: np.ndarray) -> np.ndarray:
    """The small ones together, as XLA combines them."""
    small = nbytes[nbytes < _COMBINED].sum()
    count = math.ceil(small / _COMBINED)
    return np.concatenate([nbytes[nbytes >= _COMBINED], np.full(count, small / max(count, 1))])
