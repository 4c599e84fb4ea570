"""Runs a program and keeps all its values, also those of each device and of each iteration."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import PartitionSpec

from ..._core.compat import Program, is_of_jax, names
from ..._core.jaxprs import (
    at_shardings,
    bind_as,
    called_by,
    interpret,
    line_of,
    scan_of,
    scanned,
)
from ..._core.tree import is_of_keys
from .arguments import numbers_of
from .rounding import Arrays, Call

# Values of more bytes than these are not kept.
_MOST = 2**30


Places = list["ValuePlace | None"]


@dataclass(frozen=True, eq=False)
class ScanLoop:
    """A scan, the order of its iterations, and the places of the values that its body returns."""

    line: str
    order: range
    results: Places = field(default_factory=list)


class InDevices(NamedTuple):
    """The axes of a `shard_map`, and how many loops are around it."""

    axes: dict[str, int]
    loops: int


@dataclass(eq=False)
class ValuePlace:
    """Where a program computes a value, from those at other places. `operands` are None for
    constants. `value` has those of the iterations of `loops` first, and those of the devices where
    a `shard_map` is entered.
    """

    line: str
    primitive: str
    phase: str
    operands: Places
    loops: tuple[ScanLoop, ...]
    mesh: InDevices | None
    value: jax.Array | None
    number: int

    @property
    def key(self) -> Hashable:
        """Of the same value in another program."""
        loops = tuple(loop.line for loop in self.loops)
        shape = None if self.value is None else np.shape(self.value)
        return loops, self.line, self.primitive, self.phase, shape, self.number

    def __str__(self) -> str:
        where = f", in the {self.phase}" if self.phase else ""
        loops = "".join(f", in the loop at {loop.line}" for loop in reversed(self.loops))
        return f"{self.line}: {self.primitive}{where}{loops}"


class _ValueHeld(NamedTuple):
    array: jax.Array
    place: ValuePlace | None


Held = list[_ValueHeld]


def _held(value: jax.Array | _ValueHeld) -> _ValueHeld:
    return value if isinstance(value, _ValueHeld) else _ValueHeld(value, None)


@dataclass
class ValueRecorder:
    """Notes the places of a program, or of the body of a loop or a `shard_map`, in the order in
    which it runs, and those of its results. `line` is that of all of them, if it is JAX's function.
    """

    call: Call
    loops: tuple[ScanLoop, ...] = ()
    mesh: InDevices | None = None
    line: str = ""
    results: Places = field(default_factory=list)
    places: list[ValuePlace] = field(default_factory=list)
    counts: Counter[Hashable] = field(default_factory=Counter)

    @property
    def kept(self) -> list[ValuePlace]:
        """The places whose values are kept."""
        return [place for place in self.places if place.value is not None]

    def run(
        self, name: str, program: Program, given: Arrays, before: Places, constants: int = 0
    ) -> tuple[Arrays, Arrays]:
        """Runs all of it, and returns its results and the values of its places. What is `given` has
        been at the places `before`, and enters; `constants` are there anyway.
        """
        held = [*map(_ValueHeld, given[:constants], before[:constants])]
        held += self.passed(name, given[constants:], before[constants:])
        results = self._inside(program, held)
        self.results[:] = [result.place for result in results]
        return [x.array for x in results], [x.value for x in self.places if x.value is not None]

    def passed(self, name: str, arrays: Arrays, before: Places) -> Held:
        """Values that enter or leave a loop or a `shard_map`."""
        pairs = zip(arrays, before, strict=True)
        return [self._noted(name, at.line if at else "", x, [at]) for x, at in pairs]

    def left(self, name: str, inner: "ValueRecorder", results: Arrays, values: Arrays) -> Held:
        """The results of what `inner` has recorded; `values` are of all iterations or devices."""
        for place, value in zip(inner.kept, values, strict=True):
            place.value = value
        self.places += inner.places
        return self.passed(name, results, inner.results)

    def _noted(self, name: str, line: str, array: jax.Array, operands: Places) -> _ValueHeld:
        phase = f"{source_info_util.current_name_stack()}"
        phase = "backward pass" if "transpose(" in phase else ""
        has_numbers = not is_of_keys(array) and array.dtype != jax.dtypes.float0 and array.size
        # The first of a line is that of another program, if both have it, also if one has more.
        key = line, name, phase, np.shape(array)
        self.counts[key] += 1
        value, number = array if has_numbers else None, self.counts[key]
        place = ValuePlace(line, name, phase, operands, self.loops, self.mesh, value, number)
        self.places.append(place)
        return _ValueHeld(array, place)

    def _inside(self, program: Program, held: Held) -> Held:
        return list(map(_held, interpret(program, held, self._called)))

    def _called(self, eqn: JaxprEqn, args: list[jax.Array | _ValueHeld]) -> Sequence[_ValueHeld]:
        held, name = list(map(_held, args)), eqn.primitive.name
        arrays, places = [arg.array for arg in held], [arg.place for arg in held]
        if name == names.SCAN:
            return self._scan(eqn, arrays, places)
        if name == names.SHARD_MAP and self.mesh is None:
            return self._mapped(eqn, arrays, places)
        asked = eqn.params.get(names.PARAM_IN_SHARDINGS, [None] * len(held))
        arrays = at_shardings(arrays, asked)
        called = called_by(eqn, list(map(_ValueHeld, arrays, places)))
        if called is None:
            line = self.line or line_of(eqn)
            return [self._noted(name, line, x, places) for x in self.call(eqn, arrays)]
        before = self.line
        # A function of JAX is traced once, for the first line that calls it.
        self.line = before or (line_of(eqn) if is_of_jax(called[0]) else "")
        results = self._inside(*called)
        self.line = before
        return results

    def _scan(self, eqn: JaxprEqn, arrays: Arrays, places: Places) -> Held:
        length, reverse = (eqn.params[key] for key in (names.PARAM_LENGTH, names.PARAM_REVERSE))
        loop = ScanLoop(line_of(eqn), range(length)[:: -1 if reverse else 1])
        around, inner, loops = scan_of(eqn, arrays), list[ValueRecorder](), (*self.loops, loop)

        def turn(state: None, given: Arrays) -> tuple[None, Arrays, Arrays]:
            # JAX may trace it several times.
            inner[:] = [ValueRecorder(self.call, loops, self.mesh, self.line, loop.results)]
            constants = len(around.constants)
            return state, *inner[0].run(names.SCAN, around.body, given, places, constants)

        _, results, values = scanned(eqn, around, turn, None)
        return self.left(names.SCAN, inner[0], results, values)

    def _mapped(self, eqn: JaxprEqn, arrays: Arrays, places: Places) -> Held:
        mesh, params, inner = eqn.params[names.PARAM_MESH], eqn.params, list[ValueRecorder]()
        manual = tuple(a for a in mesh.axis_names if a in params[names.PARAM_MANUAL_AXES])
        mapped = InDevices({axis: mesh.shape[axis] for axis in manual}, len(self.loops))

        def body(*given: jax.Array) -> tuple[Arrays, Arrays]:
            inner[:] = [ValueRecorder(self.call, self.loops, mapped, self.line)]
            program = params[names.PARAM_JAXPR]
            results, values = inner[0].run(names.SHARD_MAP, program, [*given], places)
            return results, [jnp.asarray(value)[None] for value in values]

        results, values = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=tuple(params[names.PARAM_IN_SPECS]),
            out_specs=(list(params[names.PARAM_OUT_SPECS]), PartitionSpec(manual)),
            axis_names=set(manual),
            check_vma=params[names.PARAM_CHECK_VMA],
        )(*arrays)
        return self.left(names.SHARD_MAP, inner[0], results, values)


@dataclass(frozen=True)
class Runnable:
    """A program, and how to run a function of its arguments as the program is run."""

    program: ClosedJaxpr
    args: Arrays
    context: Callable[[], AbstractContextManager[None]]

    def recorded(
        self,
        given: Sequence[tuple[float, ...]] = ((),),
        call_of: Callable[..., Call] = lambda: bind_as,
    ) -> tuple[ValueRecorder, list[list[np.ndarray]]] | None:
        """Its places, and their values in a run for each of `given`: `call_of` makes of it what
        calls an equation. None if the values are too large.
        """
        found: list[ValueRecorder] = []

        def run(args: Arrays, *given: jax.Array) -> Arrays:
            found[:] = [ValueRecorder(call_of(*given))]
            return found[0].run("an argument", self.program, args, [None] * len(args))[1]

        with self.context():
            shapes = jax.eval_shape(run, self.args, *given[0])
            if sum(shape.size * shape.dtype.itemsize for shape in shapes) > _MOST:
                return None
            traced = jax.jit(run).lower(self.args, *given[0]).compile()
            values = [list(map(numbers_of, traced(self.args, *extra))) for extra in given]
        return found[0], values
