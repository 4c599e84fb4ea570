"""`run_here`: arguments, results and errors; and programs of tests/audit/texts."""

import gzip
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import mylib
from mylib._interpreter.here import run_text
from mylib.testing import run_here

TEXTS = Path(__file__).parent.parent / "audit" / "texts"


def text_of(name):
    return gzip.decompress((TEXTS / f"{name}.hlo.gz").read_bytes()).decode()


def test_a_sum_that_a_tpu_scatters():
    """`lax.psum_scatter` over b, of arrays in tiles."""
    mesh = mylib.make_mesh(a=2, b=2, c=2)
    x = np.random.default_rng(0).normal(size=(8, 8, 512))
    there = NamedSharding(mesh, P("a", "b", "c"))
    result = (8, 4, 512), NamedSharding(mesh, P(("a", "b"), None, "c"))
    (found,) = run_text(text_of("tpu-0.10.2-iota_rs_b"), [(x, there)], [result])
    np.testing.assert_allclose(found, x.reshape(8, 2, 4, 512).sum(1))


class TestBroadcastOfAGpu:
    text = text_of("gpu-0.10.2-pbroadcast")
    x = np.random.default_rng(0).normal(size=(8, 512))

    def test_it_gives_all_devices_the_first_row(self):
        there = NamedSharding(mylib.make_mesh(data=8), P("data"))
        (found,) = run_text(self.text, [(self.x, there)], [(self.x.shape, there)])
        np.testing.assert_array_equal(found, np.broadcast_to(self.x[0], (8, 512)))

    def test_copies_that_differ_are_an_error(self):
        there, whole = (NamedSharding(mylib.make_mesh(data=8), spec) for spec in (P("data"), P()))
        groups = "replica_groups={{0,1,2,3,4,5,6,7}}"
        assert groups in self.text
        apart = self.text.replace(groups, "replica_groups={{0,1,2,3},{4,5,6,7}}")
        with pytest.raises(mylib.ReplicaError, match="device 0"):
            run_text(apart, [(self.x, there)], [((1, 512), whole)])


def check_filter_jit(mesh):
    @mylib.filter_jit(in_shardings={"x": P("data")}, mesh=mesh, donate="all")
    def step(model, x, scale=2.0):
        x = eqx.error_if(x, x.sum() < 0, "negative")
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
        return {"loss": scale * loss, "model": eqx.apply_updates(model, grads)}

    model = eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))
    x = np.random.default_rng(0).uniform(size=(16, 8))
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    compiled = step.lower(eqx.filter_eval_shape(lambda: model), shape).compile()
    found = run_here(compiled, model, x)
    wanted = step.__wrapped__(model, jnp.asarray(x, jnp.float32))
    assert found["loss"].dtype == np.float64
    is_array = lambda x: isinstance(x, np.ndarray | jax.Array)  # noqa: E731
    leaves = [filter(is_array, jax.tree.leaves(tree)) for tree in (found, wanted)]
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="negative"):
        run_here(compiled, model, -x)


def check_jit(mesh):
    """With a key, an argument that isn't used, and a large constant."""
    key, numbers = jax.random.key(0), jnp.arange(800.0) ** 2
    places = [NamedSharding(mesh, spec) for spec in (P("data"), P())]
    args = (jnp.ones(800), key)
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)
        for x, there in zip(args, places, strict=True)
    ]

    def draw(x, key, unused):
        return jax.random.split(key), x + numbers + jax.random.normal(key)

    found = run_here(jax.jit(draw).lower(*shapes, 3).compile(), *args, 3)
    keys, wanted = draw(*args, 3)
    np.testing.assert_array_equal(found[0], jax.random.key_data(keys))
    np.testing.assert_allclose(found[1], wanted, rtol=1e-6)


def test_what_filter_jit_has_compiled():
    check_filter_jit(mylib.make_mesh(data=8))


def test_what_jit_has_compiled():
    check_jit(mylib.make_mesh(data=8))


@pytest.mark.compilers
@pytest.mark.compiles_for("h100 x 8", "v5e 2x4")
def test_what_is_compiled_for_machines(machine):
    mesh = machine.mesh(data=8)
    check_filter_jit(mesh)
    check_jit(mesh)


def test_what_it_refuses():
    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    compiled = jax.jit(jnp.linalg.eigh).lower(x).compile()
    with pytest.raises(mylib.AuditError, match="the custom call lapack_ssyevd"):
        run_here(compiled, np.eye(4))
    with pytest.raises(TypeError, match=r"shape \(3, 4\) is given for float32\[4,4\]"):
        run_here(compiled, np.ones((3, 4)))
    with pytest.raises(TypeError, match="compiled for other arguments"):
        run_here(compiled, np.eye(4), np.eye(4))
    with pytest.raises(TypeError, match="is no compiled program"):
        run_here(jax.jit(jnp.sin), np.eye(4))
    with pytest.raises(mylib.AuditError, match="without its numbers"):
        text = "HloModule m\n\nENTRY %e () -> f32[9] {\n  ROOT %c = f32[9]{0} constant({...})\n}\n"
        run_text(text, [], [])
