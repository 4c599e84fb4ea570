"""The words by which docs/troubleshooting.md is found are those that programs raise."""

import re
import warnings

import _pages
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from scripts import run_python

import mylib
from mylib.rules import by_path, replicated

_PAGE = (_pages.ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
_HEADINGS = re.findall(r"^### (.*)$", _PAGE, re.MULTILINE)
_TEXTS = {text for heading in _HEADINGS for text in re.findall(r"`([^`]+)`", heading)}
AUTO = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((jax.device_count(),), ("data",))
ROWS = NamedSharding(AUTO, P("data"))


def _linear():
    return eqx.nn.Linear(8, 8, key=jax.random.key(0))


def _incompatible():
    few = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    x = jax.device_put(jnp.ones(8), ROWS)
    jax.jit(jnp.add)(x, jax.device_put(jnp.ones(8), NamedSharding(few, P("data"))))


def _no_mesh():
    jax.jit(lambda x: jax.lax.with_sharding_constraint(x, P("data")))(jnp.ones(8))


def _explicit(x_spec, w_spec):
    x, w = (jax.device_put(np.ones((8, 8)), NamedSharding(EXPLICIT, s)) for s in (x_spec, w_spec))
    jax.jit(jnp.matmul)(x, w)


def _mapped(fun, **specs):
    specs = {"in_specs": P("data"), "out_specs": P("data")} | specs
    return jax.shard_map(fun, mesh=AUTO, **specs)(np.ones(8, np.float32))


def _in_vmap():
    def constrained(x):
        return jax.lax.with_sharding_constraint(x, ROWS)

    jax.vmap(constrained, spmd_axis_name="data")(jnp.ones((8, 8)))


def _leaked():
    kept = []
    jax.jit(kept.append)(1.0)
    jnp.sin(kept[0])


def _deleted():
    x = jnp.ones(8)
    jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    jnp.sin(x)


def _compiled_twice():
    step = mylib.filter_jit(lambda total, x: total + x.sum())
    total = jnp.zeros(())
    for _ in range(2):
        total = step(total, jax.device_put(jnp.ones(8), ROWS))


def _planned():
    def step(x, model):
        return jnp.sum(mylib.filter_shard(jax.vmap(model)(x), P("data"), mesh=AUTO))

    mylib.plan(step, np.ones((16, 8), np.float32), _linear(), compile=0)


def _differs():
    mean = mylib.filter_shard_map(
        lambda x: jax.lax.psum(jnp.mean(x), "data"), mesh=AUTO, in_specs=P("data"), out_specs=P()
    )
    mylib.testing.verify(mean, jnp.arange(16.0), reference=jnp.mean)


_RAISES = {
    "does not divide into the 8 parts": lambda: mylib.filter_shard(np.ones(33), P("data"), AUTO),
    "should evenly divide the shape": lambda: jax.device_put(np.ones(33), ROWS),
    "evenly divisible": lambda: jax.shard_map(
        jnp.sin, mesh=AUTO, in_specs=P("data"), out_specs=P("data")
    )(np.ones(33)),
    "Received incompatible devices for jitted computation": _incompatible,
    "a PartitionSpec needs a mesh": lambda: mylib.filter_shard(np.ones(8), P("data")),
    "requires a non-empty mesh in context": _no_mesh,
    "has no axis": lambda: mylib.filter_shard(np.ones(8), P("dat"), AUTO),
    "is not found in mesh": lambda: NamedSharding(AUTO, P("dat")),
    "the rule returns PASS for this leaf": lambda: mylib.filter_shard(
        _linear(), by_path({"weight": P("data")}), AUTO
    ),
    "matches none of the": lambda: mylib.filter_shard(
        _linear(), by_path({"wieght": P()}) | replicated(), AUTO
    ),
    "can only refer to Auto axes of the mesh": lambda: eqx.filter_shard(
        jnp.ones(8), NamedSharding(EXPLICIT, P("data"))
    ),
    "Contracting dimensions are sharded": lambda: _explicit(P(None, "data"), P("data")),
    "illegally sharded result": lambda: _explicit(P("data"), P(None, "data")),
    "can't be used inside a program over 8 devices": lambda: jax.jit(
        lambda x: mylib.filter_shard(x, jax.devices()[0])
    )(jax.device_put(np.ones(8), ROWS)),
    "Error interpreting argument to": lambda: jax.jit(lambda m, x: m(x))(
        eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0)), jnp.ones(8)
    ),
    "Found an unbound axis name": lambda: jax.jit(lambda x: jax.lax.psum(x, "data"))(jnp.ones(8)),
    "vmap spmd_axis_name": _in_vmap,
    "which require replication": lambda: _mapped(lambda x: x, out_specs=P()),
    "carry input and carry output must have equal types": lambda: _mapped(
        lambda x: jax.lax.fori_loop(0, 3, lambda _, total: total + x.sum(), 0.0)
    ),
    "Encountered an unexpected tracer": _leaked,
    "Attempted boolean conversion of traced array": lambda: jax.jit(bool)(1.0),
    "is not a valid JAX type": lambda: jax.grad(mylib.filter_jit(jnp.sum))(jnp.sin),
    "Array has been deleted": _deleted,
    "RESOURCE_EXHAUSTED": lambda: jnp.zeros(1 << 45),
    "compiled twice": _compiled_twice,
    "hand over the step as for one device": _planned,
}
_SLOW = {"differs from one device": _differs}
# Raised in processes of their own, below.
_ELSEWHERE = {
    "Passing non-trivial shardings for numpy inputs",
    "may be stuck",
    "Termination timeout",
}


def test_each_text_has_a_program():
    assert _RAISES.keys() | _SLOW.keys() | _ELSEWHERE == _TEXTS


@pytest.mark.parametrize(
    "text",
    [*_RAISES, *(pytest.param(text, marks=pytest.mark.slow) for text in _SLOW)],
)
def test_a_program_raises_it(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(Exception, match=re.escape(text)):  # noqa: B017
            (_RAISES | _SLOW)[text]()


@pytest.mark.multihost(processes=2, devices_per_process=4)
def test_numpy_in_several_processes():
    fun = jax.jit(jnp.sin, in_shardings=ROWS)
    with pytest.raises(ValueError, match="Passing non-trivial shardings for numpy inputs"):
        fun(np.ones(8))


_STUCK = """
import time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P

def late(i):
    time.sleep(20 if i == 0 else 0)
    return np.float32(0)

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
def total(x):
    i = jax.lax.axis_index("data")
    y = jax.pure_callback(late, jax.ShapeDtypeStruct((), jnp.float32), i)
    return jax.lax.psum(x + y, "data")

jax.block_until_ready(total(np.ones(2, np.float32)))
"""


@pytest.mark.slow
def test_a_rendezvous_that_takes_too_long(checkout_env):
    flags = (
        "--xla_force_host_platform_device_count=2 "
        "--xla_cpu_collective_call_warn_stuck_timeout_seconds=1 "
        "--xla_cpu_collective_call_terminate_timeout_seconds=2"
    )
    done = run_python("-c", _STUCK, env=checkout_env | {"XLA_FLAGS": flags})
    assert done.returncode != 0
    assert "may be stuck" in done.stderr and "Termination timeout" in done.stderr
