"""`show`: where everything is, as a table and as pictures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import EllipsisType
from typing import Any, overload

from jaxtyping import PyTree

from ..errors import folded
from ..placement import current_world
from ..text import counted, listed, show_bytes
from ..tree import split
from .current_places import notes_in, present_rows, static_leaves
from .drawing import draw
from .meshes import Meshes
from .moves import HOST, Move, moves_between
from .rows import Row, Rows, sizes, totals
from .shown import Shown
from .text import Paint, show_device


@overload
def show(tree: PyTree[Any], /) -> "Overview": ...


@overload
def show(before: PyTree[Any], after: PyTree[Any], /) -> "Changes": ...


def show(tree: PyTree[Any], after: "PyTree[Any] | EllipsisType" = ..., /) -> "Overview | Changes":
    """Shows where every array of a tree is: a table in a terminal, a page with pictures in a
    notebook. Moves nothing, and reads no values.

    **Arguments:**

    - `tree`: any PyTree: of arrays, also those of several processes; of `jax.ShapeDtypeStruct`s; of
        traced values, inside `jax.jit`; of NumPy arrays, keys, deleted arrays and anything else.
        For a single array there is a drawing of which device holds which part.
    - `after`: a later tree. Then shows what has moved since `tree`, and how many bytes the devices
        had to receive for that.

    **Returns:**

    A `mylib.results.Overview` of one tree, or the `mylib.results.Changes` between two. As
    text it has colours if the standard output is a terminal and `NO_COLOR` is not set.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=4, model=2)
        model = eqx.nn.MLP(8, 8, 64, 2, key=jax.random.key(0))
        fsdp = mylib.rules.fsdp("data", min_size=0)
        sharded = mylib.filter_shard(model, fsdp, mesh=mesh)
        print(mylib.show(sharded))
        print(mylib.show(sharded.layers[0].weight))
        print(mylib.show(model, sharded))
        ```
    """
    world = current_world()
    leaves = split(tree)
    rows = present_rows(leaves, world)
    if after is not ...:
        return Changes(moves_between(rows, present_rows(split(after), world)))
    return Overview(rows, static_leaves(leaves), notes_in(tree))


@dataclass(frozen=True, repr=False)
class Overview(Shown, Rows):
    """Where every array of a tree is: the result of `mylib.show`. Prints as a table, in which
    leaves that differ only by an index share a line. In a notebook it is a page with pictures.

    **Attributes:**

    - `rows`: a `mylib.results.Row` for each array leaf.
    - `static`: the type of each other leaf, by its path.
    - `nbytes`: the bytes of all arrays, each counted once.
    - `bytes_by_device`: the bytes that each device holds in its own memory. The devices of an
        abstract mesh are numbered.
    - `most_loaded`: the device that holds the most bytes, and their number; None if no device holds
        any.
    - `notes`: as of an `mylib.results.Explanation`.

    !!! Example

        ```python
        overview = mylib.show({"w": jnp.ones((64, 64)), "name": "mine"})
        print(overview)
        assert overview.nbytes == 64 * 64 * 4
        assert overview.static == {"['name']": "str"}
        ```
    """

    static: dict[str, str]
    notes: tuple[str, ...] = ()

    _header = ("array", "shape", "dtype", "spec", "state", "bytes", "per device")

    def _cells(self, label: str, alike: Sequence[Row]) -> tuple[str, ...]:
        row, (nbytes, per_device) = alike[0], sizes(alike)
        shape, dtype = str(row.leaf.shape), str(row.leaf.dtype)
        return label, shape, dtype, self._place_of(row), row.why, nbytes, per_device

    def _notes(self) -> list[str]:
        return [*totals(self), *self.notes, *self._meshes.lines(), *_static_lines(self.static)]

    def _below(self, paint: Paint) -> list[str]:
        """Of a single array, which device holds which part."""
        rows = self.rows
        if len(rows) != 1 or rows[0].path or rows[0].drawn_at is None:
            return []
        return ["", *draw(rows[0].drawn_at, rows[0].leaf.shape, paint)]


_LISTED = 5


def _static_lines(static: dict[str, str]) -> list[str]:
    if not static:
        return []
    named = list(folded([f"{path} ({kind})" for path, kind in static.items()]))
    return [f"not arrays: {listed(named, _LISTED)}"]


@dataclass(frozen=True, repr=False)
class Changes(Shown):
    """The moves between two trees: the result of `mylib.show(before, after)`. Prints as a
    table. In a notebook it is a page with pictures of the later tree.

    **Attributes:**

    - `moves`: a `mylib.results.Move` for each array leaf.
    - `rows`: a `mylib.results.Row` for each array leaf of the later tree.
    - `nbytes`: how many bytes the devices had to receive, all of them together.
    - `bytes_by_device`: how many each of them had to receive.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)
        before = {"w": jnp.ones((64, 64))}
        after = mylib.filter_shard(before, P("data"), mesh=mesh)
        changes = mylib.show(before, after)
        print(changes)
        assert len(changes.moves) == 1
        ```
    """

    moves: tuple[Move, ...]

    @property
    def nbytes(self) -> int:
        return sum(move.nbytes for move in self.moves)

    @cached_property
    def bytes_by_device(self) -> dict[Any, int]:
        received: Counter[Any] = Counter()
        for move in self.moves:
            received.update(move.received or {})
        return dict(received)

    _header = ("array", "shape", "dtype", "before", "after", "what", "received")

    @property
    def _listed(self) -> Sequence[Move]:
        return self.moves

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return tuple(move.after for move in self.moves if move.after is not None)

    @cached_property
    def _meshes(self) -> Meshes:
        return Meshes(row for move in self.moves for row in (move.before, move.after))

    def _cells(self, label: str, alike: Sequence[Move]) -> tuple[str, ...]:
        move = alike[0]
        leaf = move.row.leaf
        times = f"{len(alike)} x " if len(alike) > 1 else ""
        nbytes = times + show_bytes(move.nbytes) if move.nbytes else ""
        before, after = self._place_of(move.before), self._place_of(move.after)
        return label, str(leaf.shape), str(leaf.dtype), before, after, move.what, nbytes

    def _notes(self) -> list[str]:
        moved = sum(move.what == "moved" for move in self.moves)
        line = f"{moved} of {counted(len(self.moves), 'array')} moved"
        if self.bytes_by_device:
            where, most = max(self.bytes_by_device.items(), key=lambda x: x[1])
            name = where if where == HOST else show_device(where)
            by_one = f"at most {show_bytes(most)} by one ({name})"
            line += f"; {show_bytes(self.nbytes)} received, {by_one}"
        return [line, *self._meshes.lines()]
