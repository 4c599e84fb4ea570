"""Optimistix: root finds, least squares, minimisations and fixed points over devices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimistix as optx
from common import assert_close, check, check_each, normal, shard

OWN = "optimistix"
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def field(x, scale):
    return x**3 + 2 * x - scale * jnp.roll(x, 1) - 1


@check_each(["Newton", "Chord", "Dogleg", "LevenbergMarquardt"])
def roots(name):
    """a root of a field over devices: Newton, Chord, Dogleg, Levenberg-Marquardt"""
    start = shard(normal(0, 16) / 10, "data")
    solver = getattr(optx, name)(**TOLERANCE)
    solution = optx.root_find(field, solver, start, jnp.float32(0.5), max_steps=1000)
    assert_close(field(solution.value, 0.5), np.zeros(16), 2e-2)
    return solution.value


@check
def many_roots():
    """vmap of bisection, a root for each device's rows"""
    targets = shard(np.linspace(0.5, 8, 32, dtype=np.float32), "data")
    solver, options = optx.Bisection(**TOLERANCE), {"lower": 0.0, "upper": 4.0}

    @eqx.filter_jit
    @jax.vmap
    def root(target):
        def square(x, target):
            return x**2 - target

        return optx.root_find(square, solver, jnp.float32(1), target, options=options).value

    results = root(targets)
    assert_close(results**2, targets)
    return results


def residuals(parameters, data):
    x, y = data
    return parameters["a"] * jnp.exp(-parameters["b"] * x) - y


@check_each(["LevenbergMarquardt", "GaussNewton", "Dogleg", "BFGS", "NonlinearCG"])
def least_squares(name):
    """a fit to data over devices: Levenberg-Marquardt, Gauss-Newton, Dogleg, BFGS, NonlinearCG"""
    x = np.linspace(0, 2, 64, dtype=np.float32)
    data = shard((x, 3 * np.exp(-1.5 * x)), "data")
    start = {"a": jnp.float32(2), "b": jnp.float32(1)}
    solver = getattr(optx, name)(**TOLERANCE)
    solution = optx.least_squares(residuals, solver, start, data, max_steps=5000)
    assert_close(solution.value, {"a": 3.0, "b": 1.5}, 2e-2)
    return solution.value


def bowl(x, data):
    return jnp.mean((data @ x - 1) ** 2) + jnp.sum(x**4)


@check_each(["BFGS", "NonlinearCG", "LBFGS", "NelderMead", "GradientDescent", "OptaxMinimiser"])
def minima(name):
    """a minimum over data on devices: BFGS, NonlinearCG, LBFGS, Nelder-Mead, descent, Optax"""
    options = {
        "GradientDescent": (0.05,),
        "OptaxMinimiser": (optax.adam(0.05),),
    }
    solver = getattr(optx, name)(*options.get(name, ()), **TOLERANCE)
    data, start = shard(normal(0, 64, 3), "data"), jnp.zeros(3)
    solution = optx.minimise(bowl, solver, start, data, max_steps=5000)
    if name != "NelderMead":
        assert_close(jax.grad(bowl)(solution.value, data), np.zeros(3), 5e-2)
    return solution.value


@check
def fixed_points():
    """a fixed point, and the gradient of what it depends on"""
    start, scale = shard(np.zeros(16, np.float32), "data"), jnp.float32(0.5)
    solver = optx.FixedPointIteration(**TOLERANCE)

    def step(x, scale):
        return scale * jnp.cos(x) + jnp.roll(x, 1) / 8

    def value(scale):
        return optx.fixed_point(step, solver, start, scale).value.sum()

    x = optx.fixed_point(step, solver, start, scale).value
    assert_close(step(x, scale), x)
    return x, eqx.filter_jit(eqx.filter_grad(value))(scale)


@check
def implicit_gradients():
    """the gradient of a root, implicit and by reverse mode through the steps"""
    start = shard(np.zeros(16, np.float32), "data")

    def value(scale, adjoint):
        solver = optx.Newton(**TOLERANCE)
        solution = optx.root_find(field, solver, start, scale, adjoint=adjoint, max_steps=32)
        return jnp.sum(solution.value**2)

    adjoints = optx.ImplicitAdjoint(), optx.RecursiveCheckpointAdjoint()
    gradient = eqx.filter_jit(eqx.filter_grad(value))
    results = [gradient(jnp.float32(0.5), adjoint) for adjoint in adjoints]
    assert_close(*results)
    return results


@check
def aux_and_bounds():
    """has_aux, statistics, and a solver that is told to stop early"""

    def with_aux(x, data):
        return (bowl(x, data), {"seen": x.sum()})

    data, start = shard(normal(0, 64, 3), "data"), jnp.ones(3)
    solver = optx.BFGS(**TOLERANCE)
    solution = optx.minimise(with_aux, solver, start, data, has_aux=True)
    early = optx.minimise(bowl, solver, start, data, max_steps=2, throw=False)
    assert early.result == optx.RESULTS.nonlinear_max_steps_reached
    return solution.value, solution.aux, early.value, solution.stats["num_steps"]


@check
def models_as_unknowns():
    """an Equinox model that is fitted, its arrays over devices"""
    model = eqx.nn.MLP(2, "scalar", 8, 1, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    x = normal(1, 64, 2)
    data = shard((x, np.sin(x[:, 0])), "data")

    def loss(arrays, data):
        x, y = data
        return jnp.mean((jax.vmap(eqx.combine(arrays, static))(x) - y) ** 2)

    solver = optx.BFGS(rtol=1e-3, atol=1e-3)
    solution = optx.minimise(loss, solver, shard(arrays), data, max_steps=20, throw=False)
    assert loss(solution.value, data) < loss(arrays, data) / 2
    return loss(solution.value, data)
