"""`filter_jit`: `jax.jit` for functions of PyTrees, with placements in and out."""

import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import is_
from types import MappingProxyType
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.experimental.layout import Format
from jaxtyping import PyTree

from .._audit import Report, report_of
from .._compat import (
    is_staged,
    lowered_for_a_missing_backend,
    names,
    ran_on_a_description,
)
from .._errors import StaticNumberWarning, warn
from .._placement import AnyMesh, Placement, Target, World, current_world, is_described
from .._processes import raised_in_all
from .._transfer import filter_device_put, is_of_keys, mesh_of_all, place_leaves
from .._tree import (
    Arrays,
    Kind,
    Leaves,
    Outline,
    canonical_dtype,
    is_array,
    kind_of,
    outlined,
    parted,
    split,
)
from ..machines import (
    Argument,
    Fit,
    Machine,
    Memory,
    NotHereError,
    arguments_of,
    memory_of,
    out_of_memory,
)
from .advice import Advice, captured_by, code_of
from .cache import Known
from .key import Key
from .program import Program
from .signature import Function, Inputs, about

P = ParamSpec("P")
T = TypeVar("T")
Donate = Literal["all", "all-except-first", "warn", "warn-except-first", "none"]
_DONATE = ("all", "all-except-first", "warn", "warn-except-first", "none")


