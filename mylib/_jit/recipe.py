"""The calls of a compiled function: its arguments are bound, split, placed, and given to a program
for their structure.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import is_
from typing import Any, Literal

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.experimental.layout import Format

from .._compat import is_staged, names
from .._errors import NotHereError, PlacementError, StaticNumberWarning, warn
from .._placement import AnyMesh, Target, World, current_world, is_described
from .._processes import one_call, raised_in_all
from .._transfer import filter_device_put, mesh_of_all, place_leaves
from .._tree import (
    Arrays,
    KeyPath,
    Kind,
    Leaves,
    Outline,
    canonical_dtype,
    is_array,
    is_of_keys,
    kind_of,
    outlined,
    parted,
    split,
)
from .advice import Advice, captured_by, some
from .cache import Known
from .inputs import Inputs
from .key import Key
from .notes import NUMBERED
from .placed_after import PlacedAfter
from .program import Program
from .signature import Function

Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]


def not_here(recipe: "Recipe") -> NotHereError:
    return NotHereError(
        f"{recipe.name} can't be called: its devices are those of a machine that is not here, "
        "which can compile, not run. Call .lower(...).compile()"
    )


@dataclass(frozen=True, eq=False)
class Recipe:
    """Everything about a compiled function except the arrays in it."""

    fun: Outline
    code: Any
    about: Mapping[str, Any]
    function: Function
    inputs: Inputs | None
    out_shardings: Any
    mesh: AnyMesh | None
    donate: Donate
    options: Mapping[str, Any]
    known: "Known[Prepared]" = field(default_factory=lambda: Known())

    @property
    def name(self) -> str:
        return self.function.name

    def shared(self, key: Key) -> "Recipe":
        """The recipe of an equal function, if there is one: `filter_jit(filter_grad(f))` is a new
        object every time, but need not be compiled every time. `key` is the function's key.
        """
        options = dict(self.options)
        compiler = options.pop("compiler_options", {})
        same = key, self.donate, self.mesh, _exact(options), _exact(compiler)
        try:
            return _first_of(_Same(same, self))
        except TypeError:  # the function holds something unhashable
            return self

    def prepare(self, args: Any, kwargs: Any, abstract: bool = False) -> "Call":
        """A call with these arguments and the program for them. If it is only lowered, arrays may
        be `abstract`.
        """
        call = self.read(args, kwargs, abstract)
        try:
            prepared = self.known.get(call.key)
        except TypeError as error:
            error.add_note(self.unhashable(call.args, call.kwargs))
            raise
        if prepared is None:
            mesh = self.mesh if self.mesh is not None else current_world().devices
            if not abstract and is_described(mesh) and not is_staged():
                raise not_here(self)
            donated_from = _donated_from(self.donate, call.args, abstract)
            prepared, changing = self.known.add(call.key, Prepared(self, call.key, donated_from))
            if changing:
                self.warn_of_numbers(call, changing)
        call.prepared = prepared
        return call

    def read(self, args: Any, kwargs: Any, abstract: bool = False) -> "Call":
        """A call with these arguments, without a program yet."""
        if self.inputs is not None:
            args, kwargs = self.inputs.bind(self.function, args, kwargs)
        elif kwargs:
            args, kwargs = self.function.bind(args, kwargs)
        # Without keyword arguments a tree of the positional ones (a tuple) is enough.
        leaves, treedef = jtu.tree_flatten([args, kwargs] if kwargs else args)
        arrays, are_arrays, static = parted(leaves, abstract)
        return Call(args, kwargs, arrays, Key(treedef, are_arrays, static))

    def warn_of_numbers(self, call: "Call", positions: set[int]) -> None:
        named = list(self.names((call.args, call.kwargs)))
        names = ", ".join(named[i][0] for i in sorted(positions))
        warn(
            f"{self.name} is compiled at each call: its argument {names} is a Python number, which "
            f"is static, and has a new value each time. Pass jnp.asarray({names}).",
            StaticNumberWarning,
        )

    def names(self, tree: Any) -> Iterator[tuple[str, Any]]:
        """The leaves of (args, kwargs), with readable names."""
        for path, x in jtu.tree_flatten_with_path(tree)[0]:
            yield self.function.naming(path), x

    def captured(self) -> Iterator[tuple[str, Any]]:
        return captured_by(self.code)

    def unhashable(self, args: Any, kwargs: Any) -> str:
        for name, x in self.names((args, kwargs)):
            if is_array(x):
                continue
            try:
                hash(x)
            except TypeError:
                return (
                    f"({self.name} was given {name}, a {type(x).__name__}. Arguments that are not "
                    "arrays are static, and must be hashable)"
                )
        return f"(among the arguments of {self.name})"


def _exact(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """The options as something that can be hashed. Unlike `==` it distinguishes 1 and True."""
    return tuple((name, type(value), value) for name, value in sorted(options.items()))


@dataclass(frozen=True)
class _Same:
    key: Any
    recipe: Recipe = field(compare=False)


@functools.lru_cache(maxsize=512)
def _first_of(same: _Same) -> Recipe:
    return same.recipe


class Prepared:
    """A function prepared for arguments of one structure."""

    def __init__(self, recipe: Recipe, key: Key, donated_from: int | None):
        self.recipe = recipe
        self.key = key
        self.outline: Outline = Outline(key.treedef, key.are_arrays, key.static)
        self.count: int = self.outline.count
        self.donated_from = donated_from
        self.program: Program = Program(
            self.call,
            recipe.name,
            Advice(
                recipe.name, lambda: self.names, recipe.captured, recipe.donate.startswith("warn")
            ),
            donated_from,
            recipe.options,
        )
        # The names of the arrays in the arguments, then of those in the function.
        self.names: list[str] = []
        self.resolved: tuple[Any, list[Target | None]] | None = None
        # The state of the last arguments that needed no moves.
        self.in_place: Any = None

    def call(self, arrays: Arrays) -> Any:
        recipe = self.recipe
        given = self.outline.fill(arrays[: self.count])
        args, kwargs = given if isinstance(given, list) else (given, {})
        fun = recipe.fun.fill(arrays[self.count :])
        # Before the function can change them. Later the values may be gone.
        self.names = [
            *_names_in((args, kwargs), self.outline, recipe.function.naming),
            *_names_in(fun, recipe.fun, lambda path: recipe.name + jtu.keystr(path)),
        ]
        result = fun(*args, **kwargs)
        if recipe.out_shardings is None:
            return result
        try:
            placed = filter_device_put(result, recipe.out_shardings, mesh=recipe.mesh)
        except PlacementError as error:
            error.add_note(f"(the tree is what {recipe.name} returns, placed by its out_shardings)")
            raise
        return PlacedAfter.of(placed, recipe.out_shardings, recipe.mesh)

    def named(self, own: str) -> str:
        """The caller's name of an array with this name in the program."""
        if not (match := NUMBERED.fullmatch(own)):
            return own
        first = {"kept": 0, "donated": self.donated_from or 0}[match[1]]
        position = first + int(match[2])
        return self.names[position] if position < len(self.names) else own

    def targets(
        self, inputs: Inputs, leaves: Leaves, args: Any, kwargs: Any, world: World
    ) -> list[Target | None]:
        """The targets of the arguments. Rules are called once for the same shapes in the same
        context.
        """
        asked = ([(x.shape, x.dtype) for x in leaves.arrays], leaves.kinds, world)
        resolved = self.resolved
        if resolved is None or resolved[0] != asked:
            targets = inputs.resolve(self.recipe.function, leaves, args, kwargs, world)
            resolved = self.resolved = asked, targets
        return resolved[1]


