"""`filter_jit`: `jax.jit` for functions of PyTrees, with placements in and out; and
`load_compiled`, for programs that were compiled before.
"""

import copy
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

import equinox as eqx
import jax
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..._core.placement import AnyMesh, Placement
from ..._core.tree import Arrays, outlined
from ..advice import code_of
from ..on_demand import to_lowered
from .dispatcher import Dispatcher
from .donation import Donate, checked
from .inputs import Args, Inputs, Kwargs
from .naming import explain, named, names_of
from .sharing import shared
from .signature import Function, about
from .steps import Variant

if TYPE_CHECKING:
    from ..on_demand import Compiled, Lowered

P = ParamSpec("P")
T = TypeVar("T")


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
        created there: with `filter_jit(Model, out_shardings=rule)(key)` each device
        creates its own share of random numbers and constants.
    - `mesh`: the mesh for a `PartitionSpec`; by default the mesh of `jax.set_mesh`.
    - `donate`: which arguments' memory may be used for the results: a tuple with the names of
        parameters, such as `("model", "state")`, `"all"`, `"all-except-first"` (the first argument
        isn't donated), or `"none"`. `"warn"` and `"warn-except-first"` also warn about arrays that
        could not be reused. An array that occurs
        twice among the arguments is copied, so that it is donated only once, or not at all if it is
        also an argument that isn't donated.
    - `inline`, `keep_unused`, `compiler_options`: as for `jax.jit`.

    **Returns:**

    The compiled function. Its method `lower` takes the same arguments and lowers the function for
    them; `.lower(...).compile()` compiles it ahead of time.

    **Raises:**

    `TypeError` for arguments of `jax.jit` that have no meaning here, saying what to use instead;
    `ValueError` if `donate` is neither one of its words nor names of parameters. Calls raise
    `mylib.PlacementError` before the function runs.

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
        name = next(iter(others))
        problem = f"filter_jit() got an unexpected keyword argument {name!r}"
        raise TypeError(f"{problem}: {_INSTEAD[name]}" if name in _INSTEAD else problem)
    make = functools.partial(
        Jitted.of,
        inputs=None if in_shardings is None else Inputs(in_shardings, mesh),
        out_shardings=out_shardings,
        mesh=mesh,
        donate=donate,
        options=dict(inline=inline, keep_unused=keep_unused, compiler_options=compiler_options),
    )
    return make if fun is None else make(fun)


# Options of `jax.jit` and what to write instead.
_INSTEAD = {
    "static_argnums": "leave it out: everything that is not an array is static",
    "static_argnames": "leave it out: everything that is not an array is static",
    "donate_argnums": "write donate='all', or the names of parameters: donate=('model', 'state')",
    "donate_argnames": "write donate=('model', 'state')",
    "device": "write in_shardings=device, which may be any placement",
    "backend": "write in_shardings=jax.devices(backend)[0], which may be any placement",
}


@jtu.register_pytree_node_class
class Jitted(Generic[P, T]):
    """A function compiled by `filter_jit` or `filter_shard_map`. It is a PyTree, as it may hold
    arrays (a Module's).
    """

    def __init__(self, arrays: Arrays, dispatcher: Dispatcher):
        self.arrays = arrays
        self.dispatcher = dispatcher
        self.__dict__.update(dispatcher.about)

    @classmethod
    def of(
        cls, fun: Callable[..., Any], donate: Donate = "none", **settings: Any
    ) -> "Jitted[..., Any]":
        """`settings` are fields of a `Dispatcher`."""
        arrays, outline = outlined(fun)
        function = Function.of(fun)
        facts = {"fun": outline, "function": function, "code": code_of(fun), "about": about(fun)}
        dispatcher = Dispatcher(donate=checked(donate, function), **facts, **settings)
        return cls(arrays, shared(dispatcher))

    @property
    def __wrapped__(self) -> Callable[P, T]:
        return self._compiled_function()

    def _compiled_function(self) -> Any:
        return self.dispatcher.fun.fill(self.arrays)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        dispatcher = self.dispatcher
        call = dispatcher.prepare(self.arrays, args, kwargs)
        try:
            return dispatcher.call(call)
        except Exception as error:
            explain(error, call)
            raise

    def lower(self, /, *args: object, **kwargs: object) -> "Lowered":
        """Lowers the function for these arguments, some or all of which may be
        `jax.ShapeDtypeStruct`s.
        """
        dispatcher = self.dispatcher
        call = dispatcher.prepare(self.arrays, args, kwargs, abstract=True)
        try:
            lowered, traced = dispatcher.lower(call)
        except Exception as error:
            explain(error, call)
            raise
        names, variant = names_of(call), call.variant
        return to_lowered(
            lowered,
            dispatcher.name,
            dispatcher.mesh,
            zip(names, call.taken, strict=True),
            traced=traced,
            named=functools.partial(named, arrays=names),
            call=functools.partial(self._call_compiled, variant),
            audited=lambda report: setattr(variant, "collectives", report.collectives),
        )

    def _call_compiled(
        self,
        variant: Variant,
        compiled: jax.stages.Compiled,
        first: bool,
        args: Args,
        kwargs: Kwargs,
    ) -> object:
        """Calls what was compiled of a variant."""
        dispatcher = self.dispatcher
        call = dispatcher.read(self.arrays, args, kwargs)
        if call.outline != variant.outline:
            raise TypeError(
                f"{dispatcher.name} was compiled for other static arguments, or for another tree "
                "structure: compile it for these, too. (A jax.ShapeDtypeStruct is for compiling "
                "only.)"
            )
        call.variant = variant
        try:
            return dispatcher.call(call, compiled, first)
        except Exception as error:
            explain(error, call)
            raise

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else eqx.Partial(self, instance)

    def __repr__(self) -> str:
        return f"filter_jit({self.__wrapped__!r})"

    def __copy__(self) -> "Jitted[P, T]":
        return type(self)(list(self.arrays), self.dispatcher)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Jitted[P, T]":
        return type(self)(copy.deepcopy(self.arrays, memo), self.dispatcher)

    def __reduce__(self) -> Any:
        # Without the programs, which can't be pickled. The function is stored whole, because tree
        # structures can't be copied.
        names = "donate", "inputs", "out_shardings", "mesh", "options"
        settings = {name: getattr(self.dispatcher, name) for name in names}
        return functools.partial(type(self).of, **settings), (self._compiled_function(),)

    def tree_flatten(self) -> tuple[tuple[Arrays], Dispatcher]:
        return (self.arrays,), self.dispatcher

    @classmethod
    def tree_unflatten(cls, dispatcher: Dispatcher, children: tuple[Arrays]) -> "Jitted[..., Any]":
        (arrays,) = children
        return cls(arrays, dispatcher)


def load_compiled(
    path: str | os.PathLike[str],
    fun: Callable[..., Any],
    /,
    *args: Any,
    check: bool = True,
    **kwargs: Any,
) -> "Compiled":
    """Loads a program that `save` of a compiled function has written, without compiling it.

    The function is traced and lowered, which takes seconds where compiling takes minutes. That
    shows whether the file is for this function, these arguments and this machine.

    **Arguments:**

    - `path`: the file.
    - `fun`: the function, as `mylib.filter_jit` has made it.
    - `args`, `kwargs`: what it will be called with: arrays, or `jax.ShapeDtypeStruct`s with the
        shardings that the arrays will have.
    - `check`: whether the file must be of the function's present code. With False only the arrays
        that it takes and returns, the versions and the devices are compared.

    **Returns:**

    The compiled function, as from `fun.lower(...).compile()`.

    **Raises:**

    `mylib.errors.SavedProgramError`, before anything is loaded, if the file is damaged or
    something else, or its program is for another machine, other versions, arguments or code. All
    differences are listed.

    !!! Example

        ```python
        import pathlib, tempfile

        @mylib.filter_jit
        def double(x):
            return 2 * x

        x = jax.ShapeDtypeStruct((8,), jnp.float32)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "double.mylib")
            double.lower(x).compile().save(path)
            compiled = mylib.load_compiled(path, double, x)
        print(compiled(jnp.ones(8)))
        ```
    """
    if not isinstance(fun, Jitted):
        raise TypeError(
            f"load_compiled is given {fun!r}, not a function of mylib.filter_jit: pass the one "
            "whose program was saved"
        )
    return fun.lower(*args, **kwargs).load(path, check)
