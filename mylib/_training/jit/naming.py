"""Names of a call's arguments, and explanations of its errors that tell them."""

import re
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any

import jax.tree_util as jtu
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ..._core.compat import (
    is_sharding_type_error,
    lowered_for_a_missing_backend,
    names,
    ran_on_a_description,
    readable_error,
)
from ..._core.errors import NotHereError, all_words, explained, not_here
from ..._core.placement import AnyMesh, current_world, same_axes, show_mesh
from ..._core.text import some
from ..._core.tree import Kind, is_array, kind_of, walk
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
    for path, leaf in jtu.tree_flatten_with_path((call.args, call.kwargs))[0]:
        yield call.wrapped.function.naming(path), leaf


# Explanations of errors


def explain(error: Exception, call: Call) -> None:
    """Replaces a call's error with a clearer one, or puts an explanation before its text."""
    # Most programs have no kernels, and raise nothing.
    from ..._core.kernels import raise_as_in_compiler

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
        explained(error, _about_explicit_axes(call))
    words = (about(text, call) for known, about in _EXPLANATIONS if known in text)
    explained(error, next(filter(None, words), ""))


def _about_explicit_axes(call: Call) -> str:
    """JAX's error says how to give the sharding of a result, not why it doesn't choose one."""
    meshes: list[AnyMesh] = [current_world().mesh, *_meshes(call).values()]
    axes = dict.fromkeys(repr(name) for mesh in meshes for name in mesh.explicit_axes)
    if not axes:  # a function inside another one, which knows more
        return ""
    what = "is an Explicit axis" if len(axes) == 1 else "are Explicit axes"
    return (
        f"{', '.join(axes)} {what}: JAX asks for the sharding of this result, where Auto axes "
        "leave it to the compiler. Either give it, or place an operand with mylib.filter_shard "
        "before; or use a mesh of mylib.make_mesh, whose axes are Auto"
    )


def _meshes(call: Call) -> dict[str, Mesh | AbstractMesh]:
    """The meshes of the arguments, by their names."""
    return {
        name: leaf.sharding.mesh
        for name, leaf in _arguments(call)
        if kind_of(leaf) is Kind.DEVICE and isinstance(leaf.sharding, NamedSharding)
    }


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


def _about_other_meshes(text: str, call: Call) -> str:
    in_force = current_world().devices
    other = {name: mesh for name, mesh in _meshes(call).items() if mesh != in_force}
    if in_force is None or not other:
        return ""
    return (
        f"{some([*other])}: on {show_mesh(next(iter(other.values())))}, and "
        f"{call.wrapped.name} is called under jax.set_mesh of {show_mesh(in_force)}: call it "
        "outside of jax.set_mesh, or place all arguments on its mesh, for example by in_shardings"
    )


def _about_derivatives(text: str, call: Call) -> str:
    """JAX moves what a loop saves, and makes zeros like it, on the mesh around the loop. In 0.10.2
    and 0.12.0; docs/changes-in-other-libraries.md has the text of an issue.
    """
    if not ("Explicit" in text and "Auto" in text):
        return ""
    return (
        "jax.vmap, or another derivative, around the gradient of a loop and fully_shard on "
        "Explicit axes, which JAX can't compute: use a mesh of mylib.make_mesh, whose axes are "
        "Auto; or write the loop out"
    )


def _about_lists(text: str, call: Call) -> str:
    """Errors of functions that got a table of numbers don't say that it is static."""
    nodes, _ = jtu.tree_flatten_with_path((call.args, call.kwargs), is_leaf=_is_table)
    tables = [call.wrapped.function.naming(path) for path, part in nodes if _is_table(part)]
    if not tables:
        return ""
    return (
        f"{some(tables)}: a list of lists of numbers, which are static; pass an array, "
        f"np.asarray({tables[0]})"
    )


def _is_table(part: object) -> bool:
    return (
        type(part) is list
        and bool(part)
        and all(type(row) is list for row in part)
        and all(isinstance(number, int | float) for number in jtu.tree_leaves(part))
    )


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
_EXPLANATIONS: list[tuple[str, Callable[[str, Call], str]]] = [
    ("mesh", _about_two_meshes),
    (names.TEXT_VALUE_OF_OTHER_MESH, _about_derivatives),
    (names.TEXT_OTHER_MESH, _about_derivatives),
    (names.TEXT_CONTEXT_MESH, _about_other_meshes),
    (names.TEXT_SIZE_OF_MESH, _about_other_meshes),
    ("", _about_numbered),
    (names.TEXT_OTHER_TYPE, _about_layers),
    (names.TEXT_DELETED, _about_deleted),
    ("", _about_lists),
]


def about_static(error: Exception, call: Call) -> None:
    """Adds to an error of hashing or comparing static arguments which of them it is about."""
    leaves = {id(leaf) for _, leaf in _arguments(call)}
    for path, part, node in walk((call.args, call.kwargs)):
        if node is not None or (id(part) in leaves and is_array(part, call.is_abstract)):
            continue
        if id(part) in leaves and not _works(hash, part):
            must = "be hashable"
        elif not _works(_is_itself, part):
            must = "be comparable: their == must return True or False, not an array of them"
        else:
            continue
        explained(
            error,
            f"{call.wrapped.name} was given {call.wrapped.function.naming(path)}, a "
            f"{type(part).__name__}. Arguments that are not arrays are static, and must {must}",
        )
        return


def _is_itself(part: object) -> bool:
    # Lists are equal to themselves, whatever they hold.
    return all([bool(leaf == leaf) for leaf in jtu.tree_leaves(part)])


def _works(ask: Callable[[Any], object], part: object) -> bool:
    try:
        ask(part)
    except Exception:
        # A user's `__hash__` or `__eq__` may raise anything.
        return False
    return True
