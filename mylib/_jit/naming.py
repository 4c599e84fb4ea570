"""Names of a call's arguments, and notes on its errors that tell them."""

import re
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any

import jax.tree_util as jtu
from jax.sharding import Mesh, NamedSharding

from .._compat import (
    is_sharding_type_error,
    lowered_for_a_missing_backend,
    names,
    ran_on_a_description,
    readable_error,
)
from .._errors import NotHereError, all_words, not_here
from .._placement import AnyMesh, current_world, same_axes, show_mesh
from .._text import some
from .._tree import Kind, is_array, kind_of, walk
from .steps import Call

# The names of arrays in the program.
_NUMBERED = re.compile(r"arrays\[(\d+)\]")
_IN_ERRORS = re.compile(rf"[Aa]rgument '?({_NUMBERED.pattern})")
_CLASSES = re.compile(r"<class '(.+?)'>")


def names_of(call: Call) -> list[str]:
    """The names of the arrays of a program: those of the arguments, then the function's own."""
    name, fun = call.wrapped.name, call.wrapped.fun
    paths, _ = jtu.tree_flatten_with_path(fun.fill(call.arrays[call.outline.count :]))
    if len(paths) == len(fun.are_arrays):
        of_function = [name + jtu.keystr(path) for path, _ in compress(paths, fun.are_arrays)]
    else:  # a node that changes when it is unflattened
        of_function = [f"{name}<leaf {i}>" for i in range(fun.count)]
    return [*compress(leaves_of(call), call.outline.are_arrays), *of_function]


def leaves_of(call: Call) -> list[str]:
    """The names of the leaves of the arguments."""
    return [name for name, _ in _arguments(call)]


def named(name: str, arrays: list[str]) -> str:
    """The caller's name of an array with this name in the program, among the names of all."""
    match = _NUMBERED.fullmatch(name)
    return arrays[int(match[1])] if match and int(match[1]) < len(arrays) else name


def _arguments(call: Call) -> Iterator[tuple[str, Any]]:
    """The leaves of the arguments, with their names."""
    for path, x in jtu.tree_flatten_with_path((call.args, call.kwargs))[0]:
        yield call.wrapped.function.naming(path), x


# Notes on errors


def explain(error: Exception, call: Call) -> None:
    """Replaces a call's error with a clearer one, or adds a note."""
    # Most programs have no kernels, and raise nothing.
    from .._kernels import raise_as_in_compiler

    raise_as_in_compiler(error)
    text = all_words(error)
    readable = readable_error(text, call.wrapped.id)
    if readable is not None:
        raise readable from None
    if ran_on_a_description(text):
        name = call.wrapped.name
        if not call.is_abstract:
            raise not_here(name) from error
        raise NotHereError(
            f"while {name} was traced, JAX ran a computation on the mesh of jax.set_mesh, whose "
            "machine you don't have: it can compile, not run. Leave out jax.set_mesh, and pass "
            "mesh= where it is needed"
        ) from error
    if lowered_for_a_missing_backend(text):
        raise NotHereError(
            f"{call.wrapped.name} calls back into Python (jax.debug.print, pure_callback, "
            "io_callback), which JAX can't lower for GPUs that you don't have. Leave the callback "
            "out. equinox.error_if can stay: filter_jit makes it a result"
        ) from error
    if is_sharding_type_error(error):
        _add(error, _about_explicit_axes(call))
    notes = (about(text, call) for known, about in _NOTES.items() if known in text)
    _add(error, next(filter(None, notes), ""))


def _add(error: Exception, note: str) -> None:
    # A function called by this one may have added it.
    if note and note not in "".join(getattr(error, "__notes__", ())):
        error.add_note(f"({note})")


