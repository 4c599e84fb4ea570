"""Diffrax: differential equations whose states lie over devices."""

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optax
import optimistix as optx
from common import assert_close, check, check_each, normal, shard

OWN = "diffrax"
PID = dfx.PIDController(rtol=1e-4, atol=1e-5)


def decay(t, y, rate):
    return -rate * y + jnp.sin(t) * jnp.roll(y, 1) / 10


def state():
    return shard(normal(0, 16, 4), "data")


@check_each(["Euler", "Tsit5", "Dopri8", "Kvaerno5", "ImplicitEuler"])
def solvers(name):
    """ODEs: Euler, Tsit5, Dopri8, Kvaerno5, ImplicitEuler"""
    solver = getattr(dfx, name)()
    implicit = isinstance(solver, dfx.AbstractImplicitSolver)
    if implicit:
        solver = getattr(dfx, name)(root_finder=dfx.VeryChord(rtol=1e-4, atol=1e-5))
    controller = PID if isinstance(solver, dfx.AbstractAdaptiveSolver) else dfx.ConstantStepSize()
    y = shard(normal(0, 16), "data")
    solution = dfx.diffeqsolve(
        dfx.ODETerm(decay), solver, 0, 2, 0.01, y, jnp.float32(0.7), stepsize_controller=controller
    )
    fine = dfx.diffeqsolve(
        dfx.ODETerm(decay), dfx.Tsit5(), 0, 2, 0.01, normal(0, 16), jnp.float32(0.7)
    )
    assert_close(solution.ys, fine.ys, 3e-2)
    return solution.ys, solution.stats["num_steps"]


@check
def saved_at_times():
    """SaveAt: times, steps, the end, and dense output that is evaluated"""
    save = dfx.SaveAt(ts=jnp.linspace(0, 1, 5), t1=True)
    at_times = dfx.diffeqsolve(
        dfx.ODETerm(decay), dfx.Tsit5(), 0, 1, 0.1, state(), 0.5, saveat=save
    )
    dense = dfx.diffeqsolve(
        dfx.ODETerm(decay), dfx.Tsit5(), 0, 1, 0.1, state(), 0.5, saveat=dfx.SaveAt(dense=True)
    )
    steps = dfx.diffeqsolve(
        dfx.ODETerm(decay), dfx.Tsit5(), 0, 1, 0.1, state(), 0.5, saveat=dfx.SaveAt(steps=True)
    )
    values = dense.evaluate(0.25), dense.derivative(0.25)
    assert_close(values[0], at_times.ys[1], 1e-2)
    return at_times.ys, values, steps.ys[:5]


@check_each(["RecursiveCheckpointAdjoint", "DirectAdjoint", "BacksolveAdjoint", "ForwardMode"])
def adjoints(name):
    """gradients: RecursiveCheckpointAdjoint, DirectAdjoint, BacksolveAdjoint, ForwardMode"""
    adjoint = getattr(dfx, name)()
    y = state()

    def value(rate):
        solution = dfx.diffeqsolve(
            dfx.ODETerm(decay), dfx.Tsit5(), 0, 1, 0.05, y, rate, adjoint=adjoint, max_steps=64
        )
        return jnp.sum(solution.ys**2)

    rate = jnp.float32(0.7)
    if name == "ForwardMode":
        return jax.jvp(value, (rate,), (jnp.float32(1),))
    return eqx.filter_jit(eqx.filter_value_and_grad(value))(rate)


@check_each(["EulerHeun", "ItoMilstein", "ShARK"])
def stochastic(name):
    """SDEs over a VirtualBrownianTree: EulerHeun, ItoMilstein, ShARK"""
    area = dfx.SpaceTimeLevyArea if name == "ShARK" else dfx.BrownianIncrement
    noise = dfx.VirtualBrownianTree(0, 1, 1e-3, (16,), jax.random.key(0), levy_area=area)

    def diffusion(t, y, rate):
        return lx.DiagonalLinearOperator(0.1 * jnp.ones_like(y))

    terms = dfx.MultiTerm(dfx.ODETerm(decay), dfx.ControlTerm(diffusion, noise))
    y = shard(normal(0, 16), "data")
    solution = dfx.diffeqsolve(terms, getattr(dfx, name)(), 0, 1, 0.05, y, jnp.float32(0.7))
    return solution.ys


