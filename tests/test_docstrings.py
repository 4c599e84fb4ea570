"""The examples in the docstrings of the public names run as they stand."""

import inspect
import re
import subprocess
import sys
import textwrap

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxtyping import Float

import mylib
import mylib.testing

_PUBLIC = [
    value
    for module in (mylib, mylib.rules, mylib.loops, mylib.machines, mylib.testing)
    for name, value in vars(module).items()
    if name in getattr(module, "__all__", [name])
    and not name.startswith("_")
    and (inspect.isfunction(value) or inspect.isclass(value))
    # Its example wants a process in which nobody has called it yet.
    and value is not mylib.testing.second_backend
]


def _examples(value) -> list[str]:
    text = inspect.getdoc(value) or ""
    return [textwrap.dedent(b) for b in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)]


@pytest.mark.parametrize("value", _PUBLIC, ids=lambda v: v.__name__)
def test_public_name(value):
    assert inspect.getdoc(value), "every public name says what it is for"
    names = dict(
        **dict(jax=jax, jnp=jnp, np=np, eqx=eqx, optax=optax, mylib=mylib),
        **dict(P=P, NamedSharding=NamedSharding, Array=Array, Float=Float),
    )
    for example in _examples(value):
        exec(compile(example, value.__name__, "exec"), names)


def test_every_verb_has_an_example():
    verbs = [f for f in _PUBLIC if inspect.isfunction(f)]
    assert len(verbs) > 10 and all(map(_examples, verbs))


def test_second_backend(checkout_env):
    (example,) = _examples(mylib.testing.second_backend)
    program = f"import jax, mylib.testing\n{example}\nassert len(jax.devices('other')) == 4"
    subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=checkout_env, check=True, timeout=240
    )
