"""The warning of gradients that JAX has summed over the devices before `psum` or `pmean` does."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
import pytest
from contexts import AUTO, EXPLICIT
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, PartitionSpec as P

import mylib
from mylib._training.per_device.summed_twice import summed_twice

N = 8
MESH = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,))
W = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
STACK = np.stack([W, W + 1, W - 1])
X = np.sin(np.arange(64, dtype=np.float32)).reshape(16, 4)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def mean(x):
    return lax.pmean(x, "data")


gradient = jax.grad(loss)
LARGE = 1.0 * N * np.asarray(gradient(W, X))


def told(step, *arguments, mesh=MESH, **options):
    """What a step returns, and the warnings of it."""
    if "in_specs" not in options:
        options["in_specs"] = (*[P()] * (len(arguments) - 1), P("data"))
    f = mylib.filter_shard_map(step, mesh=mesh, out_specs=P(), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = f(*arguments)
    return result, [w for w in caught if w.category is mylib.errors.SummedTwiceWarning]


def of_varied(w, x):
    return gradient(mylib.vary(w, "data"), x)


def of_mean(loss):
    return jax.grad(lambda w, x: mean(loss(w, x)))


def test_a_step_ported_line_by_line():
    """The gradient of the mean is eight times smaller; the warning says so, and where."""

    def step(w, x):
        return mean(gradient(w, x))

    result, (warning,) = told(step, W, X)
    np.testing.assert_allclose(result, LARGE, rtol=1e-5)
    np.testing.assert_allclose(result / N, gradient(W, X), rtol=1e-5)
    text = str(warning.message)
    assert "step: a gradient is summed over 'data' twice" in text
    line = mean.__code__.co_firstlineno + 1
    assert f"psum, pmean or psum_scatter at {__file__}:{line}" in text
    assert "mylib.vary(parameters, 'data')" in text and "jax.lax.axis_size('data')" in text
    assert warning.filename == __file__  # the line that calls the mapped function


def test_what_it_says_to_write_instead():
    for step in (lambda w, x: mean(of_varied(w, x)), lambda w, x: gradient(w, x) / N):
        result, warned = told(step, W, X)
        np.testing.assert_allclose(result, gradient(W, X), rtol=1e-5)
        assert not warned


def test_unchecked():
    result, warned = told(lambda w, x: mean(gradient(w, x)), W, X, check_vma=False)
    np.testing.assert_allclose(result, gradient(W, X), rtol=1e-5)
    assert not warned


def scanned(w, x):
    return jnp.mean(mylib.loops.scan(lambda c, v: (jnp.tanh(c @ v) * 2.0, None), x, w)[0] ** 2)


def scanned_checkpoint(w, x):
    body = jax.checkpoint(lambda c, v: (jnp.tanh(c @ v) * 2.0, None))
    return jnp.mean(lax.scan(body, x, w)[0] ** 2)


def normed(w, x):
    """As batch norm: it communicates on its way to each device's own loss."""
    y = x @ w
    y = (y - mean(y.mean(0))) / jnp.sqrt(mean(y.var(0)) + 1e-3)
    return jnp.mean(y**3 * w[0])


def looked_up(w, x):
    chosen = jnp.zeros((x.shape[0], 1), jnp.int32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w), chosen, -1))


def branching(w, x):
    return lax.cond(w[0, 0] > 0, loss, lambda w, x: 2 * loss(w, x), w, x)


LOSSES = {
    "plain": (loss, W),
    "jit": (jax.jit(loss), W),
    "checkpoint": (jax.checkpoint(loss), W),
    "scan": (scanned, STACK),
    "checkpoint in a scan": (scanned_checkpoint, STACK),
    "communicates": (normed, W),
    "indices": (looked_up, W),
    "cond": (branching, W),
    "mixed precision": (lambda w, x: loss(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)), W),
    "custom rules": (lambda w, x: jnp.sum(optax.safe_norm(jax.nn.relu(x @ w), 1e-3, axis=-1)), W),
}


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.everyday("plain", "checkpoint", "cond", rest="thorough")
def test_whatever_the_loss(case):
    loss, w = LOSSES[case]
    own = jax.grad(loss)
    assert len(told(lambda w, x: mean(own(w, x)), w, X)[1]) == 1
    assert not told(lambda w, x: own(w, x), w, X)[1]
    assert not told(lambda w, x: mean(own(mylib.vary(w, "data"), x)), w, X)[1]
    # Of a loss that is the same on all devices the gradient is right, and stays so.
    result, warned = told(lambda w, x: mean(of_mean(loss)(w, x)), w, X)
    np.testing.assert_allclose(result, told(of_mean(loss), w, X)[0], rtol=1e-5)
    assert not warned


