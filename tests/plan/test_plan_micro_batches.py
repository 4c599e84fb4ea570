"""What helps where a step doesn't fit: micro-batches, and values that are saved in host memory."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from planned_steps import modelled

import mylib

ROWS, WIDTH = 2048, 64


class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=key)
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=key)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


class Stack(eqx.Module):
    blocks: Block

    def __init__(self, key):
        self.blocks = eqx.filter_vmap(Block)(jax.random.split(key, 4))

    def __call__(self, x):
        layers, static = eqx.partition(self.blocks, eqx.is_array)
        return jax.lax.scan(lambda x, w: (eqx.combine(w, static)(x), None), x, layers)[0]


def steps(micro_batches):
    """A step that adds the gradients of as many micro-batches, each with rows of all devices."""

    def step(model, batch):
        pieces = batch.reshape(-1, micro_batches, WIDTH).swapaxes(0, 1)

        def add(total, piece):
            loss, grads = eqx.filter_value_and_grad(loss_of)(model, piece)
            return jax.tree.map(jnp.add, total, grads), loss

        zeros = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
        grads, losses = jax.lax.scan(add, zeros, pieces)
        return jax.tree.map(lambda w, g: w - 0.1 * g / micro_batches, model, grads), losses.mean()

    return step


def loss_of(model, rows):
    return jnp.mean(jax.vmap(model)(rows) ** 2)


def planned(memory, numbers=(), **options):
    model, batch = Stack(jax.random.key(0)), np.ones((ROWS, WIDTH), np.float32)
    step = steps if numbers else steps(1)
    options = {"memory": memory, "machine": "h100 x 8", **options}
    return modelled(step, model, batch, micro_batches=numbers, **options)


def memory_of(plan, name):
    return next(x.memory for x in (plan.chosen, *plan.others) if x.name == name)


def test_more_of_them_take_less_memory():
    plan = planned(1e9, (1, 2, 4, 8))
    names = "FSDP 8", *(f"FSDP 8, {n} micro-batches" for n in (2, 4, 8))
    held = [memory_of(plan, name) for name in names]
    assert held == sorted(held, reverse=True)
    assert plan.micro_batches == 1
    assert planned(1e9, (2,)) != plan


def test_as_many_are_chosen_as_fit():
    held = memory_of(planned(1e9, (1, 4)), "FSDP 8, 4 micro-batches")
    plan = planned(1.06 * held, (1, 4), axes={"data": 8})
    assert plan.micro_batches == 4
    assert plan.chosen.name == "FSDP 8, 4 micro-batches"


def test_a_micro_batch_that_devices_cannot_share():
    plan = planned(1e9, (1, 512))
    assert (
        "2048 rows of batch in 512 micro-batches can't be divided over 8 devices"
        in plan.why_not("FSDP 8, 512 micro-batches")
    )


def test_a_plan_with_micro_batches_trains_as_one_device():
    machine = mylib.machines.here()
    plan = planned(1e9, (4,), machine=machine)
    model, batch = Stack(jax.random.key(0)), np.random.default_rng(0).normal(size=(ROWS, WIDTH))
    batch = batch.astype(np.float32)
    expected, loss = steps(4)(model, batch)
    assert mylib.Plan.of(plan.as_text(), plan.layers).micro_batches == 4
    trained, value = plan.jit(steps(plan.micro_batches), donate=())(model, batch)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(trained), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-6)


def test_what_would_help_where_nothing_fits():
    least = memory_of(planned(1e9), "FSDP 8")
    with pytest.raises(mylib.errors.PlanError) as caught:
        planned(0.99 * least, axes={"data": 8})
    message = str(caught.value)
    assert 'policies=("offload_inputs",)' in message
    assert "or micro-batches in the step (micro_batches=)" in message


def test_what_is_offloaded_takes_no_memory_and_time():
    names = {"dots": "FSDP 8, saves dots", "offload": "FSDP 8, saves offload"}
    plans = {policy: planned(1e9, policies=(policy,)) for policy in names}
    dots, offload = (
        next(x for x in (plan.chosen, *plan.others) if x.name == names[policy])
        for policy, plan in plans.items()
    )
    assert offload.memory < dots.memory
    # Each of the four layers copies the result of its first product there and back.
    copied = 2 * 4 * ROWS * 4 * WIDTH * 4 / 8
    assert offload.parts["offloading"] == pytest.approx(copied / 6.4e10, rel=0.3)
    assert "offloading" not in dots.parts


def test_the_inputs_of_layers_are_offloaded():
    policies = "full", "offload_inputs"
    full, offload = (planned(1e9, policies=(x,), axes={"data": 8}) for x in policies)
    # Each of the four layers copies its input there and back.
    copied = 2 * 4 * ROWS * WIDTH * 4 / 8
    assert offload.chosen.parts["offloading"] == pytest.approx(copied / 6.4e10, rel=0.1)
    assert offload.memory < full.memory
    assert '["layer_input"]' in offload.code()


@pytest.mark.compilers
def test_the_compiler_offloads_the_inputs():
    plan = planned(1e12, policies=("offload_inputs",), compile=1, axes={"data": 8})
    assert plan.audit is not None and plan.audit.memory.host >= 4 * ROWS * WIDTH * 4 / 8


@pytest.mark.compilers
def test_the_compiler_offloads_as_much():
    plan = planned(1e12, policies=("offload",), compile=1, axes={"data": 8})
    assert plan.audit is not None and plan.audit.memory.host > 0
    estimate = plan.audit.estimate(mylib.machines.Machine.of("h100 x 8"))
    assert estimate.parts["host memory"] > 0
    assert "offload_dot_with_no_batch_dims" in plan.code()
