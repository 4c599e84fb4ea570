"""Steps with kernels, and with what else a plan knows by name."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import planned_steps as steps
import pytest
from example_models import program
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from planned_steps import traced

import mylib
from mylib._core.compat import cudnn_as_described, describe_cudnn
from mylib._core.dims import program_of

KEY = jax.random.key(0)


def chosen(traced):
    return [{x for group in groups for x in group.members} for groups in traced.choices(2)]


def flops(traced):
    return sum(x.amount * x.place.times for x in traced.program.products)


def flash(make):
    example, size = program("flash"), program("flash").SMALL
    tokens = jax.ShapeDtypeStruct((size.rows, size.time + 1), jnp.int32)
    return traced(lambda key: getattr(example, make)(size, key), tokens, example.loss)


def test_a_kernel_is_split_as_its_reference_is():
    ours, plain = flash("make"), flash("Llama")
    assert chosen(ours) == chosen(plain)
    assert ours.rows and ours.input == plain.input
    # The reference is computed again in its derivative.
    assert flops(plain) < flops(ours) < 1.3 * flops(plain)


class Scaled(eqx.Module):
    layer: eqx.nn.Linear
    kernel: object = eqx.field(static=True)

    def __call__(self, x):
        return self.kernel(self.layer(x))


def doubling(cost):
    def double(x):
        def kernel(x, y):
            y[...] = 2 * x[...]

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True, cost_estimate=cost)(x)

    run = mylib.opaque(double, dims="d -> d")
    return mylib.opaque(
        double, dims="d -> d", fwd=lambda x: (run(x), None), bwd=lambda _, g: (run(g),)
    )


def scaled(kernel):
    def make(key):
        return Scaled(eqx.nn.Linear(64, 128, key=key), kernel)

    return traced(make, steps.ROWS, steps.squared_loss)


def test_the_cost_estimate_of_pallas_is_taken():
    cost = pl.CostEstimate(flops=1000, transcendentals=0, bytes_accessed=0)
    with_cost, without = scaled(doubling(cost)), scaled(doubling(None))
    # For each of 16 rows, forward and backward.
    assert flops(with_cost) == flops(without) + 2 * 16 * 1000
    assert not with_cost.program.unpriced
    assert "test_plan_kernels.py" in without.program.unpriced[0]


@pytest.mark.slow
def test_a_plan_with_kernels_computes_the_same_step():
    example, size = program("flash"), program("flash").SMALL
    step = steps.step_of(example.loss)
    model = example.make(size, KEY)
    args = example.task(size).batch(0), *steps.with_state(model)
    wanted = eqx.filter_jit(step)(*args)
    got = mylib.plan(step, *args).jit(step)(*args)
    np.testing.assert_allclose(got[-1], wanted[-1], rtol=1e-5)


def test_checks_of_errors_are_no_reason_to_refuse():
    def loss(model, x):
        y = jax.vmap(model)(eqx.error_if(x, jnp.any(x > 100), "large"))
        return jnp.mean(eqx.error_if(y, jnp.isnan(y), "nan") ** 2)

    ours = traced(steps.mlp, steps.ROWS, loss)
    plain = traced(steps.mlp, steps.ROWS, steps.squared_loss)
    assert chosen(ours) == chosen(plain)
    assert flops(ours) == flops(plain)


def test_the_attention_of_cudnn():
    describe_cudnn(91000, (9, 0))

    def run(q, k, v):
        out = jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    shape = jax.ShapeDtypeStruct((4, 128, 8, 64), jnp.bfloat16)
    with cudnn_as_described():
        read = program_of(jax.make_jaxpr(jax.grad(run, (0, 1, 2)))(shape, shape, shape))
    q, k, v = map(read.dims.groups, read.inputs)
    assert (q[0], q[2]) == (k[0], k[2]) == (v[0], v[2])
    assert len({*q, *k, *v}) > 4 and not read.unknown
    assert sum(x.amount for x in read.products) == 7 * 2 * 4 * 8 * 128 * 128 * 64


def test_products_of_experts():
    def run(x, w, sizes):
        return jnp.sum(jnp.sin(jax.lax.ragged_dot(x, w, sizes)))

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 16), (4, 16, 32))]
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    read = program_of(jax.make_jaxpr(jax.grad(run, (0, 1)))(*shapes, sizes))
    x, w, _ = map(read.dims.groups, read.inputs)
    assert x[1] == w[1] and not read.unknown
    assert read.dims.groups(read.results[1])[1:] == w[1:]
    assert sum(x.amount for x in read.products) == 3 * 2 * 64 * 16 * 32


def splashed(q, k, v):
    time, heads = q.shape[1:3]
    mask = splash.MultiHeadMask([splash.CausalMask((time, time))] * heads)
    blocks = splash.BlockSizes(*[128] * 8)
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=blocks)
    return jnp.swapaxes(jax.vmap(kernel)(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v))), 1, 2)


@pytest.mark.parametrize("run", [splashed, mylib.opaque(splashed, like=splashed)])
def test_splash_attention(run):
    q, k = (jax.ShapeDtypeStruct((4, 256, n, 128), jnp.bfloat16) for n in (8, 2))

    def loss(q, k, v):
        return jnp.sum(run(q, k, v).astype(jnp.float32) ** 2)

    read = program_of(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, k))
    groups = list(map(read.dims.groups, read.inputs))
    assert len({x[0] for x in groups}) == len({x[2] for x in groups}) == 1
    assert read.dims.parts(groups[0][2]) == 2
    assert not read.unknown and not read.unpriced
    # Half of the scores are masked. `opaque` computes it again in its derivative.
    count = 2 + 7 if run is splashed else 2 + 2 + 7
    kernels = [x for x in read.products if x.amount > 1e8]
    assert sum(x.amount for x in kernels) == count * 4 * 8 * 256 * 256 * 128


def test_a_kernel_that_compilers_cant_split():
    batch = jax.ShapeDtypeStruct((16, 128, 128), jnp.float32)

    def attended(x):
        return splashed(*[x[None, :, None]] * 3)[0, :, 0]

    class Attending(eqx.Module):
        layer: eqx.nn.Linear

        def __call__(self, x):
            return attended(jax.vmap(self.layer)(x))

    def make(key):
        return Attending(eqx.nn.Linear(128, 128, key=key))

    with pytest.raises(
        mylib.errors.PlanError, match=r"split splash_mha.*mylib.opaque\(f, like=f\)"
    ):
        traced(make, batch, steps.squared_loss)