@check
def many_paths():
    """a path of an SDE for each key, the keys over devices"""

    def path(key):
        noise = dfx.UnsafeBrownianPath((), key)
        terms = dfx.MultiTerm(dfx.ODETerm(decay_scalar), dfx.ControlTerm(constant, noise))
        adjoint = dfx.DirectAdjoint()
        return dfx.diffeqsolve(terms, dfx.Euler(), 0, 1, 0.1, 1.0, adjoint=adjoint).ys

    keys = shard(jax.random.split(jax.random.key(1), 64), "data")
    return eqx.filter_jit(jax.vmap(path))(keys)


def decay_scalar(t, y, args):
    return -y


def constant(t, y, args):
    return jnp.float32(0.2)


class Field(eqx.Module):
    mlp: eqx.nn.MLP

    def __call__(self, t, y, args):
        return self.mlp(y)


@check
def neural_ode():
    """a neural ODE, trained for five steps, its batch over devices"""
    model = shard(Field(eqx.nn.MLP(2, 2, 16, 1, jnp.tanh, key=jax.random.key(0))))
    starts = shard(normal(0, 32, 2), "data")
    optimiser = optax.adam(1e-2)

    def loss(model, starts):
        def solve(y):
            return dfx.diffeqsolve(
                dfx.ODETerm(model), dfx.Tsit5(), 0, 1, 0.1, y, stepsize_controller=PID
            )

        ends = jax.vmap(lambda y: solve(y).ys[-1])(starts)
        return jnp.mean((ends + starts) ** 2)

    @eqx.filter_jit
    def step(model, moments, starts):
        value, gradient = eqx.filter_value_and_grad(loss)(model, starts)
        updates, moments = optimiser.update(gradient, moments)
        return eqx.apply_updates(model, updates), moments, value

    moments = optimiser.init(eqx.filter(model, eqx.is_array))
    values = []
    for _ in range(5):
        model, moments, value = step(model, moments, starts)
        values.append(value)
    assert values[-1] < values[0]
    return values, model


@check
def events():
    """an event that ends the solve, where a root finder finds it"""

    def fall(t, y, args):
        return (y[1], -9.81 * jnp.ones_like(y[1]))

    event = dfx.Event(lambda t, y, args, **_: y[0].min(), optx.Newton(1e-4, 1e-4))
    y = shard((np.linspace(5, 20, 8, dtype=np.float32), np.zeros(8, np.float32)), "data")
    solution = dfx.diffeqsolve(
        dfx.ODETerm(fall), dfx.Tsit5(), 0, 10, 0.05, y, stepsize_controller=PID, event=event
    )
    assert_close(solution.ts[0], np.sqrt(2 * 5 / 9.81), 1e-2)
    return solution.ts, solution.ys


@check
def interpolations():
    """linear, rectilinear and Hermite coefficients of data over devices, and their values"""
    times, values = jnp.linspace(0, 1, 8), shard(normal(0, 16, 8, 3), "data")
    hermite = eqx.filter_jit(jax.vmap(lambda y: dfx.backward_hermite_coefficients(times, y)))(
        values
    )
    linear = jax.vmap(lambda y: dfx.linear_interpolation(times, y))(values)
    cubic = jax.vmap(lambda c: dfx.CubicInterpolation(times, c).evaluate(0.3))(hermite)
    straight = jax.vmap(lambda y: dfx.LinearInterpolation(times, y).evaluate(0.3))(linear)
    return hermite, cubic, straight


@check
def controlled():
    """a neural CDE along data, the batch over devices"""
    times, paths = jnp.linspace(0, 1, 8), shard(normal(0, 16, 8, 3), "data")
    net = eqx.nn.MLP(4, 12, 8, 1, final_activation=jnp.tanh, key=jax.random.key(0))

    def final(net, path):
        along = dfx.LinearInterpolation(times, path)
        term = dfx.ControlTerm(lambda t, y, net: net(y).reshape(4, 3), along).to_ode()
        return dfx.diffeqsolve(term, dfx.Heun(), 0, 1, 0.1, jnp.ones(4), net).ys[-1]

    return eqx.filter_jit(jax.vmap(final, in_axes=(None, 0)))(net, paths)


@check
def what_fails():
    """too few steps: the result that says so"""
    solution = dfx.diffeqsolve(
        dfx.ODETerm(decay), dfx.Tsit5(), 0, 1, 0.01, state(), 0.5, max_steps=4, throw=False
    )
    assert solution.result == dfx.RESULTS.max_steps_reached
    return solution.stats["num_steps"]
