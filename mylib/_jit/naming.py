"""Notes on errors, and warnings after a compilation, which name the arguments of the call at hand.
Nothing here changes a result.
"""

import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import compress
from types import FunctionType, MethodType
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AxisType, NamedSharding

from .._compat import (
    is_sharding_type_error,
    lowered_for_a_missing_backend,
    names,
    ran_on_a_description,
    readable_error,
)
from .._errors import (
    CapturedArrayWarning,
    DonationWarning,
    NotHereError,
    RecompilationWarning,
    StaticNumberWarning,
    folded,
    warn,
)
from .._placement import AnyMesh, axis_types, current_world
from .._programs import all_jaxprs
from .._text import listed, show_bytes
from .._tree import Arrays, Kind, is_array, is_of_keys, kind_of, outlined
from .donation import Donated, spares_the_first, warns
from .traces import Trace, outermost
from .variants import Call, Location, Place

# Captured arrays of this many bytes or more are reported.
_LARGE = 2**20
# The names of arrays in the program, which takes two lists of them.
_NUMBERED = re.compile(r"(kept|donated)\[(\d+)\]")
_IN_ERRORS = re.compile(rf"[Aa]rgument ({_NUMBERED.pattern})")
_CLASSES = re.compile(r"<class '(.+?)'>")


def names_of(call: Call) -> list[str]:
    """The names of the arrays of a program: those of the arguments, then the function's own."""
    name, fun = call.program.name, call.program.fun
    paths, _ = jtu.tree_flatten_with_path(fun.fill(call.own))
    if len(paths) == len(fun.are_arrays):
        own = [name + jtu.keystr(path) for path, _ in compress(paths, fun.are_arrays)]
    else:  # a node that changes when it is unflattened
        own = [f"{name}<leaf {i}>" for i in range(fun.count)]
    arguments = [argument for argument, _ in _arguments(call)]
    return [*compress(arguments, call.split.are_arrays), *own]


def named(own: str, arrays: list[str], donated: Donated | None) -> str:
    """The caller's name of an array with this name in the program, among the names of all."""
    if not (match := _NUMBERED.fullmatch(own)):
        return own
    kept, gone = (arrays, []) if donated is None else donated.parted(arrays)
    among, position = {"kept": kept, "donated": gone}[match[1]], int(match[2])
    return among[position] if position < len(among) else own


def _arguments(call: Call) -> Iterator[tuple[str, Any]]:
    """The leaves of the arguments, with their names."""
    for path, x in jtu.tree_flatten_with_path((call.args, call.kwargs))[0]:
        yield call.program.function.naming(path), x


def some(texts: list[str], separator: str = ", ") -> str:
    return listed(texts, 8, separator)


# Notes on errors


def explain(error: Exception, call: Call) -> None:
    """Raises what says more than an error of a call, or adds a note to the error."""
    readable = readable_error(error, call.program.id)
    if readable is not None:
        raise readable from None
    if ran_on_a_description(error):
        name = call.program.name
        if not call.is_abstract:
            raise not_here(name) from error
        raise NotHereError(
            f"while {name} was traced, JAX ran a computation on the mesh of jax.set_mesh, whose "
            "machine is not here: it can compile, not run. Leave out jax.set_mesh, and pass mesh= "
            "where it is needed"
        ) from error
    if lowered_for_a_missing_backend(error):
        raise NotHereError(
            f"{call.program.name} calls back into Python (jax.debug.print, pure_callback, "
            "io_callback), which JAX can't lower for GPUs that are not here. Leave the callback "
            "out. equinox.error_if can stay: filter_jit makes it a result"
        ) from error
    if is_sharding_type_error(error):
        _add(error, _about_explicit_axes(call))
    notes = (about(error, call) for text, about in _NOTES.items() if text in str(error))
    _add(error, next(filter(None, notes), ""))


def not_here(name: str) -> NotHereError:
    return NotHereError(
        f"{name} can't be called: its devices are those of a machine that is not here, which can "
        "compile, not run. Call .lower(...).compile()"
    )


def _add(error: Exception, note: str) -> None:
    # A function called by this one may have added it.
    if note and note not in _noted(error):
        error.add_note(f"({note})")


def _noted(error: Exception) -> str:
    return "".join(getattr(error, "__notes__", ()))


def _about_explicit_axes(call: Call) -> str:
    """JAX's error says how to give the sharding of a result, not why it doesn't choose one."""
    meshes: list[AnyMesh] = [current_world().mesh]
    for _, x in _arguments(call):
        if kind_of(x) is Kind.DEVICE and isinstance(x.sharding, NamedSharding):
            meshes.append(x.sharding.mesh)
    kinds = {name: kind for mesh in meshes for name, kind in axis_types(mesh).items()}
    axes = [repr(name) for name, kind in kinds.items() if kind is AxisType.Explicit]
    if not axes:  # a function inside another one, which knows more
        return ""
    what = "is an Explicit axis" if len(axes) == 1 else "are Explicit axes"
    return (
        f"{', '.join(axes)} {what}: JAX asks for the sharding of this result, where Auto axes "
        "leave it to the compiler. Either give it, or place an operand with mylib.filter_shard "
        "before; or use a mesh of mylib.make_mesh, whose axes are Auto"
    )


