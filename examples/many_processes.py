"""One training script for a laptop, and for every process of a job on many hosts.

    python examples/many_processes.py
    python -m mylib.testing launch -n 2 --devices-per-process 4 examples/many_processes.py
    srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 python examples/many_processes.py
    mpirun -n 4 python examples/many_processes.py

It prints the same losses each time. The model is created sharded, each process places its own part
of a batch, and values that should be equal in all processes are checked.
"""

import os

if "SLURM_NTASKS" in os.environ or "OMPI_COMM_WORLD_SIZE" in os.environ:
    # One of several processes. `launch` sets the variables that SLURM would set.
    import jax

    jax.distributed.initialize()
else:
    # JAX reads these when it starts, so they come before its import: see train.py.
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["NPROC"] = "32"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import mylib
from mylib.rules import fsdp

STEPS = 20
BATCH = 64
OPTIM = optax.adamw(1e-2)

# In each process, over the devices of all processes.
mesh = mylib.make_mesh(data=-1)


def make(key: jax.Array) -> tuple[eqx.nn.MLP, optax.OptState]:
    model = eqx.nn.MLP(8, 1, 128, 2, key=key)
    return model, OPTIM.init(eqx.filter(model, eqx.is_array))


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Stands for a data loader. If batches differ between processes, an error says where."""
    x = np.random.default_rng(step % 4).normal(size=(BATCH, 8)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))


@mylib.filter_jit(
    in_shardings={"x": P("data"), "y": P("data")},
    out_shardings=(fsdp("data"), fsdp("data"), P()),
    mesh=mesh,
    donate="all",
)
def step(model, state, x, y):
    def loss(model):
        # Each layer gathers its weights when it is called.
        model = mylib.fully_shard(model, eqx.nn.Linear, fsdp("data"), mesh=mesh)
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    value, grads = eqx.filter_value_and_grad(loss)(model)
    updates, state = OPTIM.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, value


def main() -> None:
    # Created sharded: no process ever has all of the model.
    model, state = mylib.filter_jit(make, out_shardings=fsdp("data"), mesh=mesh)(jax.random.key(0))
    losses = []
    for i in range(STEPS):
        model, state, loss = step(model, state, *batch(i))
        losses.append(loss)
    # Every few steps, and after a restart: check that all copies are equal.
    mylib.check_replicas((model, state))
    # Every process can read a replicated number; only one needs to print it.
    values = [float(loss) for loss in losses]
    if jax.process_index() == 0:
        print(f"{jax.device_count()} devices in {jax.process_count()} process(es)")
        print("losses", " ".join(f"{value:.4f}" for value in values[::5]), f"{values[-1]:.4f}")


if __name__ == "__main__":
    main()
