"""What differs between the devices inside `shard_map`: what JAX's types say of it, and where they
are wrong.
"""

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import source_info_util

from ._leaves import Kind, kind_of
from ._world import opened, parts_of

T = TypeVar("T")
Axes = frozenset[Any]

# What JAX can't look into. It takes a callback's result for the same on all devices.
_CALLS = ("pure_callback", "io_callback", "ffi_call", "pallas_call")
# What names mesh axes without sending anything along them.
_SILENT = ("axis_index", "pvary")


def vary(tree: T, axis_names: Any, /) -> T:
    """Says of a tree's arrays that they differ between the devices, inside `shard_map`.

    No value changes and nothing is sent. What changes are gradients: of what is the same on
    all devices JAX adds them up over the devices, of what differs it doesn't.

    **Arguments:**

    - `tree`: any PyTree. What is not an array, a Python number for instance, comes back as the same
        object.
    - `axis_names`: a mesh axis, or several in a tuple.

    **Returns:**

    The tree, its arrays varying over these axes, too. With `check_vma=False`, where there are no
    such types, the tree as it was.

    !!! Example

        ```python
        mesh = jax.make_mesh((8,), ("data",))

        @mylib.filter_shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        def gradient(w, x):
            own = jax.grad(lambda w: jnp.sum(w * x))(mylib.vary(w, "data"))
            return jax.lax.pmean(own, "data")

        assert gradient(1.0 * jnp.ones(()), jnp.arange(8.0)) == 3.5
        ```
    """
    axes = axis_names if isinstance(axis_names, tuple | list | set | frozenset) else (axis_names,)

    def cast(x: Any) -> Any:
        if kind_of(x) is Kind.STATIC:
            return x
        missing = tuple(axis for axis in axes if axis not in varying(x))
        return jax.lax.pcast(jnp.asarray(x), missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def varying(x: Any) -> Axes:
    """The mesh axes along which an array differs, or what `jax.eval_shape` says of it."""
    return _of_type(x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x))


def _of_type(aval: Any) -> Axes:
    kind = getattr(aval, "manual_axis_type", None)  # None: outside of `shard_map`, or unchecked
    return frozenset() if kind is None else kind.varying


def union(axes: Iterable[Axes]) -> Axes:
    return frozenset[Any]().union(*axes)


def communicates_over(program: Any) -> Axes:
    """The axes along which a program, given as a jaxpr, sends anything."""
    return union(
        _axes_named_by(eqn)
        for part in parts_of(program)
        for eqn in opened(part).eqns
        if eqn.primitive.name not in _SILENT
    )


def _axes_named_by(eqn: Any) -> Axes:
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    several = named if isinstance(named, tuple | list) else (named,)
    # Numbers are dimensions, of a sum over one for instance.
    return frozenset(axis for axis in several if not isinstance(axis, int))


def wrong_in(program: Any) -> list[str]:
    """What would run into a deadlock, and what JAX's types take for the same on all devices
    although it isn't, in a program of `shard_map` given as a jaxpr.
    """
    seen = {id(opened(part)) for part in parts_of(program, without=_is_opaque)}
    found = []
    for part in map(opened, parts_of(program)):
        casts = _Casts(part)
        for eqn in part.eqns:
            axes = _differs_over(eqn)
            stuck = axes & union(map(communicates_over, _branches(eqn))) if axes else axes
            if stuck:
                found.append(_would_wait(eqn, stuck))
            elif id(part) in seen and not all(
                casts.heal(x, axes - _of_type(x.aval)) for x in eqn.outvars
            ):
                found.append(_is_mistaken(eqn, axes))
    return list(dict.fromkeys(found))


# The name of the functions whose types `mylib.opaque` sees to.
OPAQUE = "mylib_opaque"


def _is_opaque(eqn: Any) -> bool:
    return eqn.params.get("name") == OPAQUE


def _would_wait(eqn: Any, axes: Axes) -> str:
    name = eqn.primitive.name
    return (
        f"{_BRANCHING[name]} at {_where(eqn)} differs between the devices along {_show(axes)}, "
        f"and what it decides on communicates along it: some devices would wait for ever\n"
        f"    instead: {_AGREE[name]}"
    )


def _is_mistaken(eqn: Any, axes: Axes) -> str:
    name = eqn.primitive.name
    what = _BRANCHING.get(name, f"what the {name} is given")
    return (
        f"{what} at {_where(eqn)} differs between the devices along {_show(axes)}, and JAX takes "
        "what comes of it for the same on all of them\n"
        f"    instead: {_MENDS.get(name, _MEND_OF_CALLS)}"
    )


def _where(eqn: Any) -> str:
    return source_info_util.summarize(eqn.source_info)


_BRANCHING = {"while": "the condition of the while_loop", "cond": "the predicate of the cond"}
_AGREE = {
    "while": "mylib.loops.while_loop(..., sync='any'), or 'all'",
    "cond": "communicate outside of it, or make the predicate the same everywhere: jax.lax.pmax",
}
_MENDS = {
    "while": "mylib.loops.while_loop, or start with mylib.vary(init_val, axis), of arrays",
    "cond": "in the branches return mylib.vary(result, axis), of arrays",
}
_MEND_OF_CALLS = "wrap the function that makes this call with mylib.opaque"


def _differs_over(eqn: Any) -> Axes:
    """The axes along which the results of an equation may differ, whatever their types say."""
    name = eqn.primitive.name
    if name in _CALLS:
        return union(_of_type(x.aval) for x in eqn.invars)
    if name == "cond":
        return _of_type(eqn.invars[0].aval)
    if name == "while":
        return _of_type(eqn.params["cond_jaxpr"].out_avals[0])
    return frozenset()


def _branches(eqn: Any) -> list[Any]:
    if eqn.primitive.name == "while":
        return [eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]]
    return list(eqn.params.get("branches", ()))


class _Casts:
    """Of which values of a jaxpr every use says that they vary."""

    def __init__(self, jaxpr: Any):
        self._jaxpr = jaxpr

    @cached_property
    def _uses(self) -> dict[int, list[Any]]:
        uses: dict[int, list[Any]] = defaultdict(list)
        for eqn in self._jaxpr.eqns:
            for x in eqn.invars:
                uses[id(x)].append(eqn)
        return uses

    def heal(self, x: Any, axes: Axes) -> bool:
        if not axes:
            return True
        returned = any(x is y for y in self._jaxpr.outvars)
        return not returned and all(axes <= _casts_to(eqn) for eqn in self._uses[id(x)])


def _casts_to(eqn: Any) -> Axes:
    return frozenset(eqn.params["axes"]) if eqn.primitive.name == "pvary" else frozenset()


def _show(axes: Axes) -> str:
    return ", ".join(map(repr, sorted(axes, key=str)))
