"""A traced program, cut into pieces: nothing is lost, and nothing computed twice."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from models import Block

import mylib
from mylib._training.mpmd.backward import flattened, pieces

WIDTH, ROWS = 32, 4
KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (ROWS, 8, WIDTH))


def both_passes(apply, params, x):
    """The program of a forward and a backward pass, and the results of each part of it."""
    leaves, treedef = jax.tree.flatten(params)

    def run(leaves, x, cotangent):
        made, pull = jax.vjp(lambda leaves, x: apply(treedef.unflatten(leaves), x), leaves, x)
        grads, back = pull(cotangent)
        return made, back, grads

    cotangent = jnp.cos(jax.eval_shape(apply, params, x).size + X)
    args = leaves, x, cotangent
    program = flattened(run, *args)
    flat = jax.tree.leaves(args)
    return program, flat, len(leaves)


def cut(program, count, *, weight=True, checkpoint=False):
    forward, back, *grads = [[x] for x in program.jaxpr.outvars]
    grads = [x for (x,) in grads]
    params, late = program.jaxpr.invars[:count], program.jaxpr.invars[count + 1 :]
    backward = [back, grads] if weight else [[*back, *grads]]
    if checkpoint:
        return [*pieces(program, [forward], params, late), *pieces(program, backward, params)]
    return pieces(program, [forward, *backward], params, late)


def run(program, flat, parts):
    """The program's results, computed by its pieces; and what each of them kept."""
    values = dict(zip(program.jaxpr.invars, flat, strict=True))
    kept = []
    for part in parts:
        made = jax.jit(part)(*[values[x] for x in part.takes])
        given = dict(zip(part.gives, made, strict=True))
        kept.append({x: y for x, y in given.items() if x not in program.jaxpr.outvars})
        values.update(given)
    return [values[x] for x in program.jaxpr.outvars], kept


def flops(part):
    """Of the program as it is, and of the compiled one, whose fusions may repeat operations."""
    avals = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in part.takes]
    lowered = jax.jit(part).lower(*avals)
    return np.array([x.cost_analysis()["flops"] for x in (lowered, lowered.compile())])


def check_flops(backward, weight, whole):
    """Splitting repeats nothing."""
    lowered, compiled = (flops(backward) + flops(weight)) / flops(whole)
    assert lowered == pytest.approx(1, rel=0.002)
    assert compiled <= 1.02


def matmuls(part):
    return sum(eqn.primitive.name == "dot_general" for eqn in part.eqns)


class MLP(eqx.Module):
    layers: list[eqx.nn.Linear]

    def __call__(self, x):
        for layer in self.layers:
            x = jax.nn.gelu(jax.vmap(jax.vmap(layer))(x))
        return x


def mlp():
    return MLP([eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in KEYS])


def transformer():
    blocks = [Block(WIDTH, 2 * WIDTH, 4, key=key) for key in KEYS[:2]]
    params, static = eqx.partition(blocks, eqx.is_inexact_array)

    def apply(params, x):
        for block in eqx.combine(params, static):
            x = jax.vmap(block)(x)
        return x

    return apply, params


def close(ours, reference):
    for x, y in zip(ours, jax.tree.leaves(reference), strict=True):
        assert np.linalg.norm(x - y) <= 1e-6 * np.linalg.norm(y)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_of_an_mlp(checkpoint):
    program, flat, count = both_passes(lambda model, x: model(x), mlp(), X)
    forward, backward, weight = parts = cut(program, count, checkpoint=checkpoint)
    made, kept = run(program, flat, parts)
    close(made, jax.jit(jax.extend.core.jaxpr_as_fun(program))(*flat))
    # Each layer multiplies once forwards, once for its input's cotangent, once for its weight.
    assert matmuls(forward) == 3
    assert matmuls(backward) == (6 if checkpoint else 3)
    assert matmuls(weight) == 3
    assert bool(kept[0]) is not checkpoint
    (whole,) = cut(program, count, weight=False, checkpoint=checkpoint)[1:]
    check_flops(backward, weight, whole)