def _about_layers(error: Exception, call: Call) -> str:
    """The classes that `fully_shard` makes have the names of the originals."""
    classes = _CLASSES.findall(str(error))
    if len(classes) == len(set(classes)):
        return ""
    return (
        f"two classes are called {classes[0]}: one of them is of fully_shard, whose model was "
        "combined with one from before it. Call fully_shard inside the loss, and update the model "
        "that the loss is given"
    )


def _about_deleted(error: Exception, call: Call) -> str:
    """Checking before each call whether arrays are deleted would take longer than many a call."""
    gone = [name for name, x in _arguments(call) if kind_of(x) is Kind.DEVICE and x.is_deleted()]
    if not gone:
        return ""
    return (
        f"{call.program.name} was given deleted arrays: {some(gone)}. A call that donates an "
        "argument deletes its arrays: use what that call returned, or don't donate"
    )


def _about_sharing(error: Exception, call: Call) -> str:
    owners: dict[int, str] = {}
    for name, x in _arguments(call):
        if kind_of(x) is not Kind.DEVICE or is_of_keys(x) or x.is_deleted():
            continue
        for shard in x.addressable_shards:
            other = owners.setdefault(shard.data.unsafe_buffer_pointer(), name)
            if other != name:
                return (
                    f"{call.program.name} was given {other} and {name}, which share memory and are "
                    "donated: pass a copy of one"
                )
    return ""


def _about_numbered(error: Exception, call: Call) -> str:
    """JAX names arrays by their places in the program."""
    # Functions called by this one have named their own arguments.
    numbered = dict.fromkeys(match[1] for match in _IN_ERRORS.finditer(str(error)))
    unnamed = [name for name in numbered if f"{name} is" not in _noted(error)]
    if not unnamed:
        return ""
    arrays, donated = names_of(call), call.variant.donated
    note = ", ".join(f"{name} is {named(name, arrays, donated)}" for name in unnamed)
    if "devices" in str(error):
        note += ". Place all arguments on the same devices, for example by in_shardings"
    return note


# What to say about errors with these texts: the first that knows something.
_NOTES: dict[str, Callable[[Exception, Call], str]] = {
    "": _about_numbered,
    names.TEXT_OTHER_TYPE: _about_layers,
    names.TEXT_DELETED: _about_deleted,
    names.TEXT_DONATE: _about_sharing,
}


def unhashable(call: Call) -> str:
    """The note on the error of a static argument without a hash."""
    for name, x in _arguments(call):
        if is_array(x):
            continue
        try:
            hash(x)
        except TypeError:
            return (
                f"({call.program.name} was given {name}, a {type(x).__name__}. Arguments that are "
                "not arrays are static, and must be hashable)"
            )
    return f"(among the arguments of {call.program.name})"


# Warnings


def about_numbers(call: Call, positions: set[int]) -> None:
    """Warns about Python numbers, at these positions among the leaves, that compile anew."""
    arguments = [name for name, _ in _arguments(call)]
    texts = ", ".join(arguments[i] for i in sorted(positions))
    warn(
        f"{call.program.name} is compiled at each call: its argument {texts} is a Python number, "
        f"which is static, and has a new value each time. Pass jnp.asarray({texts}).",
        StaticNumberWarning,
    )


def about_captured(call: Call, trace: Trace, closed: Any) -> None:
    """Warns, once for a trace, about large arrays that it has captured."""
    trace.is_new = False
    code, around = call.program.code, outermost()
    if around is not None:  # its program is looked at instead
        around.nested.append(code)
        return
    constants = (x for jaxpr in all_jaxprs(closed) for x in getattr(jaxpr, "consts", ()))
    large = [x for x in constants if getattr(x, "nbytes", 0) >= _LARGE]
    if not large:
        return
    captured = [pair for inner in (code, *trace.nested) for pair in captured_by(inner)]
    shown = ", ".join(_show_constant(x, captured) for x in large)
    warn(
        f"{call.program.name} captures large arrays: {shown}. They become part of the compiled "
        "program, whole on every device, and no report of its memory shows them. Pass them as "
        "arguments.",
        CapturedArrayWarning,
    )


def about_compiled(call: Call, arrays: Arrays, donated: Arrays, returned: Arrays) -> None:
    """Warns after a call outside all transformations that compiled the program."""
    variant = call.variant
    before, results = variant.locations, {id(ref()) for ref in variant.returned}
    variant.locations = [(x.shape, x.dtype, _place_of(x)) for x in arrays]
    variant.returned = [weakref.ref(x) for x in returned if isinstance(x, jax.Array)]
    if variant.donated is not None and warns(call.program.donate):
        _about_not_taken(call, donated, variant.donated)
    _about_moved(call, arrays, before, results)


