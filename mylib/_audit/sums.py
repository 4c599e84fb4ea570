"""Follows the data of each device to the results: which of them add it up over the devices.

A value is a sum of terms. A term is something that each device has computed from its own data, an
atom, and for each device the number of times that its value adds that of each place along a mesh
axis. An all-reduce adds these numbers, a permutation moves them, a gather makes blocks of them, and
a slice takes blocks. A gradient is summed if its value on each device has all places equally often;
of `pmax`, of a part of a gather, or of a ring without a sum that isn't true. What one device
computes from terms, other than a sum, is a new atom: of its own data, unless all that it is
computed from has been summed already.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from .attribution import UNKNOWN, phase_of
from .blocks import At, after_gather, after_move, after_product, after_sort
from .collectives import Transfer
from .hlo import HloModule, Instruction
from .opcodes import Likeness
from .positions import positions
from .values import Value, computed, trips
from .walk import Walk, each, flat, shaped

# For each block and each device, how often a value has the data of each place along the axis: an
# array's bytes.
Rows = bytes


class Term(NamedTuple):
    """`rows` are of one block, unless it has blocks. It is `near` unless it is broadcast from fewer
    numbers, as a scale is.
    """

    atom: object
    rows: Rows
    at: At | None = None
    near: bool = True


class OnTheWay(NamedTuple):
    """An atom that goes round a ring of devices, each of which adds something to it."""

    atom: object


Form = frozenset[Term]
NONE: Form = frozenset()
# A form, or a tuple of these.
Forms = Form | tuple["Forms", ...]

_SUMS = ("add", "subtract")
# More turns of a loop than a ring of this many times the devices has are not followed.
_TURNS = 4


class Sums(Walk):
    """`data` are the numbers of the parameters that are split over the axis; `places` the place of
    each device along it.
    """

    nothing = NONE

    def __init__(
        self,
        module: HloModule,
        transfers: Sequence[Transfer],
        data: Iterable[int],
        places: Sequence[int],
    ):
        super().__init__(transfers)
        self.devices: int = len(places)
        self.shape: tuple[int, int] = (self.devices, max(places) + 1)
        own = np.zeros(self.shape, int)
        own[np.arange(self.devices), places] = 1
        self.own: np.ndarray = own
        self.zero: Rows = np.zeros(self.shape, int).tobytes()
        # Products of what devices have not summed, by their `id`: of the model, not the optimiser.
        self.local_products: set[int] = set()
        # What one device is computing.
        self.computing: Instruction | None = None
        # By the number of a collective, what is given to it.
        self.given: dict[int, Form] = {}
        arguments = [NONE] * len(module.entry.parameters)
        for i in data:
            arguments[i] = frozenset([Term(("parameter", i), own.tobytes())])
        result = self.run(module.entry, tuple(arguments))
        results = result if type(result) is tuple else (result,)
        self.results: list[Form] = [*map(_one, results)]

    def is_summed(self, form: Form) -> bool:
        """Whether a value has the data of all places, equally often."""
        rows = map(self._array, form)
        return all(bool((x == x[..., :1]).all() and (x > 0).all()) for x in rows)

    def is_known(self, form: Form) -> bool:
        """Whether it is known of all terms where they are added."""
        return all(bool(self._array(term).any((1, 2)).all()) for term in form)

    def _array(self, term: Term) -> np.ndarray:
        """By block, device and place."""
        return np.frombuffer(term.rows, int).reshape(-1, *self.shape)

    # --- the structure of a program ---------------------------------------------------------------

    def unknown(self, inputs: list[Forms]) -> Forms:
        return self._lost(_one(inputs))

    def of_this_device(self, x: Instruction) -> Forms:
        return NONE

    def branch(self, branches: list[Forms], which: Forms) -> Forms:
        chosen = frozenset(t._replace(near=False) for t in _one(which))

        def either(*values: Forms) -> Form:
            return self._either("branches", [*map(_one, values)]) | chosen

        return each(either, *branches)

    def loop(self, x: Instruction, carried: Forms) -> Forms:
        """What a ring of permutations returns depends on how often it runs."""
        (_, body), turns = x.calls, trips(x)
        most = _TURNS * self.devices
        for _ in range(most if turns is None else min(turns, most)):
            before, carried = carried, self.run(body, (carried,))
            if carried == before:
                return carried
        return carried if turns is not None and turns <= most else each(self._lost, carried)

    def _lost(self, form: Form) -> Form:
        return frozenset(map(self._torn, form))

    def ended(self, value: Form, number: int) -> Form:
        """What was added on the way of a chain was summed, too."""
        if not any(isinstance(t.atom, OnTheWay) for t in value):
            return value
        there = frozenset(
            t._replace(atom=t.atom.atom) if isinstance(t.atom, OnTheWay) else t for t in value
        )
        rings = self.transfers[number].groups
        return self._each(self._added("ring", [there]), lambda a: _over_groups(a, rings))

    # --- one device -------------------------------------------------------------------------------

    def computed(self, x: Instruction, inputs: list[Forms]) -> Forms:
        forms = [*map(_one, inputs)]
        if not any(forms):
            return shaped(x, NONE)
        if x.target and x.row.like >= Likeness.VALUE:
            return shaped(x, forms[0])
        self.computing = x
        value = self._computed(x, forms)
        self.computing = None
        return shaped(x, value)

    def _computed(self, x: Instruction, forms: list[Form]) -> Form:
        keeps = x.row.like >= Likeness.ELEMENTS or x.does in ("broadcast", "negate")
        if self.ending is not None and not keeps and x.does not in _SUMS:
            # The last sum of a ring may be in one fusion with what uses it.
            forms = [self.ended(form, self.ending) for form in forms]
        match x.does:
            case "add" | "subtract":
                return self._added(_key(x), forms)
            case "multiply" if not all(forms):
                return forms[0] or forms[1]
            case "divide" if not forms[1]:
                return forms[0]
            case "select" if self.is_summed(forms[0]):
                return self._selected(x, forms[1:])
            case "dynamic-update-slice":
                return self._updated(x, *forms[:2])
            case "concatenate":
                return self._concatenated(x, forms)
            case "reduce" if len(x.arrays) == 1:
                return self._reduced(x, forms[0])
            case "scatter":
                return self._scattered(x, *forms)
            case "slice" | "dynamic-slice":
                return frozenset(self._taken(x, t) for t in forms[0])
            case "pad" | "reverse":
                return self._placed(forms[0], _nowhere)
            case "sort":
                sorted_forms = [self._placed(form, lambda at: after_sort(x, at)) for form in forms]
                return self._local(_key(x), sorted_forms)
            case "gather" if forms[0] and all(t.at and after_gather(x, t.at) for t in forms[0]):
                return self._placed(forms[0], lambda at: after_gather(x, at))
        if keeps:
            return self._moved(x, forms[0])
        if x.row.product or x.target:
            return self._multiplied(x, forms)
        if x.row.elementwise:
            return self._local(_key(x), forms)
        return self._local(_key(x), [self._placed(form, _nowhere) for form in forms])

    def _torn(self, term: Term) -> Term:
        """A term of whose blocks it is unknown where they are."""
        return term._replace(rows=self.zero, at=None)

    def _placed(self, form: Form, after: Callable[[At], At | None]) -> Form:
        """The same terms, with their blocks where they are after a move."""
        return frozenset(t if t.at is None else self._at(t, after(t.at)) for t in form)

    def _at(self, term: Term, at: At | None) -> Term:
        return self._torn(term) if at is None else term._replace(at=at)

    def _local(self, key: object, forms: Sequence[Form]) -> Form:
        """What a device computes from these, not as a sum."""
        terms = [t for form in forms for t in form]
        near = [t for t in terms if t.near]
        scales = [t for t in terms if not t.near and t.rows != self.zero]
        used = [*near, *scales] or terms
        if not used:
            return NONE
        if self._is_after_model() and any(t.rows == self.zero for t in used):
            return frozenset([Term(key, self.zero, near=bool(near))])
        places = {t.at for t in used if t.at is not None}
        if len(places) > 1:
            used = self._placed(frozenset(used), _nowhere)
        # Summed is what is summed in all of these; a device that has nothing in common has its own
        # data.
        least = reduce(np.minimum, map(self._array, used))
        least = np.where(least.any(-1, keepdims=True), least, self.own)
        least //= np.maximum(np.gcd.reduce(least, (1, 2), keepdims=True), 1)
        at = places.pop() if len(places) == 1 else None
        return frozenset([Term(key, least.tobytes(), at, bool(near))])

    def _is_after_model(self) -> bool:
        """Whether it is computed from gradients. What a model computes where blocks are lost is a
        device's own: experts get the rows of other devices, and the loss is the sum of all.
        """
        x = self.computing
        return x is not None and phase_of(x.op_names) in ("", UNKNOWN)

    def _added(self, key: object, forms: Sequence[Form]) -> Form:
        terms: dict[object, Term] = {}
        for term in (t for form in forms for t in form):
            before = terms.get(term.atom)
            terms[term.atom] = term if before is None else self._sum(before, term)
        return _together(key, terms.values())

    def _sum(self, a: Term, b: Term) -> Term:
        if a.at is not None and b.at is not None and a.at != b.at:
            return self._torn(a)
        total = self._array(a) + self._array(b)
        return Term(a.atom, _smallest(total), a.at or b.at, a.near or b.near)

    def _either(self, key: object, forms: Sequence[Form]) -> Form:
        """One of these, or parts of them."""
        terms = {t._replace(near=True) for form in forms for t in form}
        if len({t.atom for t in terms}) < len(terms):  # one atom in two ways
            return self._local(key, [frozenset(terms)])
        return _together(key, terms)

    def _selected(self, x: Instruction, forms: list[Form]) -> Form:
        chosen = computed(Value(x.operand(0))).made_by
        if chosen.opcode == "broadcast":
            chosen = chosen.operand(0)
        by_device = positions(chosen, self.devices) if chosen.arrays[0].size == 1 else None
        if by_device is None:
            return self._either(_key(x), forms)
        masks = by_device != 0, by_device == 0
        a, b = (self._each(form, mask.__mul__) for form, mask in zip(forms, masks, strict=True))
        return self._added(_key(x), [a, b])

    def _each(self, form: Form, change: Callable[[np.ndarray], np.ndarray]) -> Form:
        return frozenset(t._replace(rows=_smallest(change(self._array(t)))) for t in form)

    def _moved(self, x: Instruction, form: Form) -> Form:
        if x.opcode == "broadcast" and x.arrays[0].size != x.operand(0).arrays[0].size:
            form = frozenset(t._replace(near=False) for t in form)
        return self._placed(form, lambda at: after_move(x, at))

    def _updated(self, x: Instruction, base: Form, update: Form) -> Form:
        whole, part = x.arrays[0].shape, x.operand(1).arrays[0].shape
        for dim, start in enumerate(x.inputs()[2:]):
            where = None if whole[dim] == part[dim] else positions(start, self.devices)
            if where is None or (where == where[0]).all() or any(t.at for t in update):
                continue
            # Each device writes its part into its place: a gather, if the whole is summed later.
            at = At(dim, part[dim], whole[dim] // part[dim])
            blocks = where // part[dim] == np.arange(at.blocks)
            placed = frozenset(
                t._replace(rows=(self._array(t) * blocks.T[:, :, None]).tobytes(), at=at)
                for t in update
            )
            return self._added(_key(x), [base, placed])
        return self._either(_key(x), [base, update])

    def _concatenated(self, x: Instruction, forms: list[Form]) -> Form:
        (dim,) = x.dims()
        forms = [self._placed(form, lambda at: at.beside(dim)) for form in forms]
        sizes = {y.arrays[0].shape[dim] for y in x.inputs()}
        rows = [{t.atom: t.rows for t in form} for form in forms]
        alike = len(sizes) == 1 and all(row.keys() == rows[0].keys() for row in rows)
        # Parts that have come from several devices, one by one.
        apart = rows[0] and any(row != rows[0] for row in rows)
        if alike and apart and all(t.at is None for form in forms for t in form):
            at = At(dim, sizes.pop(), len(forms))
            gathered = (
                Term(t.atom, b"".join(row[t.atom] for row in rows), at, t.near) for t in forms[0]
            )
            return _together(_key(x), gathered)
        return self._either(_key(x), forms)

    def _reduced(self, x: Instruction, form: Form) -> Form:
        reduced, rank = x.dims(), len(x.operand(0).arrays[0].shape)
        left = {dim: i for i, dim in enumerate(d for d in range(rank) if d not in reduced)}
        if not x.adds:
            return self._local(_key(x), [self._placed(form, lambda at: at.along(left))])
        form = frozenset(
            self._over_blocks(t) if t.at and t.at.dim in reduced and not t.at.order else t
            for t in form
        )
        return self._placed(form, lambda at: at.along(left))

    def _over_blocks(self, term: Term) -> Term:
        total = self._array(term).sum(0)
        return term._replace(rows=_smallest(total), at=None)

    def _scattered(self, x: Instruction, base: Form, indices: Form, updates: Form) -> Form:
        """Adds rows to a table; of gathered rows, it sums those of all devices."""
        adds = x.adds
        window = x.dims("update_window_dims")
        vector = int(x.attribute("index_vector_dim"))
        rows = [i for i in range(len(x.operand(2).arrays[0].shape)) if i not in window]
        places = [i for i in range(len(x.operand(1).arrays[0].shape)) if i != vector]
        to_row = dict(zip(places, rows, strict=False))
        each = dict(zip(rows, rows, strict=True))
        given = [
            frozenset(
                t._replace(near=False)
                for t in self._placed(indices, lambda at: at.along(to_row, adds))
            ),
            self._placed(updates, lambda at: at.along(each, adds)),
        ]
        made = self._local(_key(x), given)
        summed = frozenset(self._over_blocks(t) if t.at and adds else t for t in made)
        return self._added(_key(x), [base, self._placed(summed, _nowhere)])

    def _taken(self, x: Instruction, term: Term) -> Term:
        if term.at is None:
            return term
        dim, stride, count, order = term.at
        before, after = x.operand(0).arrays[0].shape, x.arrays[0].shape
        if order:
            return term if before == after else self._torn(term)
        before, after = before[dim], after[dim]
        if before == after:
            return term
        first = positions(x.operand(1 + dim), self.devices) if x.opcode != "slice" else None
        if x.opcode == "slice":
            taken = x.slices[dim]
            if taken.step != 1 and after > 1:
                return self._torn(term)
            first = np.full((self.devices, 1), taken.start)
        if first is None:
            # XLA:CPU of JAX 0.10 adds rows to a table in a loop that takes each of them once.
            each_once = bool(self.loops) and (trips(self.loops[-1]) or 0) * after == before
            return self._over_blocks(term) if each_once else self._torn(term)
        first = np.clip(first[:, 0], 0, before - after)
        in_one = (first // stride == (first + after - 1) // stride).all()
        if in_one or not ((first % stride).any() or after % stride):
            taken = np.arange(1 if in_one else after // stride)[:, None]
            blocks = self._array(term)[(first // stride + taken) % count, np.arange(self.devices)]
            at = None if in_one else At(dim, stride, len(blocks))
            return term._replace(rows=_smallest(blocks), at=at)
        # Without padding at the end.
        if not first.any() and stride * (count - 1) < after <= stride * count:
            return term
        return self._torn(term)

    def _multiplied(self, x: Instruction, forms: list[Form]) -> Form:
        if not all(map(self.is_summed, forms)):
            self.local_products.add(id(x))
        summed = [
            frozenset(
                t._replace(near=True)
                for t in self._placed(form, lambda at, i=i: after_product(x, i, at))
            )
            for i, form in enumerate(forms)
        ]
        made = self._local(_key(x), summed)
        return frozenset(self._over_blocks(t) if t.at and t.at.dim < 0 else t for t in made)

    # --- between devices --------------------------------------------------------------------------

    def step(self, first: Instruction, inputs: list[Forms]) -> Forms:
        return frozenset(
            t if isinstance(t.atom, OnTheWay) else t._replace(atom=OnTheWay(t.atom))
            for t in _one(inputs)
        )

    def collective(self, x: Instruction, first: Instruction, inputs: list[Forms]) -> list[Forms]:
        forms = [*map(_one, inputs)]
        (*_, (_, _, transfer)) = self.sent[id(first)]
        for number, _, _ in self.sent[id(first)]:
            self.given[number] = self.given.get(number, NONE).union(*forms)
        if x.does == "all-to-all" and len(forms) > 1:
            return [self._picked(form, transfer, i) for i, form in enumerate(forms)]
        return [self._one_sent(x, transfer, i, form) for i, form in enumerate(forms)]

    def _one_sent(self, x: Instruction, transfer: Transfer, i: int, form: Form) -> Form:
        groups, kind = transfer.groups, x.does
        match kind:
            case "all-reduce" | "reduce-scatter":
                if not x.adds:
                    return frozenset(
                        t if self._is_alike(t, groups) else self._torn(t) for t in form
                    )
                summed = self._each(form, lambda a: _over_groups(a, groups))
                if kind == "reduce-scatter":
                    (dim,) = x.dims()
                    return self._placed(summed, lambda at: at.beside(dim))
                return summed
            case "collective-permute" | "send":
                return self._each(form, lambda a: _permuted(a, groups))
            case "collective-broadcast":
                return self._picked(form, transfer, 0)
            case "all-gather" | "all-to-all":
                (dim,) = x.dims()
                size = x.operand(i).arrays[0].shape[dim]
                stride = size if kind == "all-gather" else size // groups.shape[1]
                return frozenset(self._gathered(t, groups, dim, stride) for t in form)
        return self._lost(form)

    def _is_alike(self, term: Term, groups: np.ndarray) -> bool:
        """Whether devices of a group have the data of the same places."""
        of_group = self._array(term)[:, groups]
        return bool((of_group == of_group[:, :, :1]).all())

    def _picked(self, form: Form, transfer: Transfer, member: int) -> Form:
        return self._each(form, lambda a: _of_member(a, transfer.groups, member))

    def _gathered(self, term: Term, groups: np.ndarray, dim: int, stride: int) -> Term:
        array = self._array(term)
        members = [_of_member(array, groups, k) for k in range(groups.shape[1])]
        if all(np.array_equal(one, members[0]) for one in members):  # over other axes
            return term._replace(rows=_smallest(members[0]))
        if term.at is not None:
            return self._torn(term)
        at = At(dim, stride, len(members))
        return term._replace(rows=_smallest(np.concatenate(members)), at=at)


def _one(value: Forms | Sequence[Forms]) -> Form:
    """All terms of a value."""
    return NONE.union(*flat(value if isinstance(value, frozenset) else tuple(value)))


def _nowhere(at: At) -> None:
    """Where blocks are after what takes them apart."""


def _key(x: Instruction) -> object:
    """A name for what an instruction computes. Fusions have copies of those that feed them, which
    JAX's name for their origin shows to be the same.
    """
    return x.opcode, x.arrays[0].shape, (x.op_names or [x.name])[0]


def _together(key: object, terms: Iterable[Term]) -> Form:
    """Terms that are alike, as one."""
    terms = frozenset(terms)
    alike, atoms = {term[1:] for term in terms}, {term.atom for term in terms}
    if len(alike) == 1 < len(atoms) and not any(isinstance(atom, OnTheWay) for atom in atoms):
        return frozenset([next(iter(terms))._replace(atom=key)])
    return terms


def _smallest(array: np.ndarray) -> Rows:
    """The same proportions in the smallest whole numbers, so that what a loop adds up ends."""
    return (array // (int(np.gcd.reduce(array, None)) or 1)).tobytes()


def _over_groups(a: np.ndarray, groups: np.ndarray) -> np.ndarray:
    after = a.copy()
    after[:, groups] = a[:, groups].sum(2, keepdims=True)
    return after


def _permuted(a: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    after = np.zeros_like(a)
    after[:, pairs[:, 1]] = a[:, pairs[:, 0]]
    return after


def _of_member(a: np.ndarray, groups: np.ndarray, member: int) -> np.ndarray:
    after = a.copy()
    after[:, groups] = a[:, groups[:, member]][:, :, None]
    return after
