"""Lineax: linear solves of operators over devices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from common import assert_close, check, check_each, normal, positive, shard, well_conditioned

OWN = "lineax"
SIZE = 32


def solved(operator, vector, solver, matrix):
    solution = lx.linear_solve(operator, vector, solver, throw=False)
    assert solution.result == lx.RESULTS.successful
    assert_close(matrix @ np.asarray(solution.value), np.asarray(vector), 1e-2)
    return solution.value


@check_each(["LU", "QR", "SVD", "GMRES", "BiCGStab", "AutoLinearSolver"])
def square(name):
    """a square matrix, its rows over devices: LU, QR, SVD, GMRES, BiCGStab, AutoLinearSolver"""
    options = {"GMRES": (1e-5, 1e-5), "BiCGStab": (1e-3, 1e-3), "AutoLinearSolver": (True,)}
    solver = getattr(lx, name)(*options.get(name, ()))
    matrix = well_conditioned(0, SIZE)
    operator = lx.MatrixLinearOperator(shard(matrix, "data"))
    return solved(operator, shard(normal(1, SIZE), "data"), solver, matrix)


@check_each(["CG", "Cholesky", "AutoLinearSolver"])
def positive_definite(name):
    """a positive definite matrix, its rows over devices: CG, Cholesky, AutoLinearSolver"""
    options = {"CG": (1e-5, 1e-5), "AutoLinearSolver": (True,)}
    solver = getattr(lx, name)(*options.get(name, ()))
    matrix = positive(0, SIZE)
    tag = lx.positive_semidefinite_tag
    operator = lx.MatrixLinearOperator(shard(matrix, "data"), tag)
    return solved(operator, shard(normal(1, SIZE), "data"), solver, matrix)


@check
def least_squares():
    """a tall matrix: QR, SVD and the normal equations by CG"""
    matrix, vector = normal(0, 64, 8), normal(1, 64)
    operator = lx.MatrixLinearOperator(shard(matrix, "data"))
    solvers = [lx.QR(), lx.SVD(), lx.NormalCG(1e-5, 1e-5) if hasattr(lx, "NormalCG") else lx.SVD()]
    expected = np.linalg.lstsq(matrix, vector, rcond=None)[0]
    results = []
    for solver in solvers:
        results.append(lx.linear_solve(operator, shard(vector, "data"), solver).value)
        assert_close(results[-1], expected, 1e-2)
    return results


@check
def structured():
    """diagonal, tridiagonal and triangular operators"""
    diagonal, lower, upper = 3 + abs(normal(0, SIZE)), normal(1, SIZE - 1), normal(2, SIZE - 1)
    vector = shard(normal(3, SIZE), "data")
    dense = np.diag(diagonal) + np.diag(lower, -1) + np.diag(upper, 1)
    triangle = np.tril(well_conditioned(4, SIZE))
    tridiagonal = lx.TridiagonalLinearOperator(*map(jnp.asarray, (diagonal, lower, upper)))
    return (
        solved(
            lx.DiagonalLinearOperator(shard(diagonal, "data")),
            vector,
            lx.Diagonal(),
            np.diag(diagonal),
        ),
        solved(tridiagonal, vector, lx.Tridiagonal(), dense),
        solved(
            lx.MatrixLinearOperator(shard(triangle, "data"), lx.lower_triangular_tag),
            vector,
            lx.Triangular(),
            triangle,
        ),
    )


@check
def operator_that_is_a_function():
    """a stencil that is never a matrix, by CG"""

    def stencil(x):
        return 4 * x - jnp.roll(x, 1) - jnp.roll(x, -1)

    vector = shard(normal(0, SIZE), "data")
    operator = lx.FunctionLinearOperator(
        stencil, jax.eval_shape(lambda: vector), lx.positive_semidefinite_tag
    )
    return solved(operator, vector, lx.CG(1e-5, 1e-5), np.asarray(operator.as_matrix()))


@check
def newton_step():
    """JacobianLinearOperator: a step of Newton's method inside filter_jit"""

    def field(x, _):
        return x**3 + 2 * x - jnp.roll(x, 1) / 2

    @eqx.filter_jit
    def step(x):
        operator = lx.JacobianLinearOperator(field, x)
        return x - lx.linear_solve(operator, field(x, None), lx.LU()).value

    x = shard(normal(0, SIZE), "data")
    for _ in range(6):
        x = step(x)
    assert_close(field(x, None), np.zeros(SIZE), 1e-4)
    return x


@check
def many_right_hand_sides():
    """vmap over right-hand sides that lie over devices"""
    matrix, vectors = well_conditioned(0, SIZE), normal(1, 16, SIZE)
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix))
    solve = eqx.filter_jit(jax.vmap(lambda v: lx.linear_solve(operator, v).value))
    results = solve(shard(vectors, "data"))
    assert_close(np.asarray(results) @ matrix.T, vectors, 1e-2)
    return results


@check
def derivatives():
    """gradient, jvp and second derivative through a solve"""
    vector = shard(normal(1, SIZE), "data")

    def value(matrix):
        operator = lx.MatrixLinearOperator(matrix)
        return jnp.sum(lx.linear_solve(operator, vector, lx.LU()).value ** 2)

    matrix = shard(well_conditioned(0, SIZE), "data")
    along = shard(normal(2, SIZE, SIZE), "data")
    gradient = eqx.filter_grad(value)(matrix)
    _, slope = jax.jvp(value, (matrix,), (along,))
    assert_close(slope, jnp.sum(gradient * along), 1e-2)
    _, second = eqx.filter_jit(eqx.filter_jvp)(jax.grad(value), (matrix,), (along,))
    return gradient, slope, second


@check
def trees_as_vectors():
    """operators and vectors that are PyTrees"""
    blocks = {"a": {"a": positive(0, 8), "b": np.zeros((8, 8), np.float32)}}
    blocks["b"] = {"a": np.zeros((8, 8), np.float32), "b": positive(1, 8)}
    vector = {"a": normal(2, 8), "b": normal(3, 8)}
    structure = jax.eval_shape(lambda: vector)
    operator = lx.PyTreeLinearOperator(shard(blocks, "data"), structure)
    solution = lx.linear_solve(operator, shard(vector, "data"), lx.GMRES(1e-5, 1e-5)).value
    assert_close(blocks["a"]["a"] @ np.asarray(solution["a"]), vector["a"], 1e-2)
    return solution


@check
def what_fails():
    """too few steps: the result that says so, and the error"""
    operator = lx.MatrixLinearOperator(shard(well_conditioned(0, SIZE), "data"))
    vector, solver = jnp.asarray(normal(1, SIZE)), lx.BiCGStab(1e-6, 1e-6, max_steps=1)
    solution = lx.linear_solve(operator, vector, solver, throw=False)
    assert solution.result == lx.RESULTS.max_steps_reached
    try:
        # On one device: see "What doesn't work" of error_if.
        alone = lx.MatrixLinearOperator(jnp.asarray(well_conditioned(0, SIZE)))
        jax.block_until_ready(lx.linear_solve(alone, vector, solver).value)
    except Exception as error:
        assert "maximum number of" in str(error), str(error)
        return solution.value, type(error).__name__
    raise AssertionError("no error")