def clipped(g):
    return g * jnp.minimum(1, 0.1 / jnp.sqrt(jnp.sum(g**2)))


def accumulated(w, x):
    start = jnp.zeros_like(w)
    return lax.scan(lambda total, row: (total + gradient(w, row[None]), None), start, x)[0]


def steps(gradient):
    def run(w, x):
        return lax.scan(lambda w, _: (w - 0.1 * gradient(w, x), None), w, None, length=3)[0]

    return run


def by_vjp(w, x):
    value, pull = jax.vjp(lambda w: loss(w, x), w)
    return pull(jnp.ones_like(value))[0]


TWICE = {
    "psum": lambda w, x: lax.psum(gradient(w, x), "data"),
    "psum, divided": lambda w, x: lax.psum(gradient(w, x), "data") / N,
    "divided before": lambda w, x: mean(gradient(w, x) / N),
    "varied within the loss": lambda w, x: mean(
        jax.grad(lambda w: loss(mylib.vary(w, "data"), x))(w)
    ),
    "psum_scatter": lambda w, x: lax.all_gather(
        lax.psum_scatter(gradient(w, x).ravel(), "data", tiled=True), "data", to="invarying"
    ),
    "a jitted gradient": lambda w, x: mean(jax.jit(gradient)(w, x)),
    "a jitted pmean": lambda w, x: jax.jit(mean)(gradient(w, x)),
    "clipped": lambda w, x: mean(clipped(gradient(w, x))),
    "clipped by optax": lambda w, x: mean(optax.clip(0.1).update(gradient(w, x), None)[0]),
    "cast": lambda w, x: mean(gradient(w, x).astype(jnp.bfloat16)),
    "raveled": lambda w, x: mean(ravel_pytree([gradient(w, x), gradient(w, x)])[0]),
    "accumulated": lambda w, x: mean(accumulated(w, x)),
    "added up": lambda w, x: mean(gradient(w, x) + gradient(w, -x)),
    "of each example": lambda w, x: mean(jax.vmap(gradient, (None, 0))(w, x).mean(0)),
    "in a loop of steps": steps(lambda w, x: mean(gradient(w, x))),
    "vjp": lambda w, x: mean(by_vjp(w, x)),
}


@pytest.mark.parametrize("case", TWICE)
def test_whatever_is_done_with_the_gradient(case):
    assert len(told(TWICE[case], W, X)[1]) == 1


def constant_told_to_vary(w, x):
    one = mylib.vary(jnp.float32(1.0), "data")
    return jax.grad(lambda w: mean(jnp.sum(one * (x @ w))))(w)


FINE = {
    "of a summed loss": lambda w, x: lax.psum(
        jax.grad(lambda w: lax.psum(loss(w, x), "data") / N)(w), "data"
    ),
    "of a gathered loss": lambda w, x: mean(
        jax.grad(lambda w: jnp.mean(lax.all_gather(loss(w, x), "data", to="invarying")))(w)
    ),
    "a constant told to vary": lambda w, x: mean(constant_told_to_vary(w, x)),
    "of what differs": lambda w, x: mean(jax.grad(loss, 1)(w, x)),
    "a norm": lambda w, x: (gradient(w, x) / N, mean(optax.tree.norm(gradient(w, x)))),
    "a mean": lambda w, x: (gradient(w, x) / N, mean(jnp.mean(gradient(w, x)))),
    "other values": lambda w, x: (gradient(w, x) / N, mean(loss(w, x)), lax.psum(1, "data")),
    "parameters": lambda w, x: mean(w - 0.1 * gradient(w, x) / N),
    "one device's": lambda w, x: lax.psum(
        jnp.where(lax.axis_index("data") == 0, gradient(w, x), 0), "data"
    ),
    "times what differs": lambda w, x: lax.psum(x @ gradient(w, x), "data"),
    "of the norm of a gradient": lambda w, x: mean(
        jax.grad(lambda w: jnp.sum(gradient(w, x) ** 2))(w)
    ),
    "through a gradient": lambda w, x: mean(
        jax.grad(lambda w: mean(loss(w - 0.1 * mean(of_varied(w, x)), x)))(w)
    ),
    "in a loop of steps": steps(lambda w, x: gradient(w, x) / N),
    "varied in a loop of steps": steps(lambda w, x: mean(of_varied(w, x))),
}