@overload
def filter_jit(
    *,
    in_shardings: PyTree[Placement] = None,
    out_shardings: PyTree[Placement] = None,
    mesh: AnyMesh | None = None,
    donate: Donate = "none",
    inline: Any = False,
    keep_unused: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> Callable[[Callable[P, T]], "Jitted[P, T]"]: ...


@overload
def filter_jit(
    fun: Callable[P, T],
    *,
    in_shardings: PyTree[Placement] = None,
    out_shardings: PyTree[Placement] = None,
    mesh: AnyMesh | None = None,
    donate: Donate = "none",
    inline: Any = False,
    keep_unused: bool = False,
    compiler_options: dict[str, Any] | None = None,
) -> "Jitted[P, T]": ...


def filter_jit(
    fun: Callable[..., Any] | None = None,
    *,
    in_shardings: PyTree[Placement] = None,
    out_shardings: PyTree[Placement] = None,
    mesh: AnyMesh | None = None,
    donate: Donate = "none",
    inline: Any = False,
    keep_unused: bool = False,
    compiler_options: dict[str, Any] | None = None,
    **others: Any,
) -> Callable[..., Any]:
    """`jax.jit` for functions of PyTrees: arrays are traced, everything else is static.

    A replacement for `equinox.filter_jit` that returns before the work is done, as `jax.jit` does.
    (If the program contains an `equinox.error_if`, the call waits for it, so that the error is
    readable.)

    **Arguments:**

    - `fun`: a function, method or Module. Without it a decorator is returned.
    - `in_shardings`: where the arguments are moved before the call: a placement for all of them, a
        tuple with a prefix for each positional argument, or a dict from parameter names to
        prefixes. None leaves arrays where they are.
    - `out_shardings`: the placement of the results: a prefix of the function's result. They are
        created there: with `filter_jit(Model, out_shardings=rule)(key)` no device ever holds more
        than its share of the model.
    - `mesh`: the mesh for a `PartitionSpec`; by default the mesh of `jax.set_mesh`.
    - `donate`: whether the arguments' memory may be used for the results: `"all"`,
        `"all-except-first"` (the first argument isn't donated), or `"none"`. `"warn"` and
        `"warn-except-first"` also warn about arrays that could not be reused. An array that occurs
        twice among the arguments is copied, so that it is donated only once, or not at all if it is
        also an argument that isn't donated.
    - `inline`, `keep_unused`, `compiler_options`: as for `jax.jit`.

    **Returns:**

    The compiled function. Its method `lower` takes the same arguments and lowers the function for
    them; `.lower(...).compile()` compiles it ahead of time.

    **Raises:**

    `TypeError` for arguments of `jax.jit` that have no meaning here, saying what to use instead;
    `ValueError` if `donate` is none of its values. Calls raise [`mylib.PlacementError`][] before
    the function runs.

    !!! Example

        ```python
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((8,), ("data",), axis_types=auto)
        fsdp = mylib.rules.fsdp("data")
        make = mylib.filter_jit(eqx.nn.MLP, out_shardings=fsdp, mesh=mesh)
        model = make(64, 64, 512, 1, key=jax.random.key(0))
        assert model.layers[0].weight.sharding.spec == P("data")

        @mylib.filter_jit(in_shardings={"x": P("data")}, mesh=mesh)
        def predict(model, x):
            return jax.vmap(model)(x)

        y = predict(model, np.ones((16, 64), np.float32))
        ```
    """
    if others:
        raise TypeError(_refused(others))
    options = {
        "inline": inline,
        "keep_unused": keep_unused,
        "compiler_options": compiler_options,
    }
    if fun is None:
        return functools.partial(
            filter_jit,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            mesh=mesh,
            donate=donate,
            **options,
        )
    if donate not in _DONATE:
        raise ValueError(
            f"filter_jit: donate={donate!r} is none of {', '.join(map(repr, _DONATE))}"
        )
    inputs = None if in_shardings is None else Inputs(in_shardings, mesh)
    given = {name: value for name, value in options.items() if value not in (None, False)}
    return Jitted.of(fun, inputs, out_shardings, mesh, donate, given)


# Options of `jax.jit` and what to write instead.
_INSTEAD = {
    "static_argnums": "leave it out: everything that is not an array is static",
    "static_argnames": "leave it out: everything that is not an array is static",
    "donate_argnums": "write donate='all', or donate='all-except-first'",
    "donate_argnames": "write donate='all', or donate='all-except-first'",
    "device": "write in_shardings=device, which may be any placement",
    "backend": "write in_shardings=jax.devices(backend)[0], which may be any placement",
}


def _refused(others: Mapping[str, Any]) -> str:
    name = next(iter(others))
    told = f"filter_jit() got an unexpected keyword argument {name!r}"
    return f"{told}: {_INSTEAD[name]}" if name in _INSTEAD else told


@jtu.register_pytree_node_class
class Jitted(Generic[P, T]):
    """A function compiled by `filter_jit` or `filter_shard_map`. It is a PyTree, as it may hold
    arrays (a Module's).
    """

    def __init__(self, arrays: Arrays, recipe: "Recipe"):
        self.arrays = arrays
        self.recipe = recipe
        self.__dict__.update(recipe.about)

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        inputs: Inputs | None = None,
        out_shardings: Any = None,
        mesh: AnyMesh | None = None,
        donate: Donate = "none",
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> "Jitted[..., Any]":
        leaves, treedef = jtu.tree_flatten(fun)
        arrays, are_arrays, static = parted(leaves)
        recipe = Recipe(
            Outline(treedef, are_arrays, static),
            code_of(fun),
            about(fun),
            Function.of(fun),
            inputs,
            out_shardings,
            mesh,
            donate,
            options,
        )
        if inputs is None and out_shardings is None:
            recipe = recipe.shared(Key(leaves, treedef, are_arrays, static))
        return cls(arrays, recipe)

    @property
    def __wrapped__(self) -> Callable[P, T]:
        return self._compiled_function()

    def _compiled_function(self) -> Any:
        return self.recipe.fun.fill(self.arrays)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return self.recipe.prepare(args, kwargs)(self.arrays)
        except (AttributeError, RuntimeError) as error:
            if not ran_on_a_description(error):
                raise
            raise _not_here(self.recipe) from error

    def lower(self, /, *args: Any, **kwargs: Any) -> "Lowered":
        """Lowers the function for these arguments, some or all of which may be
        `jax.ShapeDtypeStruct`s.
        """
        call = self.recipe.prepare(args, kwargs, abstract=True)
        try:
            return Lowered(self, call.prepared, *call.lower(self.arrays))
        except (AttributeError, RuntimeError) as error:
            if ran_on_a_description(error):
                raise NotHereError(
                    f"while {self.recipe.name} was traced, JAX ran a computation on the mesh of "
                    "jax.set_mesh, whose machine is not here: it can compile, not run. "
                    "Leave out jax.set_mesh, and pass mesh= where it is needed"
                ) from error
            if lowered_for_a_missing_backend(error):
                raise NotHereError(
                    f"{self.recipe.name} calls back into Python (jax.debug.print, pure_callback, "
                    "io_callback), which JAX can't lower for GPUs that are not here. Leave the "
                    "callback out. equinox.error_if can stay: filter_jit makes it a result"
                ) from error
            raise

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else eqx.Partial(self, instance)

    def __repr__(self) -> str:
        return f"filter_jit({self.__wrapped__!r})"

    def __copy__(self) -> "Jitted[P, T]":
        return type(self)(list(self.arrays), self.recipe)

    def __deepcopy__(self, memo: Any) -> "Jitted[P, T]":
        return type(self)(copy.deepcopy(self.arrays, memo), self.recipe)

    def __reduce__(self) -> Any:
        # Without the programs. The function is stored whole, because tree structures can't be
        # copied.
        recipe = self.recipe
        given = recipe.inputs, recipe.out_shardings, recipe.mesh, recipe.donate
        return type(self).of, (self._compiled_function(), *given, dict(recipe.options))

    def tree_flatten(self) -> tuple[tuple[Arrays], "Recipe"]:
        return (self.arrays,), self.recipe

    @classmethod
    def tree_unflatten(cls, recipe: "Recipe", children: Any) -> "Jitted[..., Any]":
        (arrays,) = children
        return cls(arrays, recipe)


class Lowered:
    """A function lowered for some arguments; `lowered` is JAX's own object."""

    def __init__(
        self,
        jitted: Jitted[..., Any],
        prepared: "Prepared",
        lowered: jax.stages.Lowered,
        arguments: Sequence[Argument],
    ):
        self._jitted = jitted
        self._prepared = prepared
        self._arguments = arguments
        self.lowered = lowered

    def as_text(self) -> str:
        return self.lowered.as_text() or ""

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "Compiled":
        """Compiles it. Raises [`mylib.machines.OutOfMemoryError`][] if the compiler finds that it
        does not fit into the devices' memory, which only the TPU's compiler checks.
        """
        try:
            compiled = self.lowered.compile(compiler_options)
        except jax.errors.JaxRuntimeError as error:
            readable = out_of_memory(error, self._arguments)
            if readable is None:
                raise
            raise readable from error
        return Compiled(self._jitted, self._prepared, compiled, self._arguments)


# The names of arrays in the program, which takes two lists of them.
_NUMBERED = re.compile(r"(kept|donated)\[(\d+)\]")


class Compiled:
    """A function compiled ahead of time; `compiled` is JAX's own object."""

    def __init__(
        self,
        jitted: Jitted[..., Any],
        prepared: "Prepared",
        compiled: jax.stages.Compiled,
        arguments: Sequence[Argument],
    ):
        self._jitted = jitted
        self._prepared = prepared
        self._arguments = arguments
        self._called = False
        self.compiled = compiled

    @functools.cached_property
    def memory(self) -> Memory:
        """The bytes that it needs on each device."""
        return memory_of(self.compiled, self._arguments)

    def fits(self, machine: Machine) -> Fit:
        """Whether it fits into the memory of each device of a machine; see `Memory.fits`."""
        return self.memory.fits(machine)

    def as_text(self) -> str:
        return self.compiled.as_text() or ""

    def audit(self, *, mesh: AnyMesh | None = None, local: Iterable[str] = ()) -> Report:
        """What the program communicates and holds, as reported by [`mylib.audit`][]."""
        paths = self._prepared.names()
        sides = {"kept": 0, "donated": self._prepared.donated_from or 0}

        def name(own: str) -> str:
            match = _NUMBERED.fullmatch(own)
            return paths[sides[match[1]] + int(match[2])] if match else own

        mesh = self._prepared.recipe.mesh if mesh is None else mesh
        return report_of(self.compiled, name, mesh=mesh, local=local)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = self._jitted.recipe.read(args, kwargs)
        if call.key != self._prepared.key:
            if any(isinstance(x, jax.ShapeDtypeStruct) for x in jtu.tree_leaves((args, kwargs))):
                raise TypeError(
                    f"{self._prepared.recipe.name} is called with a jax.ShapeDtypeStruct, which "
                    "has no numbers: it is for compiling only"
                )
            raise TypeError(
                f"{self._prepared.recipe.name} was compiled for other static arguments, or for "
                "another tree structure: compile it for these, too"
            )
        call.prepared = self._prepared
        first, self._called = not self._called, True
        try:
            return call(self._jitted.arrays, self.compiled, first)
        except (AttributeError, RuntimeError) as error:
            if not ran_on_a_description(error):
                raise
            raise _not_here(self._prepared.recipe) from error


def _not_here(recipe: "Recipe") -> NotHereError:
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
        options = {**self.options, **self.options.get("compiler_options", {})}
        try:
            return _first_of(_Same((key, self.donate, tuple(sorted(options.items()))), self))
        except TypeError:  # the function holds something unhashable
            return self

    def prepare(self, args: Any, kwargs: Any, abstract: bool = False) -> "_Call":
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
                raise _not_here(self)
            donated_from = _donated_from(self.donate, call.args, abstract)
            prepared, changing = self.known.add(call.key, Prepared(self, call.key, donated_from))
            if changing:
                self.warn_of_numbers(call, changing)
        call.prepared = prepared
        return call

    def read(self, args: Any, kwargs: Any, abstract: bool = False) -> "_Call":
        """A call with these arguments, without a program yet."""
        if self.inputs is not None:
            args, kwargs = self.inputs.bind(self.function, args, kwargs)
        elif kwargs:
            bound = self.function.signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        # Without keyword arguments a tree of the positional ones (a tuple) is enough.
        leaves, treedef = jtu.tree_flatten([args, kwargs] if kwargs else args)
        arrays, are_arrays, static = parted(leaves, abstract)
        return _Call(args, kwargs, arrays, Key(leaves, treedef, are_arrays, static))

    def warn_of_numbers(self, call: "_Call", positions: set[int]) -> None:
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
            yield self.function.readable(jtu.keystr(path)), x

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
            Advice(recipe.name, self.names, recipe.captured, recipe.donate.startswith("warn")),
            donated_from,
            recipe.options,
        )
        # The paths of the arrays in the arguments, and of those in the function.
        self.paths: tuple[list[str], list[str]] = [], []
        self.resolved: tuple[Any, list[Target | None]] | None = None
        # The state of the last arguments that needed no moves.
        self.in_place: Any = None

    def call(self, arrays: Arrays) -> Any:
        recipe = self.recipe
        given = self.outline.fill(arrays[: self.count])
        args, kwargs = given if isinstance(given, list) else (given, {})
        fun = recipe.fun.fill(arrays[self.count :])
        # Before the function can change them. Later the values may be gone.
        self.paths = _paths_in((args, kwargs), self.outline), _paths_in(fun, recipe.fun)
        result = fun(*args, **kwargs)
        if recipe.out_shardings is None:
            return result
        return filter_device_put(result, recipe.out_shardings, mesh=recipe.mesh)

    def names(self) -> list[str]:
        given, own = self.paths
        recipe = self.recipe
        return [*map(recipe.function.readable, given), *(recipe.name + path for path in own)]

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


