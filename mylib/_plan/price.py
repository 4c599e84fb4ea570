"""What a strategy costs: memory, bytes and seconds, without a compiler.

Rates and links are those of `mylib.audit(...).estimate`. What of the communication is hidden is
assumed here, because without a compiler there is no schedule.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import jax
import numpy as np

from .._audit import Message, seconds, speeds
from .._dims import Event, Nodes, Sum, bytes_of
from .._fsdp import unfit_for_8_bits
from .._products import products_of_equation
from .._programs import OptimiserProduct, products_of_optimisers
from ..machines import Machine
from .fixes import MODEL, axes_of
from .layers import weights_of
from .lifetimes import Live, lives_of
from .matrices import OF_MESH, seconds_of, sent_by, state_bytes, states_on
from .strategy import Strategy, used_spec
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
    missing = {name: x for name, x in _GUESSED_FIGURES.items() if not getattr(chip, name)}
    figures = {"host_bandwidth": chip.host_bandwidth or _TYPICAL_OF_HOSTS, **missing}
    return dataclasses.replace(machine, chip=dataclasses.replace(chip, **figures)), bool(missing)


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
    """The prices of strategies of one traced step on one machine. All that is the same for several
    of them is found once.
    """

    def __init__(self, traced: TracedStep, machine: Machine):
        self.traced, self.machine = traced, machine
        program, dims = traced.program, traced.program.dims
        group = cache(dims.group)

        def groups_of(arrays: Iterable[Nodes]) -> _GroupsOfMany:
            return _GroupsOfMany([[group(x) for x in nodes] for nodes in arrays])

        self.ideal, self.real, _ = speeds(machine.chip, _dtypes(traced))
        self.products = _Events(program.products, groups_of)
        self.rates = np.array([self.ideal.flops[product.dtype] for product in program.products])
        operands = [(i, *x) for i, product in enumerate(program.products) for x in product.operands]
        self.operands = groups_of(nodes for *_, nodes in operands)
        self.operand_of, self.operand_bytes = (
            np.array([x[i] for x in operands], dtype) for i, dtype in enumerate((int, float))
        )
        # Small weights are whole, as `rules.fsdp` has it, so they are not gathered.
        self.moves = _Events(_moves(traced), groups_of)
        self.whole = _Events(program.whole, groups_of)
        self.offloads = _Events(program.offloads, groups_of)
        self.inputs = _Events([x for x in traced.inputs if x is not None], groups_of)
        sums, self.is_gradient = _sums_together(traced, group)
        self.sums = _Events(sums, groups_of)
        self.matrices = [
            (x, 2.0 * x.times * products_of_equation(x.eqn))
            for x in products_of_optimisers(traced.jaxpr)
            if _factor(x).size >= SMALL
        ]
        self.after = np.array([x.after.number for x in sums], int)
        self.times_of = np.array([x.times for x in program.places])
        leaves = traced.leaves
        self.held_dims = groups_of(leaf.groups for leaf in leaves)
        self.held_bytes = _held_bytes(traced)
        self.is_data = np.array([leaf.is_data for leaf in leaves], bool)
        self.is_whole = self.is_data | np.array([leaf.is_small for leaf in leaves], bool)
        self._links: dict[Any, float] = {}
        values_last = machine.chip.platform != "tpu"
        lives = [x for scope in program.scopes for x in lives_of(scope, values_last)]
        self.is_kept, self.is_between = _kinds_of(lives, traced, group)
        self._hold(lives, groups_of)

    def _hold(self, lives: Sequence[Live], groups_of: Callable[[Any], "_GroupsOfMany"]) -> None:
        """Sets what is held, and when."""
        self.lives = groups_of(x.nodes for x in lives)
        self.live_bytes = np.array([float(x.bytes) for x in lives])
        # The moments are numbered; these are the numbers of all starts, and of all stops.
        # The peak is found by adding up changes, in an array with a place for each moment.
        _, moments = np.unique([(x.start, x.stop) for x in lives], return_inverse=True)
        self.starts, self.stops = moments.reshape(-1, 2).T

    @cached_property
    def moves_in_8_bits(self) -> Any:
        return _sent_in_8_bits(self.traced)

    def price(self, strategy: Strategy) -> Price:
        return _Pricing(self, strategy).price()

    def memory(self, strategy: Strategy, micro_batches: int) -> int:
        """What each device would hold if the step looped over as many micro-batches."""
        return _Pricing(self, strategy).memory(micro_batches)

    def collective(self, kind: str, nbytes: float, axes: tuple[str, ...], sizes: Any) -> float:
        """Seconds of a collective of as many bytes, as `Collective.bytes` counts them."""
        count = math.prod(sizes[axis] for axis in axes)
        # In a ring each device sends all parts but one, and an all-reduce goes around twice.
        wire = int(nbytes * (count - 1) / count * (2 if kind == "all-reduce" else 1))
        key = kind, axes, wire, tuple(sizes.items())
        if key not in self._links:
            message = Message(kind, axes, wire, 1)
            self._links[key] = seconds(message, sizes, self.machine)[0]
        return self._links[key]


def _moves(traced: TracedStep) -> list[Event]:
    return [x for x in traced.program.moves if x.amount >= _SMALL_BYTES]


def _sent_in_8_bits(traced: TracedStep) -> Any:
    """The bytes of the moves, if `fully_shard` sends in 8 bits the weights of layers, or slices of
    those of stacked layers, that are fit for it. Without their scales, which are few.
    """
    inside = {
        path + in_model
        for path, role in traced.models.items()
        for weights in weights_of(role.module, traced.layers or (type(role.module),))
        for in_model in weights
    }
    sizes: dict[tuple[int, ...], int] = {}
    for leaf in traced.leaves:
        first = int(traced.is_iterated(leaf))
        weight = jax.ShapeDtypeStruct(leaf.aval.shape[first:], leaf.aval.dtype)
        if leaf.path in inside and not unfit_for_8_bits(weight):
            sizes[tuple(leaf.groups[first:])] = weight.size
    group = traced.program.dims.group
    each = [sizes.get(tuple(map(group, x.dims)), x.amount) for x in _moves(traced)]
    return np.array(each, float)


def _dtypes(traced: TracedStep) -> set[str]:
    """Those of products."""
    groups = [group for state in traced.states.values() for group in state.layout.groups]
    return {x.dtype for x in traced.program.products} | {str(group.dtype) for group in groups}


def _held_bytes(traced: TracedStep) -> Any:
    """Of each argument. What depends on the mesh in states of `by_matrix` is not among them."""
    on_mesh = tuple(path + part for path in traced.states for part in OF_MESH)
    leaves = traced.leaves
    return np.array(
        [0.0 if x.path.startswith(on_mesh) else float(bytes_of(x.aval)) for x in leaves]
    )


def _factor(product: OptimiserProduct) -> Any:
    """With FSDP each device computes its rows of the product of an optimiser without
    `mylib.by_matrix`, and needs the whole second factor: XLA gathers it, for each product.
    """
    return product.eqn.invars[1].aval


class _GroupsOfMany:
    """The groups of dimensions of many arrays."""

    def __init__(self, groups: Sequence[Sequence[int]]):
        self._flat = np.array([x for of_array in groups for x in of_array], int)
        self._ends = np.cumsum([0, *map(len, groups)])
        self._groups = groups
        self._having: dict[tuple[int, ...], Any] = {}

    @cached_property
    def keys(self) -> list[frozenset[int]]:
        return list(map(frozenset, self._groups))

    def has(self, groups: Iterable[int]) -> Any:
        """Which of the arrays have a dimension of these groups."""
        key = tuple(groups)
        if key not in self._having:
            # All arrays at once: there are thousands of them, and hundreds of strategies.
            counts = np.cumsum([0, *np.isin(self._flat, key)])[self._ends]
            self._having[key] = counts[1:] > counts[:-1]
        return self._having[key]


class _Events:
    """Events as arrays: the numbers of their places, and the groups of the dimensions that divide
    and cross them.
    """

    def __init__(self, events: Sequence[Event], groups_of: Callable[[Any], _GroupsOfMany]):
        self.places = np.array([x.place.number for x in events], int)
        self.amounts = np.array([x.amount for x in events], float)
        self.dims = groups_of(x.dims for x in events)
        self.over = groups_of(x.over for x in events)


def _sums_together(traced: TracedStep, group: Callable[[int], int]) -> tuple[list[Sum], Any]:
    """Merges sums done together, and tells which are gradients of sharded weights."""
    together: dict[int, list[Sum]] = {}
    for sum_ in traced.program.sums:
        together.setdefault(id(sum_.root), []).append(sum_)
    # A gradient may lack dimensions of its weight: inside of a loop it has none for the layers.
    parts_of_weights = {
        frozenset(part)
        for dims, _ in traced.weights
        for count in range(len(dims) + 1)
        for part in itertools.combinations(dims, count)
    }
    largest_sums: list[Sum] = []
    is_gradient: list[bool] = []
    for sums in together.values():
        # They are added first, so only one array of their size is sent.
        largest = max(sums, key=lambda sum_: sum_.amount)
        dims = frozenset(map(group, largest.dims))
        is_gradient.append(any(x.scattered for x in sums) or dims in parts_of_weights)
        over = tuple({group(x) for sum_ in sums for x in sum_.over})
        largest_sums.append(dataclasses.replace(largest, over=over, after=largest.root.after))
    return largest_sums, np.array(is_gradient, bool)


def _kinds_of(lives: Sequence[Live], traced: TracedStep, group: Callable[[int], int]) -> Any:
    """Which arrays are kept as weights are, and which are held between layers."""
    at_top = np.array([x.top and not x.gathered for x in lives], bool)
    like_weights = [(tuple(map(group, x.nodes)), x.shape) in traced.weights for x in lives]
    large = np.array([math.prod(x.shape) >= SMALL for x in lives], bool)
    once = np.array([x.times == 1 for x in lives], bool)
    kept_at_top = at_top & np.array(like_weights, bool)
    return kept_at_top & large, at_top & once & ~kept_at_top


class _Pricing:
    """One price."""

    def __init__(self, prices: Prices, strategy: Strategy):
        self.prices, self.strategy = prices, strategy
        self.sizes, self.data = strategy.sizes, tuple(prices.traced.rows)
        self.rows = self.size(strategy.rows)
        self.model = self.sizes.get(MODEL, 1)
        self.sent: dict[str, float] = {}
        self.fixed = self._fixed()
        self.by_matrix = [*states_on(prices.traced, strategy).values()]

    def _fixed(self) -> dict[frozenset[int], tuple[str, ...]]:
        """For the dimensions of each weight that is fixed: over which axes it is sharded where it
        is kept, and not where it is used.
        """
        axes_by_dims: dict[frozenset[int], tuple[str, ...]] = {}
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

    def kept_over(self, arrays: _GroupsOfMany) -> dict[tuple[str, ...], Any]:
        """Over which axes each of these weights is sharded where it is kept, and not where it is
        used.
        """
        usual = self.strategy.over
        if not self.fixed:
            return {usual: True}
        each = [self.fixed.get(key, usual) for key in arrays.keys]
        return {axes: np.array([x == axes for x in each], bool) for axes in {usual, *each}}

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def splits(self, arrays: _GroupsOfMany) -> Any:
        """In how many parts each of these arrays is."""
        by_rows, by_model = arrays.has(self.data), arrays.has(self.strategy.tensor)
        return np.where(by_rows, self.rows, 1) * np.where(by_model, self.model, 1)

    def on_each(self, nbytes: Any, arrays: _GroupsOfMany, are_kept: Any) -> Any:
        """The bytes of these arrays on each device; of those that `are_kept` as weights are, the
        part that it keeps.
        """
        nbytes = nbytes / self.splits(arrays)
        for axes, which in self.kept_over(arrays).items():
            nbytes = np.where(are_kept & which, nbytes / self.size(axes), nbytes)
        return nbytes

    def crossed(self, events: _Events) -> tuple[Any, Any]:
        """Which events need what is split over the axes of the batch, and over "model"."""
        return tuple(
            events.over.has(groups) & ~events.dims.has(groups)
            for groups in (self.data, self.strategy.tensor)
        )

    def send(self, kind: str, axes: Iterable[str], nbytes: Any, places: Any) -> Any:
        """The seconds of collectives in each place. Their bytes are noted."""
        over, took = tuple(axis for axis in self.sizes if axis in set(axes)), self.nothing()
        if self.size(over) <= 1 or not len(nbytes):
            return took
        name, times = f"{kind} over {', '.join(over)}", self.prices.times_of[places]
        self.sent[name] = self.sent.get(name, 0.0) + float(np.dot(nbytes, times))
        # Most weights have one of a few sizes.
        different, which = np.unique(nbytes, return_inverse=True)
        once = np.array([self.prices.collective(kind, x, over, self.sizes) for x in different])
        np.add.at(took, places, once[which] * times)
        return took

    def nothing(self) -> Any:
        """No seconds, in each place."""
        return np.zeros(len(self.prices.times_of))

    def price(self) -> Price:
        low, body = self.computed()
        tensor = self.tensor().sum()
        gathers, gradients, offloads = self.gathers(), self.gradients(), self.offloads()
        moved = gathers + gradients + offloads
        hidden, moved = self.hidden(moved, body), moved.sum()
        exposed = tensor * (
            1 - _GUESSED_HIDDEN_OF_TENSOR.get(self.prices.machine.chip.platform, 0.0)
        )
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
            parts={name: float(x) for name, x in parts.items() if x},
            sent=dict(sorted(self.sent.items())),
        )

    def hidden(self, moved: Any, body: Any) -> float:
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

    def computed(self) -> tuple[float, Any]:
        """At the data sheet's rates, and as it is assumed, in each place."""
        prices, ideal, real = self.prices, self.prices.ideal, self.prices.real
        products, body = prices.products, self.nothing()
        moved = prices.operand_bytes / self.splits(prices.operands)
        moved = np.bincount(prices.operand_of, moved, len(prices.rates)) / ideal.memory
        flops = products.amounts / self.splits(products.dims) / prices.rates
        times = prices.times_of[products.places]
        # A device computes and reads at the same time: the slower of the two counts.
        low = np.dot(times, np.maximum(flops, moved))
        taken = np.maximum(flops / real.of_products, moved / real.of_memory)
        np.add.at(body, products.places, times * taken)
        added = self.added() / ideal.memory
        # The optimiser reads and writes all of its state.
        held = self.held()[~prices.is_data].sum() + self.with_owners()
        added[0] += 2 * held / ideal.memory
        return float(low + added.sum()), body + added / real.of_memory

    def added(self) -> Any:
        """The bytes of sums that each iteration of a loop reads and writes, to add to them."""
        sums, added = self.prices.sums, self.nothing()
        are_looped = sums.places != self.prices.after
        nbytes = self.on_each(2 * sums.amounts, sums.dims, self.prices.is_gradient)
        times = are_looped * self.prices.times_of[sums.places]
        np.add.at(added, sums.places, nbytes * times)
        return added

    def gathers(self) -> Any:
        moves, took = self.prices.moves, self.nothing()
        amounts = moves.amounts if self.strategy.sent is None else self.prices.moves_in_8_bits
        nbytes = amounts / self.splits(moves.dims)
        for axes, which in self.kept_over(moves.dims).items():
            gathered = np.broadcast_to(which, nbytes.shape)
            took += self.send("all-gather", axes, nbytes[gathered], moves.places[gathered])
        return took

    def gradients(self) -> Any:
        prices, sums, took = self.prices, self.prices.sums, self.nothing()
        rows, (crossed, _) = set(self.strategy.rows), self.crossed(sums)
        nbytes = sums.amounts / self.splits(sums.dims)
        large = prices.is_gradient & (sums.amounts >= _SMALL_BYTES)
        # A gradient is reduce-scattered to where its weight is kept, and all-reduced over the other
        # axes of the rows.
        scattered = {
            axes: large & which
            for axes, which in self.kept_over(sums.dims).items()
            if self.size(axes) > 1
        }
        rest = ~np.logical_or.reduce([np.zeros_like(large), *scattered.values()])
        # What is scattered is scattered in each turn; the rest is summed after the loop.
        places = np.where(rest, prices.after, sums.places)
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

    def offloads(self) -> Any:
        """The seconds of copies to the host's memory, and back, in each place."""
        offloads, took = self.prices.offloads, self.nothing()
        seconds = offloads.amounts / self.splits(offloads.dims) / self.prices.ideal.host
        np.add.at(took, offloads.places, seconds * self.prices.times_of[offloads.places])
        return took

    def tensor(self) -> Any:
        prices, sums, whole = self.prices, self.prices.sums, self.prices.whole
        _, crossed = self.crossed(sums)
        nbytes = sums.amounts / self.splits(sums.dims)
        took = self.send("all-reduce", (MODEL,), nbytes[crossed], prices.after[crossed])
        by_rows, by_model = self.crossed(whole)
        nbytes = whole.amounts / self.splits(whole.dims)
        for axes, are_crossed in (
            (self.strategy.rows, by_rows & ~by_model),
            ((MODEL,), by_model & ~by_rows),
            ((*self.strategy.rows, MODEL), by_rows & by_model),
        ):
            took += self.send("all-gather", axes, nbytes[are_crossed], whole.places[are_crossed])
        if self.strategy.saved is not None:
            inputs = prices.inputs
            nbytes = np.repeat(inputs.amounts / self.splits(inputs.dims), _GATHERED)
            took += self.send("all-gather", (MODEL,), nbytes, np.repeat(inputs.places, _GATHERED))
        return took

    def matrices(self) -> tuple[float, float]:
        """The seconds of what an optimiser of whole matrices sends, which nothing hides, as each
        product waits for the one before it; and what it computes more at the data sheet's rates
        than was counted: less than nothing where each device computes its rows of products.
        """
        products, over = self.prices.matrices, self.strategy.over
        sent = [
            ("all-gather", over, bytes_of(_factor(x)) / self.model)
            for x, _ in products
            for _ in range(x.times)
        ]
        sent += [x for state in self.by_matrix for x in sent_by(state)]
        by_kind: dict[Any, list[float]] = {}
        for kind, axes, nbytes in sent:
            by_kind.setdefault((kind, axes), []).append(nbytes)
        took = [
            self.send(kind, axes, np.array(nbytes), np.zeros(len(nbytes), int)).sum()
            for (kind, axes), nbytes in by_kind.items()
        ]
        rates = self.prices.ideal.flops
        # They are divided over "model" already, as weights are.
        alone = sum(flops / rates[str(_factor(x).dtype)] / self.model for x, flops in products)
        owned = sum(seconds_of(state, rates) for state in self.by_matrix)
        return float(sum(took)), owned - alone * (1 - 1 / self.size(over))

    def held(self) -> Any:
        """The bytes of each argument on each device."""
        prices = self.prices
        return self.on_each(prices.held_bytes, prices.held_dims, ~prices.is_whole)

    def with_owners(self) -> int:
        """The bytes of the states of `by_matrix` on each device."""
        return sum(map(state_bytes, self.by_matrix))

    def memory(self, micro_batches: int = 1) -> int:
        """What each device holds at the peak; in a loop over as many micro-batches, which adds
        their gradients.
        """
        prices = self.prices
        nbytes = self.on_each(prices.live_bytes, prices.lives, prices.is_kept)
        nbytes = np.where(prices.lives.has(self.data), nbytes / micro_batches, nbytes)
        if self.strategy.saved is not None:
            # `saved=` divides what layers hand to each other, if "model" doesn't divide it already.
            saved = prices.is_between & ~prices.lives.has(self.strategy.tensor)
            nbytes = np.where(saved, nbytes / self.model, nbytes)
        changes = np.zeros(prices.stops.max(initial=0) + 1)
        np.add.at(changes, prices.starts, nbytes)
        np.add.at(changes, prices.stops, -nbytes)
        sums = prices.sums
        nbytes = self.on_each(sums.amounts, sums.dims, prices.is_gradient)
        added = np.dot(nbytes * prices.is_gradient, prices.times_of[sums.places])
        held = self.held().sum() + self.with_owners() + added * (micro_batches > 1)
        return int(held + np.cumsum(changes).max())


def _combined(nbytes: Any) -> Any:
    """The small ones together, as XLA combines them."""
    small = nbytes[nbytes < _COMBINED].sum()
    count = math.ceil(small / _COMBINED)
    return np.concatenate([nbytes[nbytes >= _COMBINED], np.full(count, small / max(count, 1))])
