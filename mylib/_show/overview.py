"""`show`: where everything is, as a table and as pictures."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import EllipsisType
from typing import Any, overload

from jaxtyping import PyTree

from .._errors import folded
from .._placement import current_world
from .._text import counted, listed, show_bytes
from .._tree import split
from .current_places import present_rows, static_leaves
from .drawing import draw
from .fold import LINES, body_of, fold
from .loads import load_lines
from .meshes import Meshes
from .moves import Move, moves_between
from .page import overview_page, place_of_single
from .rows import COMMITTED, DELETED, Row, Rows, sizes, totals
from .text import (
    BOLD,
    GREEN,
    RED,
    YELLOW,
    Paint,
    columns,
    for_stdout,
    paint_for_stdout,
    show_device,
)


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

    A [`mylib.Overview`][] of one tree, or the [`mylib.Changes`][] between two. As text it has
    colours if the standard output is a terminal and `NO_COLOR` is not set.

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
    return Overview(rows, static_leaves(leaves))


@dataclass(frozen=True, repr=False)
class Overview(Rows):
    """Where every array of a tree is: the result of [`mylib.show`][]. Prints as a table, in which
    leaves that differ only by an index share a line. In a notebook it is a page with pictures.

    **Attributes:**

    - `rows`: a [`Row`][mylib._show.Row] for each array leaf.
    - `static`: the type of each other leaf, by its path.
    - `nbytes`: the bytes of all arrays, each counted once.
    - `bytes_by_device`: the bytes that each device holds in its own memory. The devices of an
        abstract mesh are numbered.
    - `most_loaded`: the device that holds the most bytes, and their number; None if no device holds
        any.
    """

    static: dict[str, str]

    def __repr__(self) -> str:
        return for_stdout(self._lines(paint_for_stdout(), LINES))

    def whole(self) -> str:
        """The text with all lines, however many. By default, leaves after the first 200 lines share
        a line if they are alike.
        """
        return for_stdout(self._lines(paint_for_stdout(), None))

    def _lines(self, paint: Paint, most: int | None) -> list[str]:
        groups = fold(self.rows, most)
        table = [_HEADER, *body_of(groups, self._cells, most)]

        def code_of(row: int, column: int) -> str:
            if row == 0:
                return BOLD
            return _CODES.get(groups[row - 1][1][0].state, "") if column == _STATE else ""

        lines = columns(table, paint, code_of) if self.rows else []
        lines += [""] * bool(lines)
        lines += [*self._notes(), *load_lines(self.bytes_by_device, paint)]
        return lines + self._drawing(paint)

    def _cells(self, label: str, rows: Sequence[Row]) -> tuple[str, ...]:
        row, (nbytes, per_device) = rows[0], sizes(rows)
        shape, dtype = str(row.leaf.shape), str(row.leaf.dtype)
        spec = row.spec + self._meshes.suffix(row.place)
        return label, shape, dtype, spec, row.why, nbytes, per_device

    @cached_property
    def _meshes(self) -> Meshes:
        return Meshes(self.rows)

    def _notes(self) -> list[str]:
        return [*totals(self), *self._meshes.lines(), *_static_lines(self.static)]

    def _drawing(self, paint: Paint) -> list[str]:
        """Of a single array, which device holds which part."""
        place = place_of_single(self.rows)
        return [] if place is None else ["", *draw(place, self.rows[0].leaf.shape, paint)]

    def _repr_html_(self) -> str:
        body = body_of(fold(self.rows), self._cells)
        return overview_page(
            self._notes(), self.rows, _HEADER, body, self.bytes_by_device, self._meshes
        )


_HEADER = ("array", "shape", "dtype", "spec", "state", "bytes", "per device")
_STATE = _HEADER.index("state")
_CODES = {COMMITTED: GREEN, DELETED: RED}
_LISTED = 5


def _static_lines(static: dict[str, str]) -> list[str]:
    if not static:
        return []
    named = list(folded([f"{path} ({kind})" for path, kind in static.items()]))
    return [f"not arrays: {listed(named, _LISTED)}"]


@dataclass(frozen=True, repr=False)
class Changes:
    """What has moved between two trees: the result of `mylib.show(before, after)`. Prints as a
    table. In a notebook it is a page with pictures of the later tree.

    **Attributes:**

    - `moves`: a [`Move`][mylib._show.Move] for each array leaf.
    - `nbytes`: how many bytes the devices had to receive, all of them together.
    - `bytes_by_device`: how many each of them had to receive.
    """

    moves: tuple[Move, ...]

    @property
    def nbytes(self) -> int:
        return sum(move.nbytes for move in self.moves)

    @cached_property
    def bytes_by_device(self) -> dict[Any, int]:
        received: dict[Any, int] = {}
        for move in self.moves:
            for device, nbytes in (move.received or {}).items():
                received[device] = received.get(device, 0) + nbytes
        return received

    def __repr__(self) -> str:
        return self._text(LINES)

    def whole(self) -> str:
        """The text with all lines, however many; see `Overview.whole`."""
        return self._text(None)

    def _text(self, most: int | None) -> str:
        paint = paint_for_stdout()
        groups = fold(self.moves, most)
        changed = [bool(moves[0].what) for _, moves in groups]

        def code_of(row: int, column: int) -> str:
            if row == 0:
                return BOLD
            return YELLOW if changed[row - 1] and column == _WHAT else ""

        table = [_CHANGES, *body_of(groups, self._cells, most)]
        lines = columns(table, paint, code_of) if groups else []
        return "\n".join([*lines, *[""] * bool(lines), *self._notes()])

    @cached_property
    def _meshes(self) -> Meshes:
        return Meshes(row for move in self.moves for row in (move.before, move.after))

    def _cells(self, label: str, moves: Sequence[Move]) -> tuple[str, ...]:
        move = moves[0]
        leaf = move.row.leaf
        times = f"{len(moves)} x " if len(moves) > 1 else ""
        nbytes = times + show_bytes(move.nbytes) if move.nbytes else ""
        before, after = (self._place(row) for row in (move.before, move.after))
        return label, str(leaf.shape), str(leaf.dtype), before, after, move.what, nbytes

    def _place(self, row: Row | None) -> str:
        return "" if row is None else row.spec + self._meshes.suffix(row.place)

    def _notes(self) -> list[str]:
        moved = sum(move.what == "moved" for move in self.moves)
        line = f"{moved} of {counted(len(self.moves), 'array')} moved"
        if self.bytes_by_device:
            where, most = max(self.bytes_by_device.items(), key=lambda x: x[1])
            by_one = f"at most {show_bytes(most)} by one ({show_device(where)})"
            line += f"; {show_bytes(self.nbytes)} received, {by_one}"
        return [line, *self._meshes.lines()]

    def _repr_html_(self) -> str:
        body = body_of(fold(self.moves), self._cells)
        rows = tuple(move.after for move in self.moves if move.after is not None)
        return overview_page(
            self._notes(), rows, _CHANGES, body, self.bytes_by_device, self._meshes
        )


_CHANGES = ("array", "shape", "dtype", "before", "after", "what", "received")
_WHAT = _CHANGES.index("what")