def _paths_in(tree: Any, outline: Outline) -> list[str]:
    paths = [jtu.keystr(path) for path, _ in jtu.tree_flatten_with_path(tree)[0]]
    if len(paths) != len(outline.are_arrays):  # a node that changes when it is unflattened
        return [f"<leaf {i}>" for i in range(outline.count)]
    return list(compress(paths, outline.are_arrays))


class _Call:
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
        except RuntimeError as error:
            self.name_deleted(error)
            self.name_sharing(error)
            raise
        if placed is not self.arrays:
            self.let_go(placed)
        return result

    def lower(self, own: Arrays) -> tuple[jax.stages.Lowered, list[Argument]]:
        placed, own = self.placed(own, abstract=True)
        arrays = placed + own
        lowered = self.prepared.program.lower(arrays)
        return lowered, arguments_of(self.prepared.names(), arrays)

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

    def name_deleted(self, error: RuntimeError) -> None:
        """Adds the names of the deleted arguments to JAX's error."""
        gone = [
            name
            for name, x in self.prepared.recipe.names((self.args, self.kwargs))
            if kind_of(x) is Kind.DEVICE and x.is_deleted()
        ]
        if gone and names.TEXT_DELETED in str(error):
            error.add_note(f"({self.prepared.recipe.name} was given {', '.join(gone)})")

    def name_sharing(self, error: RuntimeError) -> None:
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
        if inputs.are_placed(world):
            return self.arrays, own
        state = inputs.state_of(self.arrays + own, world)
        if state is not None and state == prepared.in_place:
            return self.arrays, own
        leaves = split((self.args, self.kwargs), prepared.outline.positions)
        with raised_in_all(None if abstract else mesh_of_all(inputs.mesh, world), check=None):
            wanted = prepared.targets(inputs, leaves, self.args, self.kwargs, world)
        function = prepared.recipe.function
        targets = inputs.missing(function, leaves, wanted, world)
        with function.named_in_errors():
            values = _at(leaves, targets, world, abstract)
        own_leaves = split(own)
        own_values = _at(own_leaves, inputs.missing_own(function, own, world), world, abstract)
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