def _about_not_taken(call: Call, donated: Arrays, which: Donated) -> None:
    left = [isinstance(x, jax.Array) and not x.is_deleted() for x in donated]
    if any(left):
        pairs = zip(which.parted(names_of(call))[1], donated, strict=True)
        texts = [f"{name} {tuple(x.shape)}" for name, x in compress(pairs, left)]
        warn(
            f"Some donated buffers were not usable: {call.program.name} was given {some(texts)}. "
            "It does not use them, or returns nothing of the same shape, dtype and sharding that "
            "could take their memory.",
            DonationWarning,
        )


def about_spared(call: Call, result: Any) -> None:
    """Warns after a compilation that a model is the one argument that is not donated: the first
    one, of which the function returns a new version, as it does of an optimiser's state.
    """
    args, returned = call.args, result if isinstance(result, tuple) else ()
    if not (spares_the_first(call.program.donate) and len(args) > 1 and len(returned) > 1):
        return
    first, *others = map(_form_of, args)
    forms = list(map(_form_of, returned))
    if jtu.treedef_is_leaf(first[0]) or first not in forms:
        return
    forms.remove(first)
    parameter = call.program.function.parameter
    states = [parameter(i) for i, x in enumerate(others, 1) if x[1] and x in forms]
    if states:
        model, donate = parameter(0), call.program.donate
        size = sum(x.nbytes for x in outlined(args[0])[0])
        warn(
            f"{call.program.name} returns a new {model}, and donate={donate!r} keeps the old one "
            f"beside it: {show_bytes(size)} in all. Write donate={(model, *states)!r}, or "
            f"donate={tuple(states)!r} if the old one is still needed.",
            DonationWarning,
        )


def _form_of(tree: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """The structure of a tree, and the shapes and dtypes of its arrays."""
    arrays, split = outlined(tree)
    return split.treedef, [(x.shape, x.dtype) for x in arrays]


def _about_moved(call: Call, arrays: Arrays, before: Sequence[Location], results: set[int]) -> None:
    after = call.variant.locations
    if [x[:2] for x in before] != [x[:2] for x in after]:  # other shapes or dtypes
        return
    moved: dict[str, list[int]] = {}
    for i, (x, (*_, then), (*_, now)) in enumerate(zip(arrays, before, after, strict=True)):
        if id(x) in results and then != now:
            moved.setdefault(_show_move(then, now), []).append(i)
    if moved:
        arguments = names_of(call)
        texts = (
            f"{some([*folded([arguments[i] for i in those])])}: {how}"
            for how, those in moved.items()
        )
        warn(
            f"{call.program.name} was compiled twice for the same shapes. Give it in_shardings and "
            "out_shardings, or place these arguments before the first call, as its results came "
            f"back with other shardings: {some([*texts], '; ')}.",
            RecompilationWarning,
        )


def _place_of(x: Any) -> Place:
    return (x.sharding, x.committed) if isinstance(x, jax.Array) else None


def _show_move(then: Place, now: Place) -> str:
    first, second = _show_place(then), _show_place(now)
    return f"{first}, then {second}" + (" on another mesh" if first == second else "")


def _show_place(place: Place) -> str:
    if place is None:
        return "a NumPy array"
    from .._show import show_place  # which most programs don't need

    sharding, is_committed = place
    return show_place(sharding) + ("" if is_committed else " (not committed)")


def _show_constant(x: Any, captured: Iterable[tuple[str, Any]]) -> str:
    size = f"{x.dtype}{list(x.shape)}, {show_bytes(x.nbytes)}"
    name = next((name for name, y in captured if _is_same(x, y)), None)
    return size if name is None else f"{name} ({size})"


def _is_same(constant: Any, x: Any) -> bool:
    # JAX wraps captured NumPy arrays.
    return constant is x or (isinstance(x, np.ndarray) and np.may_share_memory(constant, x))


def code_of(fun: Any) -> FunctionType | None:
    """The Python function behind a callable, or None."""
    fun = inspect.unwrap(fun)
    while isinstance(fun, functools.partial | eqx.Partial):
        fun = fun.func
    if not isinstance(fun, FunctionType | MethodType | type):
        fun = inspect.unwrap(inspect.getattr_static(type(fun), "__call__"))
    fun = getattr(fun, "__func__", fun)
    return fun if isinstance(fun, FunctionType) else None


def captured_by(code: FunctionType | None) -> Iterator[tuple[str, Any]]:
    """The leaves that a function may capture, by name."""
    for name, value in _variables(code):
        try:
            leaves = jtu.tree_flatten_with_path(value)[0]
        except (TypeError, ValueError):
            continue  # not a tree: can't have been captured
        for path, x in leaves:
            yield name + jtu.keystr(path), x


def _variables(code: FunctionType | None) -> Iterator[tuple[str, Any]]:
    """The closure variables and globals of a function, by name."""
    if code is None:
        return
    # Not `inspect.getclosurevars`, which raises if one of them has no value yet.
    for name, cell in zip(code.__code__.co_freevars, code.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty cell
            yield name, cell.cell_contents
    for name in code.__code__.co_names:
        if name in code.__globals__:
            yield name, code.__globals__[name]