def _about_explicit_axes(call: Call) -> str:
    """JAX's error says how to give the sharding of a result, not why it doesn't choose one."""
    meshes: list[AnyMesh] = [current_world().mesh]
    for _, x in _arguments(call):
        if kind_of(x) is Kind.DEVICE and isinstance(x.sharding, NamedSharding):
            meshes.append(x.sharding.mesh)
    axes = dict.fromkeys(repr(name) for mesh in meshes for name in mesh.explicit_axes)
    if not axes:  # a function inside another one, which knows more
        return ""
    what = "is an Explicit axis" if len(axes) == 1 else "are Explicit axes"
    return (
        f"{', '.join(axes)} {what}: JAX asks for the sharding of this result, where Auto axes "
        "leave it to the compiler. Either give it, or place an operand with mylib.filter_shard "
        "before; or use a mesh of mylib.make_mesh, whose axes are Auto"
    )


def _about_two_meshes(text: str, call: Call) -> str:
    mesh, around = call.wrapped.mesh, current_world()
    in_force = around.mesh if around.devices is None else around.devices
    if mesh is None or in_force.empty or _alike(mesh, in_force):
        return ""
    return (
        f"{call.wrapped.name} has mesh={show_mesh(mesh)}, and is called under jax.set_mesh of "
        f"{show_mesh(in_force)}, which differs: leave out mesh=, or call it outside of jax.set_mesh"
    )


def _alike(one: AnyMesh, other: AnyMesh) -> bool:
    if isinstance(one, Mesh) and isinstance(other, Mesh):
        return one == other
    return same_axes(one, other) and one.axis_types == other.axis_types


def _about_layers(text: str, call: Call) -> str:
    """The classes that `fully_shard` makes have the names of the originals."""
    classes = _CLASSES.findall(text)
    if len(classes) == len(set(classes)):
        return ""
    return (
        f"two classes are called {classes[0]}: one of them is of fully_shard, whose model was "
        "combined with one from before it. Call fully_shard inside the loss, and update the model "
        "that the loss is given"
    )


def _about_deleted(text: str, call: Call) -> str:
    """Checking before each call whether arrays are deleted would take longer than many a call."""
    gone = [name for name, x in _arguments(call) if kind_of(x) is Kind.DEVICE and x.is_deleted()]
    if not gone:
        return ""
    return (
        f"{call.wrapped.name} was given deleted arrays: {some(gone)}. A call that donates an "
        "argument deletes its arrays: use what that call returned, or don't donate"
    )


def _about_numbered(text: str, call: Call) -> str:
    """JAX names arrays by their places in the program."""
    # Functions called by this one have named their own arguments.
    numbered = dict.fromkeys(match[1] for match in _IN_ERRORS.finditer(text))
    unnamed = [name for name in numbered if f"{name} is" not in text]
    if not unnamed:
        return ""
    arrays = names_of(call)
    note = ", ".join(f"{name} is {named(name, arrays)}" for name in unnamed)
    if "devices" in text:
        note += ". Place all arguments on the same devices, for example by in_shardings"
    return note


# What to say about errors with these texts: the first that knows something.
_NOTES: dict[str, Callable[[str, Call], str]] = {
    "mesh": _about_two_meshes,
    "": _about_numbered,
    names.TEXT_OTHER_TYPE: _about_layers,
    names.TEXT_DELETED: _about_deleted,
}


def about_static(error: Exception, call: Call) -> None:
    """Adds to an error of hashing or comparing static arguments which of them it is about."""
    leaves = {id(x) for _, x in _arguments(call)}
    for path, x, node in walk((call.args, call.kwargs)):
        if node is not None or (id(x) in leaves and is_array(x, call.is_abstract)):
            continue
        if id(x) in leaves and not _works(hash, x):
            must = "be hashable"
        elif not _works(_is_itself, x):
            must = "be comparable: their == must return True or False, not an array of them"
        else:
            continue
        _add(
            error,
            f"{call.wrapped.name} was given {call.wrapped.function.naming(path)}, a "
            f"{type(x).__name__}. Arguments that are not arrays are static, and must {must}",
        )
        return


def _is_itself(x: Any) -> bool:
    # Lists are equal to themselves, whatever they hold.
    return all([bool(part == part) for part in jtu.tree_leaves(x)])


def _works(ask: Callable[[Any], Any], x: Any) -> bool:
    try:
        ask(x)
    except Exception:
        # A user's `__hash__` or `__eq__` may raise anything.
        return False
    return True
