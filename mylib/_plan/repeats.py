"""Equal parts of a program, such as equal layers, are read once and then copied."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from .._compat import names, opened
from .._programs import JAXPRS
from .dims import Nodes
from .equations import is_literal, line_of, shape_of
from .lifetimes import Live
from .reading import Named, Operand, Place, Product, Reading


class Structures:
    """Numbers jaxprs: those in which a reader sees the same have one number. It sees no functions
    among parameters, such as policies, and the names of `jax.ad_checkpoint.checkpoint_name` are
    told apart by the caller.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        # With all objects whose ids are used, so that these stay valid.
        self._known: dict[int, tuple[Any, int, tuple[str, ...]]] = {}

    def of(self, jaxpr: Any) -> tuple[int, tuple[str, ...]]:
        """The number of a jaxpr, and the names in it."""
        if id(jaxpr) not in self._known:
            found: list[str] = []
            key = self._key(jaxpr, found)
            number = self._numbers.setdefault(key, len(self._numbers))
            self._known[id(jaxpr)] = jaxpr, number, tuple(found)
        return self._known[id(jaxpr)][1:]

    def _key(self, jaxpr: Any, found: list[str]) -> Hashable:
        numbers: dict[Any, int] = {}

        def read(x: Any) -> Hashable:
            return _kind(x) if is_literal(x) else numbers.setdefault(x, len(numbers))

        def made(x: Any) -> Hashable:
            return read(x), _kind(x)

        eqns: list[Hashable] = [(*map(made, jaxpr.constvars), None, *map(made, jaxpr.invars))]
        for eqn in jaxpr.eqns:
            name, params = eqn.primitive.name, dict(eqn.params)
            if name == names.CHECKPOINT_NAME:
                found.append(params.pop(names.PARAM_NAME))
            own = tuple(self._param(x, found) for x in params.values())
            line = line_of(eqn) if name == names.WHILE else ""
            eqns.append((name, line, *map(read, eqn.invars), None, *map(made, eqn.outvars), own))
        return tuple(eqns), tuple(map(read, jaxpr.outvars))

    def _param(self, x: Any, found: list[str]) -> Hashable:
        if isinstance(x, JAXPRS):
            number, inner = self.of(opened(x))
            found += inner
            return "jaxpr", number
        if isinstance(x, tuple | list):
            return tuple(self._param(one, found) for one in x)
        if callable(x):
            return None
        try:
            hash(x)
        except TypeError:
            self._known[id(x)] = x, -1, ()
            return "id", id(x)
        return x


def _kind(x: Any) -> Hashable:
    return shape_of(x.aval), getattr(x.aval, "dtype", None)


def _numbered(xs: Iterable[Any]) -> dict[Any, int]:
    """Different ones, numbered in the order in which they come."""
    return {x: i for i, x in enumerate(dict.fromkeys(xs))}


_LISTS = "places", "products", "sums", "moves", "whole", "named", "lives", "counted_once"


class Situation:
    """Where a jaxpr is read: with which names, arguments and sums, in which place. A reading with
    the same `key` adds the same to a program.
    """

    def __init__(
        self,
        program: Reading,
        structure: tuple[int, tuple[str, ...]],
        given: Sequence[Operand],
        place: Place,
        clock: int,
    ):
        dims = program.dims
        number, self.names = structure
        self.place, self.clock, self.count = place, clock, len(dims)
        self.nodes = [node for x in given for node in x.nodes]
        sums = [one for x in given if x.sum is not None for one in (x.sum, x.sum.root)]
        groups = _numbered(map(dims.group, self.nodes))
        known = _numbered(sorted(sums, key=lambda one: one.number))
        places = _numbered([place, *(one.place for one in known)])
        origins, labels = _numbered(x.origin for x in given), _numbered(self.names)
        self.groups, self.sums, self.origins = [*groups], [*known], [*origins]
        self.before = {name: len(getattr(program, name)) for name in _LISTS}

        def seen(x: Operand) -> Hashable:
            nodes = tuple((groups[dims.group(node)], node in program.loops) for node in x.nodes)
            origin = None if x.origin is None else origins[x.origin]
            return nodes, None if x.sum is None else known[x.sum], origin, x.carried

        self.key: Hashable = (
            number,
            place.times,
            tuple(labels[name] for name in self.names),
            tuple(map(dims.parts, groups)),
            tuple((x.amount, x.scattered, known[x.root], places[x.place]) for x in known),
            tuple(map(seen, given)),
        )


