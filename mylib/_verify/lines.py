"""The first line of a program whose values differ from those of another program."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from .._compat import names
from .._lines import is_of_user
from .._programs import (
    all_equations,
    at_shardings,
    bind_as,
    interpret,
    jaxprs_in,
    line_of,
    scan_of,
    scanned,
)
from .._text import listed

# Compare at most this many values in one run, and run programs at most this many times.
_AT_ONCE, _RUNS = 24, 10
# Name at most this many lines that only one program has.
_ALONE = 2


@dataclass(frozen=True)
class Spot:
    """A value of a program: the `number`-th that a line computes by this primitive, with this
    shape, in this pass, inside of these loops.
    """

    loops: tuple["Spot", ...]
    line: str
    primitive: str
    phase: str
    shape: tuple[int, ...]
    number: int

    def __str__(self) -> str:
        where = f", in the {self.phase}" if self.phase else ""
        loops = "".join(f", in the loop at {loop.line}" for loop in reversed(self.loops))
        return f"{self.line}: {self.primitive}{where}{loops}"


@dataclass
class _Values:
    """What a run, or one iteration of a loop in it, has computed at the places that are `wanted`;
    all, if it is None.
    """

    loops: tuple[Spot, ...] = ()
    wanted: frozenset[Spot] | None = None
    found: dict[Spot, Any] = field(default_factory=dict)
    counts: Counter[Any] = field(default_factory=Counter)

    def run(self, program: Any, args: Sequence[Any]) -> list[Any]:
        return interpret(program, args, self._call)

    def _call(self, eqn: Any, args: Sequence[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == names.SCAN:
            return self._scan(eqn, args)
        if name in _ENTERED:
            (inside, *_) = jaxprs_in(eqn)
            shardings = eqn.params.get(names.PARAM_IN_SHARDINGS, [None] * len(args))
            return self.run(inside, at_shardings(args, shardings))
        results = bind_as(eqn, args)
        for x in results:
            if jnp.issubdtype(jnp.result_type(x), jnp.inexact):
                self._note(self._place(eqn, x), x)
        return results

    def _scan(self, eqn: Any, args: Sequence[Any]) -> list[Any]:
        place, loop = self._place(eqn, None), scan_of(eqn, args)

        def turn(state: None, given: list[Any]) -> tuple[None, list[Any], list[Any]]:
            inner = _Values((*self.loops, place), self.wanted)
            results = inner.run(loop.body, given)
            found[:] = inner.found  # keys that JAX can't sort
            return state, results, list(inner.found.values())

        found: list[Spot] = []
        _, results, values = scanned(eqn, loop, turn, None)
        self.found.update(zip(found, values, strict=True))
        return results

    def _place(self, eqn: Any, x: Any) -> Spot:
        stack = f"{source_info_util.current_name_stack()}"
        phase = "backward pass" if "transpose(" in stack else ""
        shape = () if x is None else tuple(x.shape)
        line, primitive = _line_of(eqn), eqn.primitive.name
        key = line, primitive, phase, shape
        self.counts[key] += 1
        return Spot(self.loops, line, primitive, phase, shape, self.counts[key])

    def _note(self, place: Spot, x: Any) -> None:
        if self.wanted is None or place in self.wanted:
            self.found[place] = x


def _line_of(eqn: Any) -> str:
    """The user's line. Of a `shard_map` it is the first one inside, as JAX doesn't know its own."""
    inside = jaxprs_in(eqn) if eqn.primitive.name == names.SHARD_MAP else ()
    lines = (line_of(x) for program in inside for x in all_equations(program))
    return next(filter(_is_of_user, lines), line_of(eqn))


def _is_of_user(line: str) -> bool:
    return is_of_user(line.rpartition(":")[0])


# Calls whose equations are compared one by one. Of others, such as `shard_map`, only the results
# are compared.
_ENTERED = names.CALLS | {names.REMAT}


_PLACING = {names.CONSTRAINT, names.RESHARD}


@dataclass(frozen=True)
class Runnable:
    """A program, and how to run a function of its arguments as the program is run."""

    program: Any
    args: Sequence[Any]
    context: Callable[[], Any]

    def places(self) -> list[Spot]:
        values = _Values()

        def run(*args: Any) -> Any:
            values.run(self.program, args)

        with self.context():
            jax.eval_shape(run, *self.args)
        return list(values.found)

    def values(self, wanted: frozenset[Spot]) -> dict[Spot, Any]:
        def run(*args: Any) -> Any:
            values = _Values((), wanted)
            values.run(self.program, args)
            return [values.found[place] for place in order]

        order = sorted(wanted, key=str)
        with self.context():
            results = jax.jit(run)(*self.args)
        return dict(zip(order, results, strict=True))


@dataclass(frozen=True)
class FirstDifference:
    """The first value that differs from the reference's, and by how much; None if no value differs
    that both have. `lines` are the last ones before it that only the step has.
    """

    place: Spot | None
    text: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        only = f"{listed(self.lines, 3)}, which the reference doesn't have"
        if self.place is None:
            return f"the first difference is made at {only}" if self.lines else ""
        other = f" (or {only})" if self.lines else ""
        return f"the first line that differs: {self.place}, by {self.text}{other}"


def first_difference(
    ours: Runnable,
    reference: Runnable,
    differ: Callable[[Any, Any], str],
    read: Callable[[Any], Any],
) -> FirstDifference:
    """Finds the first place that both programs have and whose values differ."""
    mine, theirs = ours.places(), set(reference.places())
    places = [place for place in mine if place in theirs]
    found, low, high = None, 0, len(places)
    for _ in range(_RUNS):
        # All of `places` before `low` are equal, and the one at `high`, if any, differs.
        if low >= high:
            break
        step = max(-(-(high - low) // _AT_ONCE), 1)
        chosen = sorted({*range(low, high, step), high - 1})
        wanted = frozenset(places[i] for i in chosen)
        got, want = ours.values(wanted), reference.values(wanted)
        for i in chosen:
            text = differ(read(got[places[i]]), np.asarray(want[places[i]]))
            if text:
                found, high = (places[i], text), i
                break
            low = i + 1
        else:
            break
    end = len(mine) if found is None else mine.index(found[0])
    alone = [x.line for x in mine[:end] if x not in theirs and x.primitive not in _PLACING]
    lines = tuple(dict.fromkeys(filter(_is_of_user, reversed(alone))))[:_ALONE]
    place, text = found or (None, "")
    return FirstDifference(place, text, lines)
