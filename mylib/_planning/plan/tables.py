"""What a traced step computes, sends and holds, as tables: a column is an array with a number for
each row.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..._core.dims import Event, Nodes, Sum, bytes_of
from .lifetimes import lives_of
from .matrices import OF_MESH
from .trace import SMALL, TracedStep

# The group of a node.
GroupOf = Callable[[int], int]


class GroupTable:
    """The groups of the dimensions of each row's array."""

    def __init__(self, arrays: Iterable[Nodes], group: GroupOf):
        groups = [[group(node) for node in nodes] for nodes in arrays]
        self.of_each = list(map(frozenset, groups))
        self._flat = np.array([x for of_array in groups for x in of_array], int)
        self._ends = np.cumsum([0, *map(len, groups)])
        self._having: dict[tuple[int, ...], np.ndarray] = {}

    def has(self, groups: Iterable[int]) -> np.ndarray:
        """Which of the arrays have a dimension of these groups."""
        key = tuple(groups)
        if key not in self._having:
            # All arrays at once: there are thousands of them, and hundreds of strategies.
            counts = np.cumsum([0, *np.isin(self._flat, key)])[self._ends]
            self._having[key] = counts[1:] > counts[:-1]
        return self._having[key]


class EventTable:
    """What happens.

    - `place`: the number of the place.
    - `amount`: bytes.
    - `dims`: the dimensions that divide it.
    - `over`: the dimensions that are summed over, or needed whole.
    """

    def __init__(self, events: Sequence[Event], group: GroupOf):
        self.place = np.array([x.place.number for x in events], int)
        self.amount = np.array([x.amount for x in events], float)
        self.dims = GroupTable((x.dims for x in events), group)
        self.over = GroupTable((x.over for x in events), group)


class ProductTable(EventTable):
    """Products; `amount` is in FLOPs.

    - `rate`: in FLOPs per second.
    - `operands`: what they read and write.
    """

    def __init__(self, traced: TracedStep, rates: Mapping[str, float], group: GroupOf):
        products = traced.program.products
        super().__init__(products, group)
        self.rate = np.array([rates[product.dtype] for product in products])
        self.operands = OperandTable(traced, group)


class OperandTable:
    """What products read and write.

    - `product`: the row of the product.
    - `bytes`.
    - `dims`: the dimensions that divide it.
    """

    def __init__(self, traced: TracedStep, group: GroupOf):
        products = enumerate(traced.program.products)
        operands = [(i, *operand) for i, product in products for operand in product.operands]
        self.product = np.array([i for i, _, _ in operands], int)
        self.bytes = np.array([size for _, size, _ in operands], float)
        self.dims = GroupTable((nodes for _, _, nodes in operands), group)


class SumTable(EventTable):
    """Sums over rows or other dimensions. Of those that are added to each other first, only one
    array is sent.

    - `after`: the place where it is all-reduced: outside of loops that only add to it.
    - `is_gradient`: whether it is the gradient of a weight that may be sharded.
    """

    def __init__(self, traced: TracedStep, group: GroupOf):
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
        sent: list[Sum] = []
        are_gradients: list[bool] = []
        for sums in together.values():
            largest = max(sums, key=lambda sum_: sum_.amount)
            dims = frozenset(map(group, largest.dims))
            are_gradients.append(any(x.scattered for x in sums) or dims in parts_of_weights)
            over = tuple({group(node) for sum_ in sums for node in sum_.over})
            sent.append(replace(largest, over=over, after=largest.root.after))
        super().__init__(sent, group)
        self.after = np.array([x.after.number for x in sent], int)
        self.is_gradient = np.array(are_gradients, bool)


class ArgumentTable:
    """The arguments of a step.

    - `bytes`: without what depends on the mesh in states of `by_matrix`.
    - `dims`: the dimensions that divide it.
    - `is_data`: whether it has rows of the batch.
    - `is_whole`: whether FSDP leaves it whole.
    """

    def __init__(self, traced: TracedStep, group: GroupOf):
        leaves, on_mesh = traced.leaves, tuple(x + end for x in traced.states for end in OF_MESH)
        sizes = [0 if x.path.startswith(on_mesh) else bytes_of(x.aval) for x in leaves]
        self.bytes = np.array(sizes, float)
        self.dims = GroupTable((leaf.groups for leaf in leaves), group)
        self.is_data = np.array([leaf.is_data for leaf in leaves], bool)
        self.is_whole = self.is_data | np.array([leaf.is_small for leaf in leaves], bool)


class LifeTable:
    """The arrays that a program holds.

    - `bytes`.
    - `dims`: the dimensions that divide it.
    - `start`, `stop`: the numbers of two moments.
    - `is_kept`: whether it is sharded as weights are where they are kept.
    - `is_between`: whether layers hand it to each other.
    """

    def __init__(self, traced: TracedStep, values_last: bool, group: GroupOf):
        lives = [one for scope in traced.program.scopes for one in lives_of(scope, values_last)]
        self.bytes = np.array([one.bytes for one in lives], float)
        self.dims = GroupTable((one.nodes for one in lives), group)
        _, moments = np.unique([(one.start, one.stop) for one in lives], return_inverse=True)
        self.start, self.stop = moments.reshape(-1, 2).T
        at_top = np.array([one.top and not one.gathered for one in lives], bool)
        forms = [(tuple(map(group, one.nodes)), one.shape) for one in lives]
        like_weights = at_top & np.array([form in traced.weights for form in forms], bool)
        self.is_kept = like_weights & np.array(
            [math.prod(one.shape) >= SMALL for one in lives], bool
        )
        once = np.array([one.times == 1 for one in lives], bool)
        self.is_between = at_top & once & ~like_weights