@pytest.mark.parametrize("case", FINE)
def test_no_false_alarm(case):
    assert not told(FINE[case], W, X)[1]


@pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_axes(mesh):
    def both(w, x):
        return lax.pmean(gradient(w, x), ("data", "model"))

    def axes(step, spec, **options):
        _, warned = told(step, W, X, mesh=mesh, in_specs=(P(), spec), **options)
        return [str(w.message).partition("summed over ")[2].partition(" ")[0] for w in warned]

    assert axes(both, P(("data", "model"))) == ["'data'", "'model'"]
    # Along "model" the examples are the same, and a mean of equal gradients changes nothing.
    assert axes(both, P("data")) == ["'data'"]
    assert axes(lambda w, x: lax.pmean(gradient(w, x), "model"), P("data")) == []
    assert axes(lambda w, x: mean(gradient(w, x)), P("data"), axis_names={"data"}) == ["'data'"]


def test_a_map_inside_another_is_told_once():
    specs = dict(in_specs=(P(), P(None, "model")), out_specs=P(), axis_names={"model"})

    @mylib.filter_shard_map(**specs)
    def inner(w, x):
        return lax.pmean(jax.grad(lambda w: jnp.sum(jnp.sin(x) * w))(w), "model")

    def outer(w, x):
        return mean(inner(mylib.vary(w, "data"), x))

    with jax.set_mesh(AUTO):
        (warning,) = told(outer, np.float32(2), X, mesh=AUTO, axis_names={"data"})[1]
    assert "summed over 'model' twice" in str(warning.message)


@pytest.mark.thorough
def test_one_warning_for_a_model():
    """Ported as in docs/from-pmap.md, without `vary`; clipping and Adam hide the size."""
    optim = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    model = models.Transformer(depth=1, key=jax.random.key(0))
    state = optim.init(eqx.filter(model, eqx.is_array))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, models.VOCAB, (16, models.LENGTH + 1)).astype(np.int32)

    def loss_of(model, tokens):
        logits = jax.vmap(model)(tokens[:, :-1])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.mean(each)

    def step(model, state, tokens, own=lambda model: model):
        loss, grads = eqx.filter_value_and_grad(loss_of)(own(model), tokens)
        loss, grads = lax.pmean((loss, grads), "data")
        updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    def varied(model, state, tokens):
        return step(model, state, tokens, lambda model: mylib.vary(model, "data"))

    options = {"in_specs": {"tokens": P("data")}}
    (ported, _, _), warned = told(step, model, state, tokens, **options)
    assert len(warned) == 1
    (right, _, _), warned = told(varied, model, state, tokens, **options)
    assert not warned
    # The gradients were eight times too large, and nothing shows it.
    weights = [m.layers[0].attention.query_proj.weight for m in (ported, right)]
    np.testing.assert_allclose(*weights, atol=1e-4)

    mapped = mylib.filter_shard_map(step, mesh=MESH, out_specs=P(), **options)
    with pytest.warns(mylib.errors.SummedTwiceWarning) as caught:
        mylib.filter_jit(mapped)(model, state, tokens)
    assert len(caught) == 1


def test_warnings_can_be_errors():
    """Nothing has run then, and the next call raises again."""
    step = mylib.filter_shard_map(
        lambda w, x: mean(gradient(w, x)), mesh=MESH, in_specs=(P(), P("data")), out_specs=P()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", mylib.errors.SummedTwiceWarning)
        for _ in range(2):
            with pytest.raises(mylib.errors.SummedTwiceWarning, match="twice"):
                step(W, X)


@pytest.mark.parametrize("name", ["pvary", "psum_invariant", "scan", "while"])
def test_parameters_of_another_jax(name):
    """An equation whose parameters have other names than those known costs the warning only."""

    def step(w, x):
        w = lax.fori_loop(0, jnp.int32(x[0, 0]), lambda _, w: w, w)
        w, _ = lax.scan(lambda w, y: (w + y, None), w, jnp.zeros((2, 4, 4)))
        return mean(gradient(w, x))

    mapped = jax.shard_map(step, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    (equation,) = jax.make_jaxpr(mapped)(W, X).eqns
    program = equation.params["jaxpr"]
    assert summed_twice(program)
    eqns = []
    for eqn in program.eqns:
        if eqn.primitive.name == name:
            eqn = eqn.replace(params={f"new_{key}": x for key, x in eqn.params.items()})
        eqns.append(eqn)
    assert eqns != list(program.eqns)
    assert summed_twice(program.replace(eqns=eqns)) == []
