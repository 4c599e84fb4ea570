"""Dimensions that must be split alike, by union-find."""

import math
from collections.abc import Iterable, Iterator, Sequence

# The dimensions of an array, as nodes.
Nodes = tuple[int, ...]


class Dims:
    """Each dimension of each value is a node; dimensions that an operation maps to each other are
    joined. A group can be split into n parts if n divides its `parts`, such as the number of heads
    where heads and their width are one dimension.
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._parts: list[int] = []
        self._sizes: list[int] = []

    def new(self, shape: Iterable[int]) -> Nodes:
        nodes: list[int] = []
        for size in shape:
            nodes.append(len(self._parent))
            self._parent.append(len(self._parent))
            self._parts.append(int(size))
            self._sizes.append(int(size))
        return tuple(nodes)

    def sizes(self, nodes: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._sizes[node] for node in nodes)

    def group(self, node: int) -> int:
        """The group of a node, as one of its nodes."""
        parent = self._parent
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    def groups(self, nodes: Iterable[int]) -> Nodes:
        return tuple(map(self.group, nodes))

    def parts(self, node: int) -> int:
        return self._parts[self.group(node)]

    def join(self, a: int, b: int) -> None:
        a, b = sorted((self.group(a), self.group(b)))
        # A dimension of size 1 is broadcast, not split: it is joined with others of size 1 alone.
        are_ones = self._sizes[a] == self._sizes[b] == 1
        if a != b and (are_ones or min(self._parts[a], self._parts[b]) > 1):
            self._parent[b] = a
            self._parts[a] = math.gcd(self._parts[a], self._parts[b])

    def join_all(self, xs: Iterable[int], ys: Iterable[int]) -> None:
        for x, y in zip(xs, ys, strict=False):
            self.join(x, y)

    def limit(self, node: int, parts: int) -> None:
        """Lets the group of a node be split into no other numbers than those that divide this."""
        group = self.group(node)
        self._parts[group] = math.gcd(self._parts[group], parts)


def pairs_of_reshape(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The dimensions of an array, and those of its reshape, that are split alike. Where one becomes
    several, it is the slowest of them: heads, if heads and their width come apart.
    """
    # Without elements any sizes fit to each other.
    if 0 in before:
        return
    i = j = 0
    while i < len(before) and j < len(after):
        first, a, b = (i, j), before[i], after[j]
        while a != b:
            if a < b:
                i += 1
                a *= before[i]
            else:
                j += 1
                b *= after[j]
        # Dimensions of size 1 are nothing to split.
        x = [k for k in range(first[0], i + 1) if before[k] > 1]
        y = [k for k in range(first[1], j + 1) if after[k] > 1]
        if x and y:
            yield x[0], y[0]
        i, j = i + 1, j + 1
