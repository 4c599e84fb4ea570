"""Notes on errors that JAX raises while a function is traced or called. They name the caller's
arguments, and say how to fix the error.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax.tree_util as jtu
from jax.sharding import AxisType, NamedSharding

from .._compat import is_sharding_type_error, names
from .._placement import AnyMesh, axis_types, current_world
from .._tree import Kind, kind_of

# The names of arrays in the program, which takes two lists of them.
NUMBERED = re.compile(r"(kept|donated)\[(\d+)\]")
_IN_ERRORS = re.compile(rf"[Aa]rgument ({NUMBERED.pattern})")
_CLASSES = re.compile(r"<class '(.+?)'>")


def add_note(error: Exception, given: Any, named: Callable[[str], str]) -> None:
    """Adds a note to an error, if it can be explained. `given` are the arguments; `named`
    turns a name in the program, such as `kept[0]`, into the caller's.
    """
    # Notes that a function called by this one has added, about its own arguments.
    noted = "".join(getattr(error, "__notes__", ()))
    if is_sharding_type_error(error):
        note = _about_explicit_axes(given)
    elif names.TEXT_OTHER_TYPE in str(error):
        note = _about_layers(str(error))
    else:
        own = [name for name in dict.fromkeys(_in_error(error)) if f"{name} is" not in noted]
        note = ", ".join(f"{name} is {named(name)}" for name in own)
        if own and "devices" in str(error):
            note += ". Place all arguments on the same devices, for example by in_shardings"
    if note and note not in noted:
        error.add_note(f"({note})")


def _in_error(error: Exception) -> Iterator[str]:
    return (match[1] for match in _IN_ERRORS.finditer(str(error)))


def _about_layers(text: str) -> str:
    """The classes that `fully_shard` makes have the names of the originals."""
    classes = _CLASSES.findall(text)
    if len(classes) == len(set(classes)):
        return ""
    return (
        f"two classes are called {classes[0]}: one of them is of fully_shard, whose model was "
        "combined with one from before it. Call fully_shard inside the loss, and update the model "
        "that the loss is given"
    )


def _about_explicit_axes(given: Any) -> str:
    """JAX's error says how to give the sharding of a result, not why it doesn't choose one."""
    meshes: list[AnyMesh] = [current_world().mesh]
    for x in jtu.tree_leaves(given):
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
