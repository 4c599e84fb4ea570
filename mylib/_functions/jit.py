"""`filter_jit`: `jax.jit` for functions of PyTrees, with placements in and out."""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._audit import ProgramMemory, Report, report_of
from .._compat import lowered_for_a_missing_backend, ran_on_a_description
from .._placement import AnyMesh, Placement
from .._tree import Arrays, Outline, parted
from ..machines import (
    Argument,
    Fit,
    Machine,
    NotHereError,
    about_kernels,
    out_of_memory,
)
from .advice import code_of
from .inputs import Inputs
from .key import Key
from .notes import add_note
from .recipe import Donate, Prepared, Recipe, not_here
from .signature import Function, about

P = ParamSpec("P")
T = TypeVar("T")
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
        mesh = mylib.make_mesh(data=8)
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
    problem = f"filter_jit() got an unexpected keyword argument {name!r}"
    return f"{problem}: {_INSTEAD[name]}" if name in _INSTEAD else problem


@jtu.register_pytree_node_class
class Jitted(Generic[P, T]):
    """A function compiled by `filter_jit` or `filter_shard_map`. It is a PyTree, as it may hold
    arrays (a Module's).
    """

    def __init__(self, arrays: Arrays, recipe: Recipe):
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
            recipe = recipe.shared(Key(treedef, are_arrays, static))
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
            raise not_here(self.recipe) from error
        except Exception as error:
            prepare = functools.partial(self.recipe.prepare, args, kwargs)
            add_note(error, (args, kwargs), lambda own: prepare().prepared.named(own))
            raise

    def lower(self, /, *args: Any, **kwargs: Any) -> "Lowered":
        """Lowers the function for these arguments, some or all of which may be
        `jax.ShapeDtypeStruct`s.
        """
        call = self.recipe.prepare(args, kwargs, abstract=True)
        try:
            lowered, arguments = call.lower(self.arrays)
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
        except Exception as error:
            add_note(error, (args, kwargs), call.prepared.named)
            raise
        return Lowered(_Origin(self, call.prepared, arguments), lowered)

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

    def tree_flatten(self) -> tuple[tuple[Arrays], Recipe]:
        return (self.arrays,), self.recipe

    @classmethod
    def tree_unflatten(cls, recipe: Recipe, children: Any) -> "Jitted[..., Any]":
        (arrays,) = children
        return cls(arrays, recipe)


class _Origin(NamedTuple):
    """A function and the arguments that it was lowered for."""

    jitted: Jitted[..., Any]
    prepared: Prepared
    arguments: Sequence[Argument]


class Lowered:
    """A function lowered for some arguments; `lowered` is JAX's own object."""

    def __init__(self, origin: _Origin, lowered: jax.stages.Lowered):
        self._origin = origin
        self.lowered = lowered

    def as_text(self) -> str:
        return self.lowered.as_text() or ""

    def compile(self, compiler_options: dict[str, Any] | None = None) -> "Compiled":
        """Compiles it. Raises [`mylib.machines.OutOfMemoryError`][] if the compiler finds that it
        does not fit into the devices' memory, which only the TPU's compiler checks. If the
        GPU's compiler can't make a Triton kernel, a note on its error says how to avoid it.
        """
        try:
            compiled = self.lowered.compile(compiler_options)
        except jax.errors.JaxRuntimeError as error:
            readable = out_of_memory(error, self._origin.arguments, self.lowered)
            if readable is not None:
                raise readable from error
            note = about_kernels(error)
            if note is not None:
                error.add_note(note)
            raise
        return Compiled(self._origin, compiled)


class Compiled:
    """A function compiled ahead of time; `compiled` is JAX's own object."""

    def __init__(self, origin: _Origin, compiled: jax.stages.Compiled):
        self._origin = origin
        self._called = False
        self.compiled = compiled

    @functools.cached_property
    def memory(self) -> ProgramMemory:
        """The bytes that it needs on each device."""
        return ProgramMemory.of(self.compiled, self.as_text(), self._origin.arguments)

    def fits(self, machine: Machine) -> Fit:
        """Whether it fits into the memory of each device of a machine; see `Memory.fits`."""
        return self.memory.fits(machine)

    def as_text(self) -> str:
        return self.compiled.as_text() or ""

    def cost_analysis(self) -> Any:
        """The compiler's own analysis, as JAX returns it: it counts the body of a loop once and no
        collectives, and the compiler for GPUs that are not here has none. `audit().work` counts
        loops as often as they run.
        """
        return self.compiled.cost_analysis()

    def memory_analysis(self) -> Any:
        """The compiler's own analysis, as JAX returns it; see `memory`."""
        return self.compiled.memory_analysis()

    def audit(self, *, mesh: AnyMesh | None = None, local: Iterable[str] = ()) -> Report:
        """What the program communicates and holds, as reported by [`mylib.audit`][]."""
        prepared = self._origin.prepared
        mesh = prepared.recipe.mesh if mesh is None else mesh
        return report_of(self.compiled, prepared.named, mesh=mesh, local=local)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        jitted, prepared, _ = self._origin
        call = jitted.recipe.read(args, kwargs)
        if call.key != prepared.key:
            if any(isinstance(x, jax.ShapeDtypeStruct) for x in jtu.tree_leaves((args, kwargs))):
                raise TypeError(
                    f"{prepared.recipe.name} is called with a jax.ShapeDtypeStruct, which "
                    "has no numbers: it is for compiling only"
                )
            raise TypeError(
                f"{prepared.recipe.name} was compiled for other static arguments, or for "
                "another tree structure: compile it for these, too"
            )
        call.prepared = prepared
        first, self._called = not self._called, True
        try:
            return call(jitted.arrays, self.compiled, first)
        except (AttributeError, RuntimeError) as error:
            if not ran_on_a_description(error):
                raise
            raise not_here(prepared.recipe) from error
        except Exception as error:
            add_note(error, (args, kwargs), prepared.named)
            raise
