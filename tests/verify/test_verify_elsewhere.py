"""`verify` of a step for a machine that isn't here: its compiled program is computed in NumPy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import mylib
from mylib._core.known_faults import MISREAD
from mylib.rules import fsdp
from mylib.testing import VerifyError, verify

pytestmark = pytest.mark.compilers


@pytest.mark.compiles_for("h100 x 8", "v5e 2x4")
def test_a_step_of_fsdp(machine):
    mesh, kept = machine.mesh(data=-1), fsdp("data", min_size=64)

    def gradients(model, x):
        def loss(model):
            model = mylib.fully_shard(model, eqx.nn.Linear, kept, mesh=mesh)
            return jnp.mean(jax.vmap(model)(x) ** 2)

        return eqx.filter_value_and_grad(loss)(model)

    model = eqx.filter_eval_shape(eqx.nn.MLP, 16, 16, 64, 2, key=jax.random.key(0))
    x = jax.ShapeDtypeStruct((32, 16), jnp.float32)
    step = mylib.filter_jit(gradients, in_shardings=(kept, P("data")), mesh=mesh)
    report = verify(step, model, x)
    assert not report.own and max(r.difference for r in report.wide) < 1e-7
    with pytest.raises(VerifyError, match="off by .*, where"):
        verify(step, model, x, reference=lambda model, x: gradients(model, x[:16]))


@pytest.mark.compiles_for("h100 x 8")
class TestBothSidesAlike:
    """A step with random numbers that are drawn without a dtype, and with casts."""

    def loss(self, key, x, w):
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        small = jnp.where(kept, x, 0).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        return jnp.mean((small.astype(jnp.float32) + jax.random.normal(key, (16, 16))) ** 2)

    args = [
        jax.eval_shape(lambda: jax.random.key(0)),
        *[jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 2,
    ]

    def step(self, machine):
        places = P(), P("data"), P()
        return mylib.filter_jit(self.loss, in_shardings=places, mesh=machine.mesh(data=-1))

    def test_neither_rounds(self, machine):
        report = verify(self.step(machine), *self.args)
        assert max(r.difference for r in report.wide) < 1e-12

    def test_no_fault_of_the_compiler_is_named_for_a_fault_of_the_step(self, machine):
        with pytest.raises(VerifyError) as raised:
            half = lambda key, x, w: self.loss(key, x, w / 2)  # noqa: E731
            verify(self.step(machine), *self.args, reference=half)
        assert not raised.value.report.known


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.compiles_for("h100 x 8")
def test_a_step_of_jax_jit(machine, axes):
    mesh = Mesh(machine.mesh(data=-1).devices, "data", axis_types=(axes,))
    rows, copies = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def loss(x, w):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    report = verify(jax.jit(loss, in_shardings=(rows, copies)), x, x)
    assert not report.own and max(r.difference for r in report.wide) < 1e-7


@pytest.mark.skipif(
    not MISREAD.is_on("gpu"), reason="this version of jaxlib doesn't have the fault"
)
@pytest.mark.compiles_for("h100 x 8")
def test_a_copy_that_xla_loses(machine):
    """Of tests/interpreter/xla_gpu_copy.md."""

    @mylib.filter_jit(in_shardings=P(), mesh=machine.mesh(data=-1))
    def product(x, scale, weight):
        sums = with_layout_constraint(x.sum(1), Layout((1, 0)))
        return (sums * scale) @ weight.T

    shapes = (4, 16, 32), (32,), (4, 32)
    with pytest.raises(VerifyError, match="a known fault: XLA may read an operand"):
        verify(product, *(jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes))
