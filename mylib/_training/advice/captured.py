"""Warns of large arrays that a function captures; and what a function may capture, by name."""

import functools
import inspect
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import ClosedJaxpr

from ..._core.errors import CapturedArrayWarning, warn
from ..._core.jaxprs import all_jaxprs
from ..._core.text import show_bytes

# Captured arrays of this many bytes or more are reported.
_LARGE = 2**20


def about_captured(name: str, codes: Iterable[FunctionType | None], program: ClosedJaxpr) -> None:
    """Warns of large arrays in a traced program, which functions with these `codes` captured."""
    constants = (each for jaxpr in all_jaxprs(program) for each in getattr(jaxpr, "consts", ()))
    large = [constant for constant in constants if getattr(constant, "nbytes", 0) >= _LARGE]
    if not large:
        return
    captured = [pair for code in codes for pair in captured_by(code)]
    shown = ", ".join(_show_constant(constant, captured) for constant in large)
    warn(
        f"{name} captures large arrays: {shown}. They become part of the compiled program, "
        "replicated on every device, and no report of its memory shows them. Pass them as "
        "arguments.",
        CapturedArrayWarning,
    )


def _show_constant(constant: jax.Array, captured: Iterable[tuple[str, object]]) -> str:
    size = f"{constant.dtype}{list(constant.shape)}, {show_bytes(constant.nbytes)}"
    name = next((name for name, leaf in captured if _is_same(constant, leaf)), None)
    return size if name is None else f"{name} ({size})"


def _is_same(constant: Any, leaf: object) -> bool:
    # JAX wraps captured NumPy arrays.
    return constant is leaf or (
        isinstance(leaf, np.ndarray) and np.may_share_memory(constant, leaf)
    )


def code_of(fun: Any) -> FunctionType | None:
    """The Python function behind a callable, or None."""
    fun = inspect.unwrap(fun)
    while isinstance(fun, functools.partial | eqx.Partial):
        fun = fun.func
    if not isinstance(fun, FunctionType | MethodType | type):
        fun = inspect.unwrap(inspect.getattr_static(type(fun), "__call__"))
    fun = getattr(fun, "__func__", fun)
    return fun if isinstance(fun, FunctionType) else None


def captured_by(code: FunctionType | None) -> Iterator[tuple[str, object]]:
    """The leaves that a function may capture, by name."""
    for name, value in _variables(code):
        try:
            leaves = jtu.tree_flatten_with_path(value)[0]
        except (TypeError, ValueError):
            continue  # not a tree: can't have been captured
        for path, leaf in leaves:
            yield name + jtu.keystr(path), leaf


def _variables(code: FunctionType | None) -> Iterator[tuple[str, object]]:
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
