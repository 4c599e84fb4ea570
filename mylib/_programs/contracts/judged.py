"""Judges each gradient of a program by the ways that it takes, for one mesh axis."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property, reduce
from operator import ne, or_
from typing import Literal, NamedTuple

import numpy as np

from ..._core.compat import names
from ..._core.errors import AuditError
from ..._core.text import show_bytes
from ..audit import (
    Array,
    Collective,
    Groups,
    MeshAxes,
    ProgramArray,
    Report,
    axis_of,
    no_mesh,
    size_of,
    sums_each_turn,
    times_of,
)
from .roles import Roles, axes_of, parts
from .text import Violation, moved_by, text_of

# What a collective moves: weights, what the model computes with, gradients and what an optimiser
# makes of them, or what is only returned.
Role = Literal["weight", "activation", "gradient", "result"]


_PASSES = ("forward", "backward", "recomputed")
SUMMING = ("all-reduce", "reduce-scatter")
_ADVICE = "so each device holds all of them: call mylib.fully_shard in the loss"

_NOT_GATHERED = (
    "multiplied without being gathered over {}, so activations are moved instead: call "
    "mylib.fully_shard in the loss"
)
_TO_SUM = (
    "in filter_jit, call mylib.fully_shard in the loss; in shard_map, sum it by jax.lax.psum; and "
    "check the numbers by mylib.testing.verify(step, ...)"
)


class Moved(NamedTuple):
    """An array that a collective over the axis moves, and its role."""

    c: Collective
    bit: int
    role: Role
    # The weights that it is of, or whose gradient it is, by their numbers.
    leaves: tuple[int, ...]
    array: Array
    names: tuple[str, ...]


class Judged:
    """A program's gradients, for one axis."""

    def __init__(self, report: Report, axis: str, argument: str | None):
        self.size = size_of(report, axis)
        if not report.results:
            raise AuditError(
                f"it is unknown what {report.name} returns: audit the compiled program, not its "
                "text"
            )
        self.report, self.axis = report, axis
        self.parameters = report.parameters
        self.roles = Roles(report, argument)
        self.flow = report.flow
        self.graph = report.flow.graph
        if self.graph.differentiates is None:
            raise AuditError(
                f"it is unknown which of {report.name} is forward and which backward: no "
                "instruction records its origin (op_name), or not in a way that is understood"
            )
        if self.graph.differentiates and not self.roles.trained:
            raise AuditError(
                f"it is unknown which weights {report.name} trains: none of its results is named "
                f"as an array of {self.roles.root!r} is. If that isn't the model, name it by "
                "argument=. Return the new model, or its gradients, as a tree like the model"
            )
        self.mesh = MeshAxes.of_sizes(report.axes)
        self.groups: Groups = self.mesh.groups([axis])

    def fault(self, number: int, text: str) -> Violation:
        """What is wrong with an argument."""
        return Violation((self.parameters[number].path,), text)

    @cached_property
    def labels(self):
        """For a set of sources, which devices have the same value."""
        return self.flow.labels(self._labels_of)

    def _labels_of(self, number: int) -> np.ndarray:
        split = axes_of(self.parameters[number])
        places = np.unravel_index(np.arange(self.mesh.size), self.mesh.sizes)
        at = [place * (name in split) for name, place in zip(self.mesh.names, places, strict=True)]
        return np.ravel_multi_index(at, self.mesh.sizes)

    def varies(self, mask: int) -> bool:
        """Whether devices along the axis have different values."""
        rows = self.labels(mask)[self.groups]
        return bool((rows != rows[:, :1]).any())

    @cached_property
    def data(self) -> int:
        """The arguments that are data, and split over the axis."""
        return self.flow.parameters(filter(self._is_split, self.roles.data))

    @cached_property
    def activations(self) -> int:
        """The collectives that the model computes with. What an optimiser multiplies depends on
        gradients that were sent over the axis, and what the model multiplies doesn't.
        """
        large = sum(1 << bit for bit in self._over if self.flow.array(bit).size > 1)
        sent = self._of_data & large & ~self.flow.activations(lambda _: False)
        return self.flow.activations(lambda behind: not self.flow.reaching(behind) & sent)

    @cached_property
    def _over(self) -> dict[int, Collective]:
        """The sources that collectives over the axis return."""
        over: dict[int, Collective] = {}
        for number, c in enumerate(self.report.collectives):
            if c.axes is None:
                raise no_mesh(self.report)
            if self._goes_over(c):
                over.update(dict.fromkeys(self.flow.sources_of[number], c))
        return over

    @cached_property
    def _of_data(self) -> int:
        """Those of them that move what is computed from data."""
        data = self.flow.parameters(self.roles.data)
        behind = {bit: self.flow.reaching(self.graph.into[bit].any) for bit in self._over}
        return sum(1 << bit for bit, mask in behind.items() if mask & data)

    def gradients(self) -> Iterator[Violation]:
        """The faults of weights whose gradient isn't sent over the axis."""
        for result, number in self.roles.trained.items():
            if reason := self._unsent(result):
                yield self.fault(number, reason)

    def _unsent(self, result: int) -> str:
        """A gradient is sent if a weight's new value depends on a collective over the axis, other
        than through single numbers, or doesn't depend on the device's own data.
        """
        r, mark = self.report.results[result], self.graph.results[result]
        data = self.data and self.data | self._unknown
        if not self.flow.reaching(mark.any) & data:
            return ""
        own = self.flow.reaching(mark.any, through=lambda bit: bit not in self._over)
        # A weight that is a single number itself is computed from single numbers.
        sent = mark.any if math.prod(r.shape) == 1 else mark.arrays
        sent = self.flow.reaching(sent, "arrays") & self._of_data & ~self.activations
        if own & data and not sent:
            return f"its gradient is not sent over {self.axis}: {_TO_SUM}"
        others = mark.any & ~self.flow.parameters([*self.roles.weights, *self.roles.state])
        if self.axis in axes_of(r) and not self.varies(others):
            return f"all devices along {self.axis} keep the same part of it: {_TO_SUM}"
        return ""

    @cached_property
    def _unknown(self) -> int:
        """The sources of which it is unknown what they are."""
        return sum(1 << bit for bit, s in enumerate(self.graph.sources) if s.kind == "unknown")

    def without_data(self) -> Iterator[Violation]:
        if not self.data and self.roles.trained:
            paths = [self.parameters[i].path for i in self.roles.data]
            yield Violation(
                tuple(paths[:3]),
                f"no argument but the model is split over {self.axis}, so each device computes the "
                "gradient of the whole batch",
            )

    def resharded(self, must_equal: Sequence[int]) -> Iterator[Violation]:
        """The faults of results that are not sharded over the axis as their arguments are."""
        for i, number in self.roles.returned.items():
            argument, r = self.parameters[number], self.report.results[i]
            hows = ["sharded" if self.axis in axes_of(p) else "replicated" for p in (argument, r)]
            if number in must_equal and hows[0] != hows[1]:
                text = f"given {hows[0]} over {self.axis}, and returned {hows[1]} ({r.path})"
                yield self.fault(number, text)

    def state(self) -> Iterator[Violation]:
        """The faults of an optimiser's state that is not sharded as its weights are."""
        for number, weight in self.roles.state.items():
            p = self.parameters[number]
            if weight is None or not self.roles.alike(p, self.parameters[weight]):
                continue
            if self._is_split(weight) and not self._is_split(number):
                text = f"not sharded over {self.axis}, as its weight is: {self._held_by(p)}"
                yield self.fault(number, text)

    def _held_by(self, p: ProgramArray) -> str:
        return f"{self.size} devices hold the same {show_bytes(p.bytes)}"

    def unsharded(self, among: Sequence[int]) -> Iterator[Violation]:
        """The faults of weights that are replicated though smaller ones are sharded, or all of them
        if devices hold a tenth more than their share of the factors of products.
        """
        p_of = self.parameters
        split = [self.roles.size(p_of[i]) for i in among if self._is_split(i)]
        factors = [i for i in among if i in self.multiplied]
        held = sum(p_of[i].bytes for i in factors)
        share = sum(p_of[i].bytes / (1 if self._is_split(i) else self.size) for i in factors)
        for i in sorted(among, key=lambda i: -p_of[i].bytes):
            p = p_of[i]
            # Of stacked layers the first dimension is that of the layers.
            fits = any(n % self.size == 0 for n in p.shape[-2:])
            large = self.roles.size(p) >= min(split, default=0)
            if not self._is_split(i) and (
                (fits and large) or (held > 1.1 * share and i in factors)
            ):
                text = f"not sharded over {self.axis}: {self._held_by(p)}"
                yield Violation((f"{p.path} {list(p.shape)}",), text)

    def _is_split(self, number: int) -> bool:
        return self.axis in axes_of(self.parameters[number])

    @cached_property
    def moved(self) -> list[Moved]:
        """What is moved over the axis, without single numbers."""
        return list(self._moved())

    def _moved(self) -> Iterator[Moved]:
        graph, leaves = self.graph, self._leaves()
        results = (graph.results[i].any for i in self.roles.trained)
        trained = self.flow.reaching(reduce(or_, results, 0))
        for bit, c in self._over.items():
            array = self.flow.array(bit)
            if array.size == 1:
                continue
            role: Role = "gradient"
            if not self._of_data >> bit & 1:
                role = "weight"
            elif self.activations >> bit & 1:
                role = "activation"
            elif not trained >> bit & 1:
                role = "result"
            of = self._copied(1 << bit) if role == "weight" else leaves.get(bit, ())
            moved = moved_by(c, [self.parameters[i].path for i in of])
            yield Moved(c, bit, role, tuple(of), array, moved)

    def _copied(self, sources: int) -> list[int]:
        """The numbers of the weights that these sources are copies of, or are computed from element
        by element.
        """
        copied = self.flow.reaching(sources, "near")
        return [i for i in self.roles.weights if self.flow.parameters([i]) & copied]

    def _leaves(self) -> dict[int, dict[int, None]]:
        """For each collective, the weights of whose new value it is a part, by their numbers."""
        leaves: dict[int, dict[int, None]] = {}
        for result, number in self.roles.trained.items():
            near = self.graph.results[result].near
            parts = self.flow.reaching(near, "near", lambda bit: not self.activations >> bit & 1)
            for bit in self.graph.sources_in(parts):
                leaves.setdefault(bit, {})[number] = None
        return leaves

    def repeated(self, pieces: int | None) -> Iterator[Violation]:
        """The faults of gradients that are summed more than once, or more often than there are
        `pieces` of a batch.
        """
        times: dict[tuple[int, tuple[object, ...]], tuple[float, Collective]] = {}
        for m in self.moved:
            labels = self.labels(self.graph.into[m.bit].any)
            if self.flow.is_repeated(m.bit, labels):
                text = f"summed twice: the {text_of(m.c)} sums what is the same on several devices"
                yield Violation(m.names, f"{text} already")
            elif self._is_of_sum(m):
                yield Violation(m.names, f"summed twice: the {text_of(m.c)} sums a sum of it")
            elif m.role == "gradient" and self.flow.is_sum(m.bit):
                if pieces is None or sums_each_turn(self.report, m.c):
                    continue
                for leaf in m.leaves:
                    summed = leaf, (m.c.kind, m.c.axes, *self.flow.made_by(m.bit)[:2])
                    before, _ = times.get(summed, (0.0, m.c))
                    times[summed] = before + self._share(m) * times_of(m.c), m.c
        for (leaf, _), (number, c) in times.items():
            if number > (pieces or 1) * 1.001:
                expected = f"{number:.3g} times in a call, and {pieces} expected"
                yield self.fault(leaf, f"its gradient is summed {expected}: {text_of(c)}")

    def _is_of_sum(self, m: Moved) -> bool:
        """Whether a function sums a gradient of which it has summed another part already."""
        if not self._is_written_sum(m):
            return False
        behind = self.flow.reaching(self.graph.into[m.bit].any)
        return any(
            behind >> x.bit & 1 and x.c.axes == m.c.axes and {*x.leaves} & {*m.leaves}
            for x in self.moved
            if x.bit != m.bit and self._is_written_sum(x)
        )

    def _is_written_sum(self, m: Moved) -> bool:
        # The compiler knows what it sums.
        return m.role == "gradient" and self.flow.is_sum(m.bit) and m.c.inserted is False

    def maxima(self) -> Iterator[Violation]:
        """The faults of gradients that a collective reduces, and does not add."""
        for m in self.moved:
            reduces = m.role == "gradient" and m.c.kind in SUMMING and m.leaves
            if reduces and not self.flow.is_sum(m.bit):
                text = f"its gradient is reduced over {self.axis} without being added: "
                yield Violation(m.names, f"{text}{text_of(m.c)}; {_TO_SUM}")

    def _share(self, m: Moved) -> float:
        """How much of its weights' gradients an array is."""
        axes = [a for a in self.report.axes if a in map(axis_of, m.c.axes or ())]
        of = [self.parameters[i] for i in m.leaves]
        whole = sum(math.prod(p.shape) * parts(self.report, p, axes) for p in of)
        return min(1.0, m.array.size / whole)

    def bounded(self, moved: Sequence[Moved], limit: int) -> Iterator[Violation]:
        """The faults of what is moved, if it is more than a limit in a call."""
        total = sum(m.array.bytes * times_of(m.c) for m in moved)
        if total <= limit:
            return
        most = f"at most {show_bytes(limit)} in a call" if limit else "no activation"
        for c in dict.fromkeys(m.c for m in moved):
            paths = [name for m in moved if m.c is c for name in m.names]
            yield Violation(tuple(paths), f"moved by {text_of(c)}, and {most} expected")

    def is_activation(self, m: Moved) -> bool:
        """Whether it moves what the model or its loss computes: also the rows that each device adds
        to a table if all are gathered. Devices may exchange them.
        """
        gathers = m.role == "gradient" and m.c.kind == "all-gather"
        return m.role in ("activation", "result") or (gathers and self.is_of_table(m))

    @cached_property
    def multiplied(self) -> list[int]:
        """The numbers of the weights that are factors of a product, which tables, biases and norms
        are not.
        """
        return self._copied(sum(1 << bit for bit in self.graph.uses))

    def ungathered(self) -> Iterator[Violation]:
        """The faults of weights of which devices multiply only their own parts."""
        gathered: dict[int, set[str]] = {}
        for m in self.moved:
            for number in m.leaves if m.role == "weight" else ():
                gathered.setdefault(number, set()).update(self._phases(m.bit))
        for number in self.roles.weights:
            # A parameter is a source of the same number.
            alone = self._phases(number) - gathered.get(number, set())
            if self._is_split(number) and alone:
                yield self.fault(number, _NOT_GATHERED.format(self.axis))

    def _phases(self, bit: int) -> set[str]:
        """The phases in which a source is a factor of products."""
        return {use.phase for use in self.graph.uses.get(bit, ())}

    def held(self) -> Iterator[Violation]:
        """The faults of weights that are gathered for all layers at a time: a whole stack before
        its loop, or several layers once for the forward and the backward pass.
        """
        held: dict[int, Collective] = {}
        again: set[int] = set()
        for m in self.moved:
            if m.role != "weight" or m.c.kind != "all-gather":
                continue
            uses = self.graph.uses.get(m.bit, set())
            phases = self._phases(m.bit)
            if any(len(m.c.loops) < use.loops and use.size < m.array.size for use in uses):
                text = f"gathered for all layers at once: {text_of(m.c)}, {_ADVICE}"
                yield Violation(m.names, text)
            elif phases >= {"forward", "backward"}:
                held.update(dict.fromkeys(m.leaves, m.c))
            elif phases & {"backward", "recomputed"}:
                again.update(m.leaves)
        for number, c in held.items():
            # The head alone, or what stands before layers that are gathered again, may be kept.
            if (len(held) > 1 and not again) or self._has_twin(number):
                text = f"gathered once for the forward and the backward pass: {text_of(c)}"
                yield self.fault(number, f"{text}, {_ADVICE}")

    def _has_twin(self, number: int) -> bool:
        """Whether it is a weight of one of several layers: another has its shape, and its path but
        for one key.
        """
        p_of, key = self.parameters, self.roles.key(number)
        return any(
            p_of[i].shape == p_of[number].shape and sum(map(ne, key, self.roles.key(i))) == 1
            for i in self.multiplied
            if len(self.roles.key(i)) == len(key)
        )

    def is_of_product(self, m: Moved) -> bool:
        """Whether a product computes what is moved."""
        return self.flow.made_by(m.bit)[1] in names.PRODUCTS

    def is_of_split(self, m: Moved) -> bool:
        """Whether it moves a part of a weight that is sharded."""
        return any(self._is_split(i) for i in m.leaves)

    def is_of_table(self, m: Moved) -> bool:
        """Whether it moves rows that are added to a table that is sharded."""
        return self.is_of_split(m) and bool(self.graph.rows >> m.bit & 1)

    def is_part(self, m: Moved) -> bool:
        """Whether a gradient is moved that is no larger than the part that a device keeps."""
        sizes = (math.prod(self.parameters[i].shape) for i in m.leaves)
        return m.array.size <= max(sizes, default=0)

    def is_statistic(self, m: Moved) -> bool:
        """Whether a sum is of numbers computed from arrays, such as their norms."""
        made = self.graph.made
        return m.c.kind == "all-reduce" and not self.graph.into[m.bit].near & ~made

    def completes(self, m: Moved) -> bool:
        """Whether it sums arrays, such as parts of products or rows of a sharded table, and not
        numbers computed from them, such as the maximum of scores.
        """
        return m.c.kind in SUMMING and bool(self.graph.into[m.bit].near)

    def is_forward(self, m: Moved) -> bool:
        """By what is moved: several arrays that are moved together have one name."""
        phases = (self.flow.made_by(m.bit)[2], m.c.phase)
        return next(filter(_PASSES.__contains__, phases), "forward") == "forward"

    def is_of_scattered(self, m: Moved) -> bool:
        """Whether it gathers what was scattered over the axis, or what is the same on all devices
        but for the part that each has taken.
        """
        graph, operand = self.graph, self.graph.into[m.bit]
        if m.c.kind != "all-gather":
            return False
        collectives = self.report.collectives
        for bit in graph.sources_in(self.flow.reaching(operand.near, "near")):
            if self.flow.scatters(bit) and self._goes_over(collectives[graph.sources[bit].number]):
                return True
        is_position = (i for i, s in enumerate(graph.sources) if s.kind == "position")
        return not self.varies(operand.any & ~self.flow.parameters(is_position))

    def _goes_over(self, c: Collective) -> bool:
        return self.axis in map(axis_of, c.axes or ())
