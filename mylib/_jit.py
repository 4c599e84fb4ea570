"""`filter_jit`: `jax.jit` for functions of PyTrees, with placements in and out."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from operator import is_
from types import FunctionType, MethodType
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.experimental.layout import Format
from jaxtyping import PyTree

from ._arguments import Function, Inputs, about
from ._leaves import Kind, Leaves, canonical_dtype, kind_of, split
from ._placement import Placement
from ._program import Arrays, Outline, Program, is_array, key_of, outlined, parted
from ._shard import filter_device_put, place_leaves
from ._target import AnyMesh, Target
from ._world import World, current_world

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
) -> Callable[[Callable[P, T]], "Jitted[P, T]"]: ...


@overload
def filter_jit(
    fun: Callable[P, T],
    /,
    *,
    in_shardings: PyTree[Placement] = None,
    out_shardings: PyTree[Placement] = None,
    mesh: AnyMesh | None = None,
    donate: Donate = "none",
) -> "Jitted[P, T]": ...


def filter_jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    in_shardings: PyTree[Placement] = None,
    out_shardings: PyTree[Placement] = None,
    mesh: AnyMesh | None = None,
    donate: Donate = "none",
) -> Callable[..., Any]:
    """`jax.jit` for functions of PyTrees: arrays are traced, everything else is static.

    Takes the place of `equinox.filter_jit`, and unlike it returns before the work is done, as
    `jax.jit` does. (A program with an `equinox.error_if` in it is waited for, so that its error is
    readable.)

    **Arguments:**

    - `fun`: the function, or method, or Module. Without it a decorator is returned.
    - `in_shardings`: where the arguments go before the call: a placement for all of them, a tuple
        with a prefix for each of the positional ones, or a dict from names of parameters to
        prefixes. None leaves alone. What is elsewhere is moved there.
    - `out_shardings`: where the results are to be: a prefix of what the function returns. What is
        born there is never anywhere else: `filter_jit(Model, out_shardings=rule)(key)` makes a
        model of which no device ever holds more than its share.
    - `mesh`: what a `PartitionSpec` refers to; by default the mesh of `jax.set_mesh`.
    - `donate`: whether the arguments' memory may be used for the results: `"all"`,
        `"all-except-first"` (the first argument isn't donated), or `"none"`. `"warn"` and
        `"warn-except-first"` also say which arrays could not be used.

    **Returns:**

    The compiled function. It has a method `lower`, which takes the same arguments and returns what
    was lowered; its `compile()` returns the compiled function ahead of time.

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
    options = {"in_shardings": in_shardings, "out_shardings": out_shardings}
    if fun is None:
        return functools.partial(filter_jit, **options, mesh=mesh, donate=donate)
    if donate not in _DONATE:
        raise ValueError(
            f"filter_jit: donate={donate!r} is none of {', '.join(map(repr, _DONATE))}"
        )
    inputs = None if in_shardings is None else Inputs(in_shardings, mesh)
    return Jitted.of(fun, inputs, out_shardings, mesh, donate)


@jtu.register_pytree_node_class
class Jitted(Generic[P, T]):
    """What `filter_jit` and `filter_shard_map` return. As it may hold arrays (a Module's), it is a
    PyTree.
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
    ) -> "Jitted[..., Any]":
        arrays, outline = outlined(fun)
        recipe = Recipe(
            outline,
            code_of(fun),
            about(fun),
            Function.of(fun),
            inputs,
            out_shardings,
            mesh,
            donate,
        )
        return cls(arrays, recipe.shared())

    @property
    def __wrapped__(self) -> Callable[P, T]:
        return self.recipe.fun.fill(self.arrays)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.recipe.prepare(args, kwargs)(self.arrays)

    def lower(self, /, *args: Any, **kwargs: Any) -> "Lowered":
        """What the function is compiled from, for these arguments, some or all of which may be
        `jax.ShapeDtypeStruct`s.
        """
        call = self.recipe.prepare(args, kwargs, abstract=True)
        return Lowered(self, call.prepared, call.lower(self.arrays))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else eqx.Partial(self, instance)

    def __repr__(self) -> str:
        return f"filter_jit({self.__wrapped__!r})"

    def tree_flatten(self) -> tuple[tuple[Arrays], "Recipe"]:
        return (self.arrays,), self.recipe

    @classmethod
    def tree_unflatten(cls, recipe: "Recipe", children: Any) -> "Jitted[..., Any]":
        (arrays,) = children
        return cls(arrays, recipe)


class Lowered:
    """A function lowered for some arguments; `lowered` is what JAX has made of it."""

    def __init__(self, jitted: Jitted[..., Any], prepared: "Prepared", lowered: jax.stages.Lowered):
        self._jitted = jitted
        self._prepared = prepared
        self.lowered = lowered

    def as_text(self) -> str:
        return self.lowered.as_text() or ""

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "Compiled":
        return Compiled(self._jitted, self._prepared, self.lowered.compile(compiler_options))


class Compiled:
    """A function compiled ahead of time; `compiled` is what JAX has made of it, for the memory that
    it needs and the like.
    """

    def __init__(
        self, jitted: Jitted[..., Any], prepared: "Prepared", compiled: jax.stages.Compiled
    ):
        self._jitted = jitted
        self._prepared = prepared
        self._called = False
        self.compiled = compiled

    def as_text(self) -> str:
        return self.compiled.as_text() or ""

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        call = self._jitted.recipe.prepare(args, kwargs)
        if call.prepared is not self._prepared:
            raise TypeError(
                f"{self._prepared.recipe.name} was compiled for other static arguments, or for "
                "trees of another structure: compile it for these, too"
            )
        first, self._called = not self._called, True
        return call(self._jitted.arrays, self.compiled, first)


def code_of(fun: Any) -> FunctionType | None:
    """The Python function behind a callable, where there is one."""
    fun = inspect.unwrap(fun)
    while isinstance(fun, functools.partial | eqx.Partial):
        fun = fun.func
    if not isinstance(fun, FunctionType | MethodType | type):
        fun = inspect.unwrap(inspect.getattr_static(type(fun), "__call__"))
    fun = getattr(fun, "__func__", fun)
    return fun if isinstance(fun, FunctionType) else None


@dataclass(frozen=True, eq=False)
class Recipe:
    """All of a compiled function but the arrays in it."""

    fun: Outline
    code: Any
    about: Mapping[str, Any]
    function: Function
    inputs: Inputs | None
    out_shardings: Any
    mesh: AnyMesh | None
    donate: Donate
    known: dict[Any, "Prepared"] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.function.name

    def __deepcopy__(self, memo: Any) -> "Recipe":
        return self

    def __reduce__(self) -> Any:
        # Without the programs, which can't be copied.
        values = (getattr(self, f.name) for f in fields(self) if f.name != "known")
        return Recipe, tuple(values)

    def shared(self) -> "Recipe":
        """The recipe of an equal function, if there has been one: `filter_jit(filter_grad(f))` is a
        new object every time, and need not be compiled every time.
        """
        if self.inputs is not None or self.out_shardings is not None:
            return self
        try:
            return _first_of(_Same((key_of(self.fun.treedef, self.fun.static), self.donate), self))
        except TypeError:  # something in the function can't be hashed
            return self

    def prepare(self, args: Any, kwargs: Any, abstract: bool = False) -> "_Call":
        """The program for these arguments, and the arrays among them. In what is only lowered they
        may be abstract.
        """
        if self.inputs is not None:
            args, kwargs = self.inputs.bind(self.function, args, kwargs)
        elif kwargs:
            bound = self.function.signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        arrays, treedef, static = parted((args, kwargs), abstract)
        key = key_of(treedef, static)
        try:
            prepared = self.known.get(key)
        except TypeError as error:
            error.add_note(self.unhashable(args, kwargs))
            raise
        if prepared is None:
            # Another thread may have been faster.
            outline = Outline(treedef, static)
            new = Prepared(self, outline, _donated_from(self.donate, args, abstract))
            prepared = self.known.setdefault(key, new)
        return _Call(prepared, args, kwargs, arrays)

    def names(self, tree: Any) -> Iterator[tuple[str, Any]]:
        """The leaves of (args, kwargs), each with what a reader would call it."""
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
                    f"({self.name} was given {name}, a {type(x).__name__}. What is not an array is "
                    "static, and must have a hash)"
                )
        return f"(among what {self.name} was given)"


def captured_by(code: FunctionType | None) -> Iterator[tuple[str, Any]]:
    """The leaves of what a function finds outside of its arguments, by name."""
    for name, value in _variables(code):
        try:
            leaves = jtu.tree_flatten_with_path(value)[0]
        except (TypeError, ValueError):
            continue  # no tree: it can't be what was captured
        for path, x in leaves:
            yield name + jtu.keystr(path), x


def _variables(code: FunctionType | None) -> Iterator[tuple[str, Any]]:
    """What a function finds outside of itself, by name."""
    if code is None:
        return
    for name, cell in zip(code.__code__.co_freevars, code.__closure__ or (), strict=True):
        with suppress(ValueError):  # a cell that nothing has been put into
            yield name, cell.cell_contents
    for name in code.__code__.co_names:
        if name in code.__globals__:
            yield name, code.__globals__[name]


@dataclass(frozen=True)
class _Same:
    key: Any
    recipe: Recipe = field(compare=False)


@functools.lru_cache(maxsize=512)
def _first_of(same: _Same) -> Recipe:
    return same.recipe


class Prepared:
    """A function for arguments of one structure."""

    def __init__(self, recipe: Recipe, outline: Outline, donated_from: int | None):
        self.recipe = recipe
        self.outline = outline
        self.count: int = outline.count
        self.donated_from = donated_from
        self.program: Program = Program(
            self.call,
            recipe.name,
            self.names,
            recipe.captured,
            donated_from,
            recipe.donate.startswith("warn"),
        )
        self.resolved: tuple[Any, list[Target | None]] | None = None
        # The state of arguments of which nothing had to be moved.
        self.in_place: Any = None

    def call(self, arrays: Arrays) -> Any:
        recipe = self.recipe
        args, kwargs = self.outline.fill(arrays[: self.count])
        result = recipe.fun.fill(arrays[self.count :])(*args, **kwargs)
        if recipe.out_shardings is None:
            return result
        return filter_device_put(result, recipe.out_shardings, mesh=recipe.mesh)

    def names(self) -> list[str]:
        places = [_Array()] * self.count
        named = self.recipe.names(self.outline.fill(places))
        own = self.recipe.fun.fill(_Array() for _ in range(self.recipe.fun.count))
        return [name for name, x in named if isinstance(x, _Array)] + [
            self.recipe.name + jtu.keystr(path)
            for path, x in jtu.tree_flatten_with_path(own)[0]
            if isinstance(x, _Array)
        ]

    def targets(
        self, inputs: Inputs, leaves: Leaves, args: Any, kwargs: Any, world: World
    ) -> list[Target | None]:
        """Where `inputs` wants the arguments. Rules are asked once for the same shapes in the same
        surroundings.
        """
        asked = ([(x.shape, x.dtype) for x in leaves.arrays], leaves.kinds, world)
        resolved = self.resolved
        if resolved is None or resolved[0] != asked:
            targets = inputs.resolve(self.recipe.function, leaves, args, kwargs, world)
            resolved = self.resolved = asked, targets
        return resolved[1]


@dataclass
class _Call:
    """A function prepared for these arguments, whose arrays are `arrays`."""

    prepared: Prepared
    args: Any
    kwargs: Any
    arrays: Arrays

    def __call__(
        self, own: Arrays, ahead: jax.stages.Compiled | None = None, first: bool = False
    ) -> Any:
        """`own` are the arrays of the function itself; the rest as in `Program`."""
        placed, own = self.placed(own, abstract=False)
        try:
            result = self.prepared.program(placed + own, ahead, first)
        except RuntimeError as error:
            self.name_deleted(error)
            raise
        if placed is not self.arrays:
            self.let_go(placed)
        return result

    def lower(self, own: Arrays) -> jax.stages.Lowered:
        placed, own = self.placed(own, abstract=True)
        return self.prepared.program.lower(placed + own)

    def name_deleted(self, error: RuntimeError) -> None:
        """Adds to JAX's error which of the arguments are meant."""
        gone = [
            name
            for name, x in self.prepared.recipe.names((self.args, self.kwargs))
            if kind_of(x) is Kind.DEVICE and x.is_deleted()
        ]
        if gone and "deleted" in str(error):
            error.add_note(f"({self.prepared.recipe.name} was given {', '.join(gone)})")

    def placed(self, own: Arrays, abstract: bool) -> tuple[Arrays, Arrays]:
        """The arrays of the arguments, and the function's own, where they are wanted. If `abstract`
        nothing is moved.
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
        wanted = prepared.targets(inputs, leaves, self.args, self.kwargs, world)
        function = prepared.recipe.function
        targets = inputs.missing(function, leaves, wanted, world)
        with function.named_in_errors():
            values = _at(leaves, targets, world, abstract)
        own_leaves = split(own)
        own_values = _at(own_leaves, inputs.missing_own(function, own, world), world, abstract)
        if all(map(is_, values + own_values, leaves.arrays + own)):
            # Layouts are not part of the state.
            if not any(isinstance(target, Format) for target in wanted):
                prepared.in_place = state
            return self.arrays, own
        everything = list(leaves.all)
        for position, x in zip(leaves.positions, values, strict=True):
            everything[position] = x
        static = prepared.outline.positions
        return [x for i, x in enumerate(everything) if i not in static], own_values

    def let_go(self, placed: Arrays) -> None:
        """What was donated and had to be moved is used up as well, now that all has gone well."""
        start = self.prepared.donated_from
        if start is None or any(isinstance(x, Tracer) for x in self.arrays):
            return
        kept = set(map(id, self.arrays[:start]))
        for x, y in zip(self.arrays[start:], placed[start:], strict=True):
            if isinstance(x, jax.Array) and x is not y and id(x) not in kept:
                if not x.is_deleted():
                    x.delete()


class _Array:
    """Stands where an array was."""


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
