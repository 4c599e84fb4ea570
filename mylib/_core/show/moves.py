"""The moves between two trees, and the bytes that had to be received for them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.tree_util as jtu

from ..placement import Bounds, memory_kind, parts_of
from ..tree import KeyPath, canonical_dtype
from .parts import overlap, size_of
from .rows import DELETED, NUMPY, Row, meaning

HOST = "host memory"


@dataclass(frozen=True)
class Move:
    """One array leaf of the trees in `mylib.show(before, after)`.

    **Attributes:**

    - `path`: the keys that lead to it.
    - `before`, `after`: a `mylib.results.Row` each; None if the leaf isn't in that tree.
    - `what`: what has happened, in words: `"moved"`, `"new"`, ...; empty if nothing has.
    - `received`: for each device, how many bytes it holds afterwards that it did not hold before;
        the key is `"host memory"` for NumPy. None if that isn't known.
    - `nbytes`: their sum; 0 if unknown.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        before = {"w": jnp.ones((64, 64))}
        after = mylib.filter_shard(before, P("data"), mesh=mesh)
        (move,) = mylib.show(before, after).moves
        print(move.what, move.nbytes)
        ```
    """

    before: Row | None
    after: Row | None

    @property
    def path(self) -> KeyPath:
        return self.row.path

    @property
    def row(self) -> Row:
        """The leaf as it is now, or was."""
        row = self.after or self.before
        assert row is not None
        return row

    @cached_property
    def received(self) -> dict[Any, int] | None:
        if self.before is None or self.after is None or self._differs:
            return {}
        held, holds = _held(self.before), _held(self.after)
        if held is None or holds is None:
            return None
        size = self.after.leaf.dtype.itemsize
        received = {
            where: (size_of(part) - (overlap(part, held[where]) if where in held else 0)) * size
            for where, part in holds.items()
        }
        return {device: nbytes for (device, _), nbytes in received.items() if nbytes}

    @property
    def nbytes(self) -> int:
        return sum((self.received or {}).values())

    @cached_property
    def what(self) -> str:
        before, after = self.before, self.after
        if before is None or after is None:
            return "new" if before is None else "gone"
        if after.state == DELETED != before.state:
            return "deleted"
        if self._differs:
            return f"was {before.leaf.dtype} {before.leaf.shape}"
        if self.received is None:
            return "unknown"
        if self.received:
            return "moved"
        if meaning(before.place) != meaning(after.place):
            return "another sharding"
        return "" if before.state in (DELETED, after.state) else f"now {after.state}"

    @property
    def _differs(self) -> bool:
        """Whether it is an array of another shape or dtype."""
        assert self.before is not None and self.after is not None
        before, after = self.before.leaf, self.after.leaf
        # JAX holds NumPy's 64 bits as 32: that is a move, and no other array.
        return (before.shape, canonical_dtype(before)) != (after.shape, canonical_dtype(after))

    @cached_property
    def likeness(self) -> Hashable:
        """Moves share a line if these are equal."""
        rows = (row and row.likeness for row in (self.before, self.after))
        return self.what, self.nbytes, *rows


def _held(row: Row) -> dict[tuple[Any, str | None], Bounds] | None:
    """The part of a leaf that is in each memory; None if that isn't known."""
    whole = tuple((0, dim) for dim in row.leaf.shape)
    if row.state == NUMPY:
        return {(HOST, None): whole}
    if row.place is None or row.symbolic:
        return None
    kind = memory_kind(row.place)
    return {(device, kind): part for device, part in parts_of(row.place, row.leaf.shape).items()}


def moves_between(before: Sequence[Row], after: Sequence[Row]) -> tuple[Move, ...]:
    """A move for each leaf of two trees, those of the later one first."""
    earlier = {jtu.keystr(row.path): row for row in before}
    moves = [Move(earlier.pop(jtu.keystr(row.path), None), row) for row in after]
    return (*moves, *(Move(row, None) for row in earlier.values()))
