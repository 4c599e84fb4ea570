"""`opaque`: gives types to calls that JAX can't analyse inside `shard_map`."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp

from ..._core.contexts import kernel_axes
from ..._core.errors import in_words
from ..._core.jaxprs import line_of, opaque_calls
from ..._core.kernels import HowSplit, Kernel, KnownCall
from ..._core.placement import AxisSet, cast, manual_axes, union, varying
from ..._core.tree import Arrays, Outline, outlined, signature_of
from .hazards import OPAQUE

P = ParamSpec("P")
T = TypeVar("T")
# A letter of `dims=`; with `like=` an argument and the number of its dimension.
Dimension = str | tuple[str, int]
Whole = str | Sequence[Dimension]


@overload
def opaque(
    *,
    like: Callable[..., object] | None = None,
    dims: str | None = None,
    whole: Whole = (),
    axes: Mapping[Dimension, str | Sequence[str]] | None = None,
    check: bool = True,
    fwd: Callable[..., object] | None = None,
    bwd: Callable[..., object] | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


@overload
def opaque(
    fun: Callable[P, T],
    /,
    *,
    like: Callable[..., object] | None = None,
    dims: str | None = None,
    whole: Whole = (),
    axes: Mapping[Dimension, str | Sequence[str]] | None = None,
    check: bool = True,
    fwd: Callable[..., object] | None = None,
    bwd: Callable[..., object] | None = None,
) -> Callable[P, T]: ...


def opaque(
    fun: Callable[..., object] | None = None,
    /,
    *,
    like: Callable[..., object] | None = None,
    dims: str | None = None,
    whole: Whole = (),
    axes: Mapping[Dimension, str | Sequence[str]] | None = None,
    check: bool = True,
    fwd: Callable[..., object] | None = None,
    bwd: Callable[..., object] | None = None,
) -> Callable[..., Any]:
    """States how a call that JAX can't look into may be split over devices, such as that of a
    kernel.

    Use it for functions that call `pallas_call`, `jax.pure_callback`, `jax.ffi.ffi_call`, an
    exported program and the like. With `like` or `dims` the call is split in `jax.jit`, eagerly, on
    Auto and Explicit axes, under `vmap`, and in the layers of `mylib.fully_shard`: `fun` is
    called with the parts of one device. It is given whole arrays only of dimensions that are whole.

    Inside `shard_map`, with or without these, its results vary over the mesh as its arguments do.
    JAX can't see whether they differ between the devices. With `opaque`, `check_vma=True` works,
    and the gradient communicates no more than the mathematics needs.

    **Arguments:**

    - `fun`: a function of PyTrees. Without it a decorator is returned.
    - `like`: a function of plain JAX with the same arguments and results. A dimension may be split
        if its operations show that parts are treated each by itself. Without `fwd` and `bwd`, its
        derivative is the call's; only the arguments are saved for the backward pass.
    - `dims`: the same, as letters for the dimensions of each array in the arguments and results, in
        the order of `jax.tree.leaves`: `"b t d, d -> b t d"`. Dimensions with the same letter are
        split alike, into a number of parts that divides all of them; of size 1, they are whole.
        Letters that no result has, or that an array has twice, are whole. With both, `dims` says
        what may be split, and `like` gives the derivative. Without `like`, `fwd` and `bwd` it is
        `fun`'s own, if JAX can differentiate it: each device computes `fun` again for its parts,
        with letters whole that a differentiated argument lacks.
    - `whole`: further letters that are whole, as in `"t d"`, such as those along which `fun`
        numbers its rows. With `like` alone, arguments and numbers of dimensions: `[("q", 1)]`.
    - `axes`: which mesh axes split which letters, such as `{"b": "data", "h": "model"}`, or with
        `like` alone which dimensions, `{("q", 0): "data"}`; others are whole. By default operands
        are split as they come. For TPUs, and inside a `shard_map` over some axes, it is needed on
        Auto axes outside the layers of `fully_shard`: compilers can't tell there.
    - `check`: whether the first call that may be split compares `like` of small random arrays and
        of their parts, on one device. `like` is not run if it calls kernels, has a `while_loop`,
        takes keys, or fits large arrays only.
    - `fwd`, `bwd`: its derivative, as in `jax.custom_vjp`: `fwd(*args)` returns the result and
        residuals; `bwd(residuals, cotangent)` returns a tuple with a cotangent, or None, for each
        argument. Kernels that they call must be opaque functions themselves.

    **Returns:**

    A function like `fun`. Without `like` and `dims`, outside `shard_map` it is `fun` with that
    derivative.

    Without `like` and `dims`, a kernel's `out_shape` must have the type of its input in
    `shard_map`. Inside `fun` all arguments have the same type:
    `jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)`.

    **Raises:**

    `TypeError` if only one of `fwd` and `bwd` is given, or if `fun` holds arrays and has a
    derivative, `like` or `dims`. Calls raise it if they return something else than described above,
    if `dims` doesn't fit the arrays, if `like` can't be read or computes something else of parts,
    and if `fwd` or `bwd` of a function with either calls a kernel that isn't opaque.

    `mylib.PlacementError`, naming the operands, if an axis splits a dimension that is whole or
    that it doesn't divide, and if `axes` is needed, as it also is for callbacks on Auto axes. In
    `jax.jit` on Auto axes of CPUs and GPUs it is a `jax.errors.JaxRuntimeError` with the same text.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)

        def on_host(f, x):
            return jax.pure_callback(f, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


        def forward(x):
            return sine(x), x


        def backward(x, cotangent):
            return (cotangent * on_host(np.cos, x),)


        @mylib.opaque(fwd=forward, bwd=backward)
        def sine(x):
            return on_host(np.sin, x)


        f = mylib.filter_shard_map(
            sine, mesh=mesh, in_specs=P("data"), out_specs=P("data")
        )
        x = jnp.arange(8.0)
        assert jnp.allclose(f(x), jnp.sin(x), atol=1e-6)
        assert jnp.allclose(jax.grad(lambda x: f(x).sum())(x), jnp.cos(x), atol=1e-6)
        ```
    """
    if fun is None:
        return functools.partial(
            opaque, like=like, dims=dims, whole=whole, axes=axes, check=check, fwd=fwd, bwd=bwd
        )
    if (fwd is None) != (bwd is None):
        raise TypeError("opaque: fwd and bwd are the two halves of a derivative: give both")
    signature, name = signature_of(fun), getattr(fun, "__name__", "the function")
    how = _how_split(like, dims, whole, axes)
    if (bwd is not None or how is not None) and outlined(fun)[0]:
        raise TypeError(
            f"opaque: {name} holds arrays, and bwd, like and dims speak of arguments only. Write a "
            "function that takes the Module as an argument"
        )

    @functools.wraps(fun)
    def wrapped(*args: object, **kwargs: object) -> object:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for preset in _presets(fun) - kwargs.keys():
            bound.arguments.pop(preset, None)
        if bwd is not None and bound.kwargs:
            raise TypeError(
                f"opaque: {name} has a derivative, so its arguments must be positional. "
                f"These are keyword-only: {', '.join(bound.kwargs)}"
            )
        arrays, outline = outlined((fun, bound.args, bound.kwargs))
        varying_over = union(map(varying, arrays))
        by_argument = [outlined(arg)[1] for arg in bound.args] if bwd is not None else []
        kernel = None
        if how is not None:
            rest = outlined((bound.args, bound.kwargs))[1]
            is_read = dims is None
            kernel = Kernel(fun, like, rest, _positional(bound), is_read, is_read and check)
        call = _OpaqueCall(fwd, bwd, outline, by_argument, varying_over, how, kernel)
        # The cast is differentiated, too: if an argument is the same on all devices, its cotangents
        # are summed here, and nowhere else.
        return call(cast(arrays, varying_over))

    return wrapped


def _positional(bound: inspect.BoundArguments) -> tuple[str, ...]:
    """The names of positional arguments: of `*xs` these are `xs[0]`, ..."""
    shown: list[str] = []
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is kind.VAR_POSITIONAL:
            shown += (f"{name}[{i}]" for i in range(len(value)))
        elif kind not in (kind.KEYWORD_ONLY, kind.VAR_KEYWORD):
            shown.append(name)
    return tuple(shown)


def _presets(fun: Callable[..., object]) -> set[str]:
    """What a partial function has fixed, which isn't an argument: `like` may have fixed another."""
    fixed = fun.keywords if isinstance(fun, functools.partial) else {}
    return {key for key, value in fixed.items() if not outlined(value)[0]}


@dataclass(eq=False)
class _OpaqueCall:
    """One call of an opaque function, as functions of arrays that all vary over `axes`."""

    fwd: Callable[..., object] | None
    bwd: Callable[..., object] | None
    outline: Outline
    by_argument: list[Outline]
    axes: AxisSet
    how: HowSplit | None
    kernel: Kernel | None
    # The outlines of the result and the residuals, once they have been traced.
    result: Any = None
    residuals: Any = None
    # The layer of `fully_shard` that makes the call. Its derivative is traced outside of that.
    layer: Any = field(default_factory=lambda: kernel_axes.value)

    def __call__(self, arrays: Arrays) -> object:
        run = _sealed(self._primal)
        if self.fwd is not None:
            run = jax.custom_vjp(run)
            run.defvjp(*(_sealed(self._in_layer(x)) for x in (self._forward, self._backward)))
        elif self.kernel is not None and self.how is not None:
            known = self.how.known(self.kernel, list(map(jnp.asarray, arrays)))
            if known.is_plain:
                run = self._with_derivative(run, self.kernel)
            elif known.has_own:
                run = self._with_own_derivative(run, known)
        result = run(arrays)
        return self.result.fill(result)

    def _in_layer(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Arrays) -> object:
            with kernel_axes(self.layer):
                return rule(*args)

        return run

    def _filled(self, arrays: Arrays) -> Any:
        # JAX differentiates Python numbers as objects that are not quite arrays.
        return self.outline.fill(map(jnp.asarray, arrays))

    def _primal(self, arrays: Arrays) -> Arrays:
        if self.how is None or self.kernel is None:
            fun, args, kwargs = self._filled(arrays)
            result, self.result = outlined(fun(*args, **kwargs))
        else:
            arrays = list(map(jnp.asarray, arrays))
            call = self.how.known(self.kernel, arrays)
            result, self.result = call(arrays), call.result
        return cast(result, self.axes)

    def _with_derivative(self, primal: Callable[[Arrays], Arrays], kernel: Kernel) -> Any:
        """The call with the reference's derivative, for whose backward pass arguments are saved."""
        run = jax.custom_jvp(primal)

        def reference(arrays: Arrays) -> Arrays:
            return cast(kernel.reference(arrays)[0], self.axes)

        def derivative(primals: tuple[Arrays], tangents: tuple[Arrays]) -> tuple[Arrays, Arrays]:
            results = run(*primals)
            return results, _tangents(jax.checkpoint(reference), results, *primals, *tangents)

        run.defjvp(self._in_layer(derivative))
        return run

    def _with_own_derivative(self, run: Callable[..., object], known: KnownCall) -> Any:
        """The call with the derivative of its function, which each device takes for its parts."""

        def forward(arrays: Arrays) -> tuple[Arrays, Arrays]:
            return self._primal(arrays), arrays

        def backward(arrays: Arrays, cotangents: Arrays) -> tuple[Arrays]:
            moving = [x for x in cotangents if x.dtype != jax.dtypes.float0]
            found = iter(cast(known.backward(arrays)([*arrays, *moving]), self.axes))
            are_moving = (jnp.issubdtype(x.dtype, jnp.inexact) for x in arrays)
            return ([next(found) if is_moving else None for is_moving in are_moving],)

        run = jax.custom_vjp(run)
        run.defvjp(*(_sealed(self._in_layer(x)) for x in (forward, backward)))
        return run

    def _forward(self, arrays: Arrays) -> tuple[Arrays, Arrays]:
        assert self.fwd is not None
        _, args, _ = self._filled(arrays)
        self._refuse_kernels("fwd", self.fwd, args)
        returned = self.fwd(*args)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                "opaque: fwd must return a pair, the result and the residuals for bwd, but "
                f"returned {returned!r}"
            )
        result, residuals = returned
        if not self.result:
            jax.eval_shape(self._primal, arrays)
        result, outline = outlined(result)
        if outline.treedef != self.result.treedef:
            raise TypeError(
                "opaque: fwd must return the function's result, "
                f"{self.result.treedef}, and residuals; it returned {outline.treedef}"
            )
        residuals, self.residuals = outlined(residuals)
        return cast(result, self.axes), cast(residuals, self.axes)

    def _backward(self, residuals: Arrays, cotangents: Arrays) -> tuple[Arrays]:
        assert self.bwd is not None
        args = self.residuals.fill(residuals), self.result.fill(cotangents)
        self._refuse_kernels("bwd", self.bwd, args)
        returned = self.bwd(*args)
        return (cast(self._by_array(returned), self.axes),)

    def _refuse_kernels(
        self, which: str, rule: Callable[..., object], args: Sequence[object]
    ) -> None:
        """Refuses a rule that calls a kernel as it is: how it may be split isn't known."""
        if self.how is None or self.kernel is None or manual_axes():
            return
        program = jax.make_jaxpr(lambda: outlined(rule(*args))[0])()
        for eqn in opaque_calls(program):
            line = line_of(eqn)
            raise TypeError(
                f"opaque: {which}= of {self.kernel.name} calls {eqn.primitive.name}"
                + f" ({line})" * bool(line)
                + ", and compilers can't tell how that may be split. Make the function that calls "
                'it opaque, too: mylib.opaque(f, dims="...") or mylib.opaque(f, like=...)'
            )

    def _by_array(self, cotangents: object) -> Arrays:
        """A cotangent, or None, for each array among the arguments."""
        args = self.by_argument
        if not isinstance(cotangents, tuple) or len(cotangents) != len(args):
            raise TypeError(
                f"opaque: bwd must return a tuple with a cotangent for each of the {len(args)} "
                f"arguments, or None, but returned {cotangents!r}"
            )
        by_array: Arrays = []
        for i, (arg, cotangent) in enumerate(zip(args, cotangents, strict=True)):
            if cotangent is None:
                by_array += [None] * arg.count
                continue
            try:
                leaves = arg.treedef.flatten_up_to(cotangent)
            except (ValueError, TypeError) as error:
                raise TypeError(
                    f"opaque: bwd returned no cotangent of argument {i}: {in_words(error)}"
                ) from None
            by_array += compress(leaves, arg.are_arrays)
        # Integers have neither tangents nor cotangents.
        return [None if getattr(g, "dtype", None) == jax.dtypes.float0 else g for g in by_array]


def _tangents(
    reference: Callable[[Arrays], Arrays], results: Arrays, primals: Arrays, tangents: Arrays
) -> Arrays:
    """The reference's derivative, with Auto axes in place of the results' Explicit ones: of plain
    JAX these would ask where each value is, and how the call is split is known.
    """
    are_moved = [x.dtype != jax.dtypes.float0 for x in tangents]
    moving = list(compress(tangents, are_moved))

    def tangents_of(primals: Arrays, moving: Arrays) -> Arrays:
        rest = iter(moving)
        pairs = zip(are_moved, tangents, strict=True)
        given = [next(rest) if is_moved else x for is_moved, x in pairs]
        return jax.jvp(reference, (primals,), (given,))[1]

    shardings = [jax.typeof(x).sharding for x in results]
    mesh = next((x.mesh for x in shardings if x.mesh.explicit_axes), None)
    if mesh is None:
        return tangents_of(primals, moving)
    with jax.sharding.use_abstract_mesh(mesh):
        # Compiled, since JAX can't differentiate eager operations on another type of axes.
        on_auto = jax.sharding.auto_axes(tangents_of, out_sharding=[x.spec for x in shardings])
        return jax.jit(on_auto)(primals, moving)


def _how_split(
    like: Callable[..., object] | None,
    dims: str | None,
    whole: Whole,
    axes: Mapping[Dimension, str | Sequence[str]] | None,
) -> HowSplit | None:
    if like is None and dims is None:
        if axes is not None or whole:
            raise TypeError("opaque: axes= and whole= name dimensions: give dims= or like=, too")
        return None
    words = None
    if axes is not None:
        words = tuple((x, (on,) if isinstance(on, str) else tuple(on)) for x, on in axes.items())
    return HowSplit(dims, tuple(whole.split() if isinstance(whole, str) else whole), words)


def _sealed(function: Callable[..., object]) -> Any:
    """Marks a function whose types `filter_shard_map` can trust: its results are cast."""
    if not manual_axes():
        return function  # there are no such types

    def sealed(*args: Arrays) -> object:
        return function(*args)

    sealed.__name__ = OPAQUE
    return jax.jit(sealed)
