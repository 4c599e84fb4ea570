"""Solvers that stop when they have converged, on eight devices at once.

The first is Newton's method, with different equations on each device. Each device runs as many
iterations as it needs. The second is the Gauss-Newton method, one fit to data that are sharded over
the devices. An iteration sums over all devices, so all must run the same number of iterations: each
checks whether its part of the data still fits badly, and all continue while any does.

With `jax.lax.while_loop` the first has a wrong type (JAX assumes that the count is the same on all
devices), and the second waits for ever. The devices are simulated on the CPU.
"""

import os

# JAX reads these when it starts, so they come before its import. NPROC is the number of threads
# that the simulated devices share: JAX 0.10 needs one per device, however few cores there are.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["NPROC"] = "32"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

import mylib
from mylib.loops import while_loop

MESH = mylib.make_mesh(data=8)


@mylib.filter_shard_map(mesh=MESH, in_specs=P("data"), out_specs=P("data"))
def kepler(
    mean: Float[Array, " orbits"], eccentricity: Float[Array, " orbits"]
) -> tuple[Float[Array, " orbits"], Int[Array, " devices"]]:
    """The positions E of planets, E - e sin E = M, and the number of iterations on each device."""

    def error(position: Float[Array, " orbits"]) -> Float[Array, " orbits"]:
        return position - eccentricity * jnp.sin(position) - mean

    def turn(state: tuple[Float[Array, " orbits"], int]) -> tuple[Float[Array, " orbits"], int]:
        position, turns = state
        slope = 1 - eccentricity * jnp.cos(position)
        return position - error(position) / slope, turns + 1

    position, turns = while_loop(
        lambda state: jnp.max(jnp.abs(error(state[0]))) > 1e-5, turn, (mean, 0)
    )
    return position, turns[None]


def curve(params: Float[Array, "2"], x: Float[Array, " points"]) -> Float[Array, " points"]:
    return params[0] * jnp.exp(-params[1] * x)


@mylib.filter_shard_map(mesh=MESH, in_specs=(P(), P("data"), P("data")), out_specs=P())
def fit(
    params: Float[Array, "2"], x: Float[Array, " points"], y: Float[Array, " points"]
) -> tuple[Float[Array, "2"], Int[Array, ""]]:
    """The parameters of the curve through the points, and the number of iterations."""

    def is_bad(state: tuple[Float[Array, "2"], int]) -> Array:
        return jnp.max(jnp.abs(curve(state[0], x) - y)) > 1e-3

    def turn(state: tuple[Float[Array, "2"], int]) -> tuple[Float[Array, "2"], int]:
        params, turns = state
        error = curve(params, x) - y
        slope = jax.jacfwd(curve)(params, x)
        # Sums over the points of all devices.
        matrix, vector = lax.psum((slope.T @ slope, slope.T @ error), "data")
        return params - jnp.linalg.solve(matrix, vector), turns + 1

    return while_loop(is_bad, turn, (params, 0), sync="any")


def main() -> None:
    mean = np.linspace(0.1, 3.0, 64, dtype=np.float32)
    eccentricity = np.linspace(0.0, 0.97, 64, dtype=np.float32)
    position, turns = kepler(mean, eccentricity)
    np.testing.assert_allclose(position - eccentricity * np.sin(position), mean, atol=2e-5)
    print("Kepler's equation, turns of Newton's method on each device:", turns.tolist())

    x = np.linspace(0.0, 4.0, 64, dtype=np.float32)
    y = 2.5 * np.exp(-0.7 * x)
    params, turns = fit(jnp.asarray([2.0, 0.5]), x, y)
    np.testing.assert_allclose(params, [2.5, 0.7], rtol=1e-2)
    print(f"The curve is {params[0]:.3f} exp(-{params[1]:.3f} x), after {turns} turns of all.")


if __name__ == "__main__":
    main()