@pytest.mark.thorough
@pytest.mark.parametrize("checkpoint", [False, True])
def test_of_a_transformer(checkpoint):
    program, flat, count = both_passes(*transformer(), X)
    forward, backward, weight = parts = cut(program, count, checkpoint=checkpoint)
    close(run(program, flat, parts)[0], jax.jit(jax.extend.core.jaxpr_as_fun(program))(*flat))
    (whole,) = cut(program, count, weight=False, checkpoint=checkpoint)[1:]
    check_flops(backward, weight, whole)
    # Queries, keys, values, results, and two layers of the MLP.
    assert matmuls(weight) == 2 * 6


def test_parameters_are_not_kept_with_each_microbatch():
    """Neither transposed, nor in another dtype, nor gathered."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def apply(params, x):
        for w in params:
            whole = mylib.filter_shard(w, P(), mesh=mesh).astype(jnp.bfloat16)
            x = jnp.tanh(x @ whole.T.astype(jnp.float32))
        return x

    params = [jax.random.normal(key, (WIDTH, WIDTH)) for key in KEYS]
    params = jax.device_put(params, NamedSharding(mesh, P("data")))
    program, flat, count = both_passes(apply, params, jax.device_put(X, NamedSharding(mesh, P())))
    flat = jax.device_put(flat, NamedSharding(mesh, P()))
    made, kept = run(program, flat, cut(program, count))
    close(made, jax.jit(jax.extend.core.jaxpr_as_fun(program))(*flat))
    assert all(x.aval.shape != (WIDTH, WIDTH) for values in kept for x in values)
    # One activation a layer, and the cotangent of one.
    assert [len(values) for values in kept] == [2, 3, 0]


def test_a_checkpoint_inside_is_computed_again_once():
    def apply(model, x):
        return jax.checkpoint(lambda model, x: model(x))(model, x)

    program, flat, count = both_passes(apply, mlp(), X)
    forward, backward, weight = parts = cut(program, count)
    made, kept = run(program, flat, parts)
    close(made, jax.jit(jax.extend.core.jaxpr_as_fun(program))(*flat))
    assert not kept[0]
    assert [matmuls(part) for part in parts] == [3, 6, 3]
    # The barrier stays; without it the compiler could compute everything early.
    assert "optimization_barrier" in {eqn.primitive.name for eqn in backward.eqns}
    assert "optimization_barrier" not in {eqn.primitive.name for eqn in weight.eqns}


def test_a_scan_is_not_cut():
    def apply(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    weights = jnp.stack([jax.random.normal(key, (WIDTH, WIDTH)) for key in KEYS])
    program, flat, count = both_passes(apply, weights, X)
    forward, backward, weight = parts = cut(program, count)
    close(run(program, flat, parts)[0], jax.jit(jax.extend.core.jaxpr_as_fun(program))(*flat))
    assert "scan" in {eqn.primitive.name for eqn in backward.eqns}
    assert not weight.eqns


def test_nested_functions_that_place_their_results_stay_whole():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    placed = jax.jit(jnp.sin, out_shardings=NamedSharding(mesh, P("data")))
    program = flattened(lambda x: jax.jit(jnp.cos)(placed(x)), np.ones(8, np.float32))
    assert [eqn.primitive.name for eqn in program.jaxpr.eqns] == ["jit", "cos"]


def test_callbacks_run_once(capfd):
    @jax.custom_vjp
    def f(x):
        return x * 2

    def backward(_, g):
        jax.debug.print("backward {}", g[0, 0, 0] > 5)
        return (g * 2,)

    f.defvjp(lambda x: (f(x), None), backward)

    def apply(w, x):
        jax.debug.print("forward {}", x[0, 0, 0] > 100)
        return f(x) * w

    program, flat, count = both_passes(apply, jnp.ones(()), X)
    run(program, flat, cut(program, count))
    jax.effects_barrier()
    assert sorted(capfd.readouterr().out.split("\n")) == ["", "backward False", "forward False"]