def _names_in(tree: Any, outline: Outline, naming: Callable[[KeyPath], str]) -> list[str]:
    paths = [path for path, _ in jtu.tree_flatten_with_path(tree)[0]]
    if len(paths) != len(outline.are_arrays):  # a node that changes when it is unflattened
        return [f"{naming(())}<leaf {i}>" for i in range(outline.count)]
    return list(map(naming, compress(paths, outline.are_arrays)))


class Call:
    """A call of a function: its arguments, split into `arrays` and `key`, and the function prepared
    for them.
    """

    __slots__ = ("args", "arrays", "key", "kwargs", "prepared")
    prepared: Prepared

    def __init__(self, args: Any, kwargs: Any, arrays: Arrays, key: Key):
        self.args: Any = args
        self.kwargs: Any = kwargs
        self.arrays: Arrays = arrays
        self.key: Key = key

    def __call__(
        self, own: Arrays, ahead: jax.stages.Compiled | None = None, first: bool = False
    ) -> Any:
        """`own` are the arrays of the function itself; `ahead` and `first` are as in `Program`."""
        prepared, placed = self.prepared, self.arrays
        if prepared.recipe.inputs is not None:
            placed, own = self.placed(own, abstract=False)
        arrays = placed + own if own else placed
        try:
            if prepared.donated_from is not None:
                arrays = self.used_once(arrays, prepared.donated_from)
            result = prepared.program(arrays, ahead, first)
        except (RuntimeError, ValueError) as error:
            self.name_deleted(error)
            self.name_sharing(error)
            raise
        if placed is not self.arrays:
            self.let_go(placed)
        return result.placed() if isinstance(result, PlacedAfter) else result

    def lower(self, own: Arrays) -> tuple[jax.stages.Lowered, Arrays]:
        """The lowered program, and the arrays that it was lowered for."""
        placed, own = self.placed(own, abstract=True)
        arrays = placed + own
        return self.prepared.program.lower(arrays), arrays

    def used_once(self, arrays: Arrays, start: int) -> Arrays:
        """The arrays, with a copy of each donated one that occurs twice or is also passed without
        being donated: JAX refuses to donate those.
        """
        taken = {*map(id, arrays[:start]), *map(id, self.arrays[:start])}
        if len(taken.union(map(id, arrays[start:]))) == len(taken) + len(arrays) - start:
            return arrays
        arrays = list(arrays)
        for i, x in enumerate(arrays[start:], start):
            if isinstance(x, jax.Array) and not isinstance(x, Tracer) and id(x) in taken:
                arrays[i] = jax.device_put(x, may_alias=False)
            taken.add(id(x))
        return arrays

    def name_deleted(self, error: Exception) -> None:
        """Adds the names of the deleted arguments to JAX's error."""
        gone = [
            name
            for name, x in self.prepared.recipe.names((self.args, self.kwargs))
            if kind_of(x) is Kind.DEVICE and x.is_deleted()
        ]
        if gone and names.TEXT_DELETED in str(error):
            error.add_note(
                f"({self.prepared.recipe.name} was given deleted arrays: {some(gone)}. A call that "
                "donates an argument deletes its arrays: use what that call returned, or don't "
                "donate)"
            )

    def name_sharing(self, error: Exception) -> None:
        """Adds the names of arguments that share memory to JAX's error. Checking that before each
        call would take longer than many a call.
        """
        if names.TEXT_DONATE not in str(error):
            return
        owners: dict[int, str] = {}
        for name, x in self.prepared.recipe.names((self.args, self.kwargs)):
            if kind_of(x) is not Kind.DEVICE or is_of_keys(x) or x.is_deleted():
                continue
            for shard in x.addressable_shards:
                other = owners.setdefault(shard.data.unsafe_buffer_pointer(), name)
                if other != name:
                    error.add_note(
                        f"({self.prepared.recipe.name} was given {other} and {name}, which share "
                        "memory and are donated: pass a copy of one)"
                    )
                    return

    def placed(self, own: Arrays, abstract: bool) -> tuple[Arrays, Arrays]:
        """The arrays of the arguments and of the function, at their targets. If `abstract`, nothing
        is moved.
        """
        prepared, inputs = self.prepared, self.prepared.recipe.inputs
        if inputs is None:
            return self.arrays, own
        world = current_world()
        inputs.hand_over(None)
        if world.staged and not inputs.moves.also_staged:
            return self.arrays, own
        state = inputs.state_of(self.arrays + own, world)
        if state is not None and state == prepared.in_place:
            return self.arrays, own
        function = prepared.recipe.function
        leaves = function.split((self.args, self.kwargs), prepared.outline.positions)
        of_all = None if abstract else mesh_of_all(inputs.mesh, world)
        with one_call(of_all, None), raised_in_all(of_all, None):
            wanted = prepared.targets(inputs, leaves, self.args, self.kwargs, world)
        inputs.hand_over(wanted)
        targets, own_targets = inputs.moves.needed(leaves, wanted, own, world)
        values = _at(leaves, targets, world, abstract)
        own_values = _at(split(own), own_targets, world, abstract)
        if all(map(is_, values + own_values, leaves.arrays + own)):
            # The state does not include layouts.
            if not any(isinstance(target, Format) for target in wanted):
                prepared.in_place = state
            return self.arrays, own
        everything = list(leaves.all)
        for position, x in zip(leaves.positions, values, strict=True):
            everything[position] = x
        static = prepared.outline.positions
        return [x for i, x in enumerate(everything) if i not in static], own_values

    def let_go(self, placed: Arrays) -> None:
        """After a successful call, deletes donated arrays that had to be moved before it."""
        start = self.prepared.donated_from
        if start is None or any(isinstance(x, Tracer) for x in self.arrays):
            return
        kept = set(map(id, self.arrays[:start]))
        for x, y in zip(self.arrays[start:], placed[start:], strict=True):
            if isinstance(x, jax.Array) and x is not y and id(x) not in kept:
                if not x.is_deleted():
                    x.delete()


def _at(
    leaves: Leaves, targets: Sequence[Target | None], world: World, abstract: bool
) -> list[Any]:
    if abstract:
        return [_abstract(x, target) for x, target in zip(leaves.arrays, targets, strict=True)]
    return place_leaves(leaves, targets, world)


def _abstract(x: Any, target: Target | None) -> Any:
    if target is None:
        return x
    dtype, weak = canonical_dtype(x), getattr(x, "weak_type", False)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=target, weak_type=weak)


def _donated_from(donate: Donate, args: Any, abstract: bool) -> int | None:
    if donate == "none":
        return None
    return len(outlined(args[0], abstract)[0]) if donate.endswith("except-first") and args else 0
