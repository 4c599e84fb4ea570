"""What a function can be called in, and on which meshes."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import pytest
from jax.sharding import AxisType

import mylib

AUTO = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
MIXED = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Auto))
AXES = {"auto": AUTO, "explicit": EXPLICIT, "mixed": MIXED}
MESHES = pytest.mark.parametrize("mesh", AXES.values(), ids=AXES)


def crossed(**choices: Sequence[Any] | Mapping[str, Any]) -> pytest.MarkDecorator:
    """A test of all choices together. The last list is what the others are divided by every day: of
    three lists any two choices meet, if it isn't the longest; of two each choice takes its turn.
    The rest is `thorough`.
    """
    named = [x if isinstance(x, Mapping) else {str(y): y for y in x} for x in choices.values()]
    cases = []
    for cell in itertools.product(*(enumerate(x) for x in named)):
        places, names = zip(*cell, strict=True)
        marks = [pytest.mark.thorough] if sum(places) % len(named[-1]) else []
        values = (x[name] for x, name in zip(named, names, strict=True))
        cases.append(pytest.param(*values, id="-".join(names), marks=marks))
    return pytest.mark.parametrize(", ".join(choices), cases)


def under_grad(f, x):
    return jax.value_and_grad(lambda x: f(x).sum())(x)[1]


# Each a call of `f` on `x` that gives what `f`, or its derivative, gives.
CONTEXTS = {
    "eager": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "filter_jit": lambda f, x: mylib.filter_jit(f)(x),
    "vmap": lambda f, x: jax.vmap(f)(x[None])[0],
    "jit(vmap)": lambda f, x: jax.jit(jax.vmap(f))(x[None])[0],
    "scan": lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, length=1)[0],
    "cond": lambda f, x: jax.lax.cond(x.sum() > 0, f, lambda x: x, x),
    "while": lambda f, x: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (1, f(c[1])), (0, x))[1],
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "grad": under_grad,
    "jit(grad)": lambda f, x: jax.jit(functools.partial(under_grad, f))(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,))[1],
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
}
