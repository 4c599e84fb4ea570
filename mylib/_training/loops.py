"""Loops inside `shard_map`: the carry may start equal on all devices and become different, and all
devices can agree when to stop.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._core.placement import cast, manual_axes, varying
from .._core.tree import (
    Arrays,
    Made,
    Outline,
    Rest,
    first_difference,
    is_array,
    is_ref,
    natively,
    outlined,
)
from .per_device import communicates_over

T = TypeVar("T")
Y = TypeVar("Y")


def while_loop(
    cond_fun: Callable[[T], Any],
    body_fun: Callable[[T], T],
    init_val: T,
    *,
    sync: Literal["any", "all"] | None = None,
) -> T:
    """`jax.lax.while_loop` that works inside `shard_map`.

    The carry may be the same on all devices at first and differ later, and may be any PyTree, such
    as a Module. If the condition differs between the devices, each runs its own number of
    iterations, as long as the body doesn't communicate. If it does, some devices would wait
    forever, so that raises an error; `sync` makes the devices agree.

    **Arguments:**

    - `cond_fun`, `body_fun`, `init_val`: as for `jax.lax.while_loop`. Anything else than arrays and
        numbers must not change.
    - `sync`: continue while the condition holds on `"any"` device, or on `"all"` devices. Every
        device then runs every iteration. It costs four bytes of communication per iteration, if
        devices could differ.

    **Returns:**

    The final carry.

    **Raises:**

    `ValueError` if `sync` is none of these; `TypeError` if the structure of the carry changes.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)


        @mylib.filter_shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        def halvings(x):
            def go_on(state):
                return jnp.all(state[0] > 1)

            return mylib.loops.while_loop(
                go_on, lambda s: (s[0] / 2, s[1] + 1), (x, x * 0)
            )[1]


        assert halvings(2.0 ** jnp.arange(8)).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
        ```
    """
    if sync not in (None, "any", "all"):
        raise ValueError(f"while_loop: sync={sync!r} is none of None, 'any', 'all'")
    carry = _carried(init_val)

    def body(carry: _Carry) -> _Carry:
        return carry.after(body_fun(carry.tree()), "body_fun", "init_val")

    def cond(carry: _Carry) -> jax.Array:
        return cond_fun(carry.tree())

    axes = manual_axes()
    if axes:
        # Compiled functions, so that they are traced only once, for analysis and for the loop.
        body, cond = jax.jit(body), jax.jit(cond)
        carry = _promoted(functools.partial(jax.eval_shape, body), carry)
        cond, carry = _agreed(cond, body, carry, sync, axes)
    return jax.lax.while_loop(cond, body, carry).tree()


def _agreed(
    cond: jax.stages.Wrapped,
    body: jax.stages.Wrapped,
    carry: "_Carry",
    sync: str | None,
    axes: tuple[str, ...],
) -> "tuple[Any, _Carry]":
    """The condition, synchronised between devices if needed, and the carry for it."""
    # Types show how values vary, unless `check_vma=False`.
    checked = bool(varying(jax.lax.axis_index(axes[0])))
    differs = varying(jax.eval_shape(cond, carry)) if checked else frozenset(axes)
    # In the same order in every process. Otherwise their programs would differ.
    ordered = tuple(axis for axis in axes if axis in differs)
    if sync is not None and differs:
        reduce = {"any": jax.lax.pmax, "all": jax.lax.pmin}[sync]

        def agreed(carry: _Carry) -> jax.Array:
            wish = jnp.asarray(cond(carry))
            return reduce(wish.astype(jnp.int32), ordered).astype(wish.dtype)

        return agreed, carry
    talks = communicates_over(body.trace(carry).jaxpr) | communicates_over(cond.trace(carry).jaxpr)
    if differs & talks:
        along = ", ".join(repr(axis) for axis in ordered if axis in talks)
        doubt = (
            "its condition differs between the devices"
            if checked
            else "with check_vma=False it is unknown whether its condition is the same everywhere"
        )
        raise ValueError(
            f"while_loop: it communicates along {along}, and {doubt}: some devices would "
            "wait forever\n"
            "  instead: write sync='any' (continue while it holds on any device) or sync='all'"
        )
    # A counter of iterations differs if their number does.
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
    """`jax.lax.scan` that works inside `shard_map`.

    The carry may be the same on all devices at first and differ later. The carry, `xs` and the
    results of `f` may be any PyTrees, such as Modules.

    **Arguments:**

    `f`, `init`, `xs`, `length`, `reverse` and `unroll` are as for `jax.lax.scan`. Anything else
    than arrays and numbers must not change.

    **Returns:**

    The final carry, and the stacked results.

    !!! Example

        ```python
        mesh = mylib.make_mesh(data=8)


        @mylib.filter_shard_map(
            mesh=mesh, in_specs=P(None, "data"), out_specs=P("data")
        )
        def total(xs):
            # `jax.lax.scan` rejects this: the zero is the same on all devices, and
            # the sum is not.
            return mylib.loops.scan(
                lambda s, x: (s + x.sum(), None), jnp.zeros(()), xs
            )[0][None]


        assert total(jnp.ones((3, 8))).tolist() == [3.0] * 8
        ```
    """
    carry = _carried(init)
    rows, of_rows = outlined(xs)

    def step(carry: _Carry, row: Arrays) -> tuple[_Carry, Made]:
        result = f(carry.tree(), of_rows.fill(row))
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"scan: f must return a pair, the carry and a result, but returned {result!r}"
            )
        after, y = result
        stackable = jax.tree.map(lambda x: jnp.asarray(x) if _is_number(x) else x, y)
        return carry.after(after, "f", "init"), Made.of(stackable)

    if manual_axes():
        step = jax.jit(step)
        first = jax.tree.map(_row_of, rows)
        carry = _promoted(lambda carry: jax.eval_shape(step, carry, first)[0], carry)
    carry, ys = jax.lax.scan(step, carry, rows, length, reverse, unroll)
    return carry.tree(), ys.tree()


def _promoted(iteration: "Callable[[_Carry], _Carry]", carry: "_Carry") -> "_Carry":
    """The carry, cast to vary over all axes that it will vary over. `iteration` returns the types
    after one.
    """
    while True:
        after = iteration(carry)
        grown = jax.tree.map(lambda x, y: cast(x, varying(y)), carry, after)
        before = map(varying, jax.tree.leaves(carry))
        if list(before) == list(map(varying, jax.tree.leaves(grown))):
            return grown
        carry = grown


def _row_of(rows: jax.Array) -> jax.ShapeDtypeStruct:
    """The type of a row, of which there may be none."""
    if rows.shape[0] == 0:
        # The dtype that JAX uses: NumPy's may have 64 bits.
        kind = jax.typeof(rows)
        varies = kind.manual_axis_type
        return jax.ShapeDtypeStruct(rows.shape[1:], kind.dtype, manual_axis_type=varies)
    return jax.eval_shape(lambda rows: rows[0], rows)


def _is_number(x: object) -> bool:
    return isinstance(x, bool | int | float | complex)


def _is_carried(x: object) -> bool:
    # Every iteration uses the same Ref.
    return _is_number(x) or (is_array(x) and not is_ref(x))


@dataclass(frozen=True, eq=False)
class _Fixed(Rest):
    """The carry without its arrays; the same in all iterations."""

    paths: list[str]


@jtu.register_pytree_with_keys_class
class _Carry:
    """The carry of a loop. Hides the nodes of the user's trees from JAX: they may inspect their
    children, and JAX unflattens trees with objects that are not arrays.
    """

    def __init__(self, arrays: Arrays, rest: _Fixed):
        self.arrays = arrays
        self.rest = rest

    def tree(self) -> Any:
        return self.rest.outline.fill(self.arrays)

    def after(self, tree: object, function: str, before: str) -> "_Carry":
        """The carry after an iteration. Raises if anything but arrays has changed."""
        leaves, treedef = jtu.tree_flatten(tree)
        outline = self.rest.outline
        if treedef != outline.treedef:
            name, was, now = first_difference(self.tree(), tree)
            raise TypeError(
                f"{function} must return the carry with the same structure as in {before}. "
                f"{name or 'It'} was {was}, then {now}"
            )
        carried = list(map(_is_carried, leaves))
        changed: list[str] = []
        for path, *pair, was, now in zip(
            self.rest.paths,
            jtu.tree_leaves(self.tree()),
            leaves,
            outline.are_arrays,
            carried,
            strict=True,
        ):
            if was != now or not (was or pair[0] is pair[1] or eqx.tree_equal(*pair)):
                flags = zip(pair, (was, now), strict=True)
                old, new = ("an array" if is_carried else repr(x) for x, is_carried in flags)
                changed.append(f"{path}: {old}, then {new}")
        if changed:
            raise TypeError(
                f"{function} must not change leaves of {before} that are not arrays. "
                f"{', '.join(changed)}"
            )
        return _Carry(list(compress(leaves, carried)), self.rest)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[str, jax.Array]], _Fixed]:
        # A leaf's whole path as one key, for JAX's errors.
        paths = compress(self.rest.paths, self.rest.outline.are_arrays)
        return list(zip(paths, self.arrays, strict=True)), self.rest

    @classmethod
    def tree_unflatten(cls, rest: _Fixed, arrays: Iterable[jax.Array]) -> "_Carry":
        return cls(list(arrays), rest)


def _carried(tree: object) -> _Carry:
    with_paths, treedef = jtu.tree_flatten_with_path(tree)
    leaves = [x for _, x in with_paths]
    carried = tuple(map(_is_carried, leaves))
    outline = Outline(treedef, carried, tuple(compress(leaves, map(not_, carried))))
    arrays = [jnp.asarray(natively(x)) for x in compress(leaves, carried)]
    return _Carry(arrays, _Fixed(outline, [jtu.keystr(path) for path, _ in with_paths]))