class Repeat:
    """What a reading has added to a program, to add it again where the situation is the same."""

    def __init__(self, program: Reading, at: Situation, results: Sequence[Operand], clock: int):
        dims, self._at, self._results, self.took = program.dims, at, results, clock - at.clock
        nodes = [*at.nodes, *range(at.count, len(dims))]
        classes = _numbered(map(dims.group, nodes))
        self._class_of = {node: classes[dims.group(node)] for node in nodes}
        self._loops = {self._class_of[node] for node in nodes if node in program.loops}
        # Of each class those of the given groups that are in it, and its number of parts.
        self._classes: list[tuple[list[int], int]] = [([], dims.parts(x)) for x in classes]
        for i, x in enumerate(at.groups):
            self._classes[classes[dims.group(x)]][0].append(i)
        self._added = {name: getattr(program, name)[n:] for name, n in at.before.items()}
        # As they are now, because what comes later changes them.
        self._sums = [replace(one) for one in (*at.sums, *self._added["sums"])]

    def again(self, program: Reading, at: Situation) -> list[Operand]:
        """Adds it in another situation with the same key. Returns the results."""
        shift = at.clock - self._at.clock
        classes = [
            program.dims.united([at.groups[i] for i in own], parts) for own, parts in self._classes
        ]
        program.loops.update(classes[i] for i in self._loops)
        label = dict(zip(self._at.names, at.names, strict=True))
        origin = dict(zip(self._at.origins, at.origins, strict=True))
        places = {self._at.place.number: at.place}
        for x in self._added["places"]:
            places[x.number] = Place(len(program.places), x.times, places[x.outside].number)
            program.places.append(places[x.number])

        def moved(nodes: Nodes) -> Nodes:
            return tuple(classes[self._class_of[node]] for node in nodes)

        def event(x: Any, **more: Any) -> Any:
            at = places[x.place.number]
            return replace(x, place=at, dims=moved(x.dims), over=moved(x.over), **more)

        def product(x: Product) -> Product:
            return event(x, operands=tuple((size, moved(nodes)) for size, nodes in x.operands))

        def named(x: Named) -> Named:
            return event(x, name=label[x.name], origin=origin.get(x.origin))

        def live(x: Live) -> Live:
            start, stop = x.start + shift, x.stop + shift
            return x._replace(start=start, stop=stop, nodes=moved(x.nodes))

        added = self._added
        program.products += map(product, added["products"])
        program.moves += map(event, added["moves"])
        program.whole += map(event, added["whole"])
        program.named += map(named, added["named"])
        program.lives += map(live, added["lives"])
        program.counted_once += added["counted_once"]
        sums = [*at.sums]
        for one in self._sums[len(sums) :]:
            number, after = len(program.sums), places[one.after.number]
            program.sums.append(event(one, number=number, first=None, after=after))
            sums.append(program.sums[-1])
        of_number = {old.number: new for old, new in zip(self._sums, sums, strict=True)}
        for old, new in zip(self._sums, sums, strict=True):
            new.amount, new.scattered = old.amount, old.scattered
            if old.first is not None and new.first is None:
                new.first = of_number[old.first.number]
        return [
            Operand(
                moved(x.nodes),
                None if x.sum is None else of_number[x.sum.number],
                origin.get(x.origin),
                x.carried,
            )
            for x in self._results
        ]
