"""Loops inside `shard_map`: what they carry may begin the same on all devices and come to differ,
and all devices agree on when to stop.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ._holes import communicates_over
from ._leaves import Kind, kind_of
from ._varying import cast, manual_axes, varying

__all__ = ["scan", "while_loop"]

T = TypeVar("T")
Y = TypeVar("Y")


def while_loop(
    cond_fun: Callable[[T], Any],
    body_fun: Callable[[T], T],
    init_val: T,
    *,
    sync: Literal["any", "all"] | None = None,
) -> T:
    """`jax.lax.while_loop`, right inside `shard_map`.

    What is carried may be the same on all devices at first and differ later, and may be any PyTree,
    such as a Module. A condition that differs between the devices lets each take its own number of
    turns, if no turn communicates; if one does, some devices would wait for ever, so that is
    refused, and `sync` makes them agree.

    **Arguments:**

    - `cond_fun`, `body_fun`, `init_val`: as for `jax.lax.while_loop`. What is not an array or
        a number stays as it is.
    - `sync`: go on as long as `"any"` device wants to, or only while `"all"` do. Every device then
        takes every turn. It costs four bytes of communication a turn, where devices could differ.

    **Returns:**

    What is carried in the end.

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))

        @mylib.filter_shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        def halvings(x):
            def go_on(state):
                return jnp.all(state[0] > 1)

            return mylib.loops.while_loop(go_on, lambda s: (s[0] / 2, s[1] + 1), (x, x * 0))[1]

        assert halvings(2.0 ** jnp.arange(8)).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
        ```
    """
    if sync not in (None, "any", "all"):
        raise ValueError(f"while_loop: sync={sync!r} is none of None, 'any', 'all'")
    carry, static = _split(init_val)

    def body(carry: Any) -> Any:
        return _same_static(body_fun(eqx.combine(carry, static)), static, "body_fun", "init_val")

    def cond(carry: Any) -> Any:
        return cond_fun(eqx.combine(carry, static))

    axes = manual_axes()
    if axes:
        # Compiled functions, so that looking at them and looping over them is one trace.
        body, cond = jax.jit(body), jax.jit(cond)
        carry = _promoted(functools.partial(jax.eval_shape, body), carry)
        cond, carry = _agreed(cond, body, carry, sync, axes)
    return eqx.combine(jax.lax.while_loop(cond, body, carry), static)


def _agreed(
    cond: Any, body: Any, carry: Any, sync: str | None, axes: tuple[Any, ...]
) -> tuple[Any, Any]:
    """The condition, the same on all devices if need be, and the carry for it."""
    checked = _is_checked(axes)
    differs = varying(jax.eval_shape(cond, carry)) if checked else frozenset(axes)
    # In the same order in every process: else their programs differ.
    ordered = tuple(axis for axis in axes if axis in differs)
    if sync is not None and differs:
        reduce = {"any": jax.lax.pmax, "all": jax.lax.pmin}[sync]

        def agreed(carry: Any) -> Any:
            wish = jnp.asarray(cond(carry))
            return reduce(wish.astype(jnp.int32), ordered).astype(wish.dtype)

        return agreed, carry
    talks = communicates_over(body.trace(carry).jaxpr) | communicates_over(cond.trace(carry).jaxpr)
    if differs & talks:
        along = ", ".join(repr(axis) for axis in ordered if axis in talks)
        doubt = (
            "its condition differs between the devices"
            if checked
            else "with check_vma=False nobody knows whether its condition is the same everywhere"
        )
        raise ValueError(
            f"while_loop: its turns communicate along {along}, and {doubt}: some devices would "
            "wait for ever\n"
            "  instead: write sync='any' (go on while any device wants to) or sync='all'"
        )
    # What counts the turns differs where their number does.
    if checked:
        carry = _promoted(functools.partial(jax.eval_shape, body), cast(carry, differs))
    return cond, carry


def scan(
    f: Callable[[T, Any], tuple[T, Y]],
    init: T,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[T, Y]:
    """`jax.lax.scan`, right inside `shard_map`.

    What is carried may be the same on all devices at first and differ later. It, `xs` and what `f`
    returns may be any PyTrees, such as Modules.

    **Arguments:**

    As for `jax.lax.scan`. What is not an array (or, in `init`, a number) stays as it is.

    **Returns:**

    What is carried in the end, and the stacked results.

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))

        @mylib.filter_shard_map(mesh=mesh, in_specs=P(None, "data"), out_specs=P("data"))
        def total(xs):
            # `jax.lax.scan` refuses this: the zero is the same on all devices, the sum is not.
            return mylib.loops.scan(lambda s, x: (s + x.sum(), None), jnp.zeros(()), xs)[0][None]

        assert total(jnp.ones((3, 8))).tolist() == [3.0] * 8
        ```
    """
    carry, static = _split(init)
    rows, row_static = eqx.partition(xs, eqx.is_array)
    static_result: list[Any] = []

    def step(carry: Any, row: Any) -> tuple[Any, Any]:
        result = f(eqx.combine(carry, static), eqx.combine(row, row_static))
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"scan: f must return a pair, what is carried and a result, and returned {result!r}"
            )
        carry, y = result
        y, static_y = eqx.partition(y, eqx.is_array)
        static_result[:] = [static_y]
        return _same_static(carry, static, "f", "init"), y

    if manual_axes():
        step = jax.jit(step)
        first = jax.tree.map(_row_of, rows)
        carry = _promoted(lambda carry: jax.eval_shape(step, carry, first)[0], carry)
    carry, ys = jax.lax.scan(step, carry, rows, length, reverse, unroll)
    return eqx.combine(carry, static), eqx.combine(ys, static_result[0])


def _is_checked(axes: tuple[Any, ...]) -> bool:
    """Whether values have types that say how they vary: not with `check_vma=False`."""
    return bool(varying(jax.lax.axis_index(axes[0])))


def _promoted(turn: Callable[[Any], Any], carry: Any) -> Any:
    """What is carried, cast to vary over whatever axes it comes to vary over. `turn` gives the
    types after a turn.
    """
    while True:
        after = turn(carry)
        if jax.tree.structure(after) != jax.tree.structure(carry):
            return carry  # the loop itself says so, and where
        grown = jax.tree.map(lambda x, y: cast(x, varying(y)), carry, after)
        before = map(varying, jax.tree.leaves(carry))
        if list(before) == list(map(varying, jax.tree.leaves(grown))):
            return grown
        carry = grown


def _row_of(x: Any) -> jax.ShapeDtypeStruct:
    """The type of a row, of which there may be none."""
    if x.shape[0] == 0:
        varies = jax.typeof(x).manual_axis_type
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, manual_axis_type=varies)
    return jax.eval_shape(lambda x: x[0], x)


def _is_carried(x: Any) -> bool:
    return kind_of(x) is not Kind.STATIC or isinstance(x, bool | int | float | complex)


def _split(tree: Any) -> tuple[Any, Any]:
    """What a loop carries, as arrays, and what stays as it is."""
    carried, static = eqx.partition(tree, _is_carried)
    return jax.tree.map(jnp.asarray, carried), static


def _same_static(tree: Any, static: Any, function: str, before: str) -> Any:
    """What a turn has made of what is carried, if it has left the rest alone."""
    carried, found = eqx.partition(tree, _is_carried)
    (olds, before_def), (news, after_def) = (
        jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda x: x is None)
        for x in (static, found)
    )
    if before_def != after_def:
        return carried  # the loop itself says where they differ
    changed = [
        f"{jax.tree_util.keystr(path)}: {old!r}, then {new!r}"
        for (path, old), (_, new) in zip(olds, news, strict=True)
        if not (old is new or eqx.tree_equal(old, new))
    ]
    if changed:
        raise TypeError(
            f"{function} must leave alone what is no array in {before}. {', '.join(changed)}"
        )
    return carried
