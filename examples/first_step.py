"""A training script for one device. README has the lines that train it on several."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

model = eqx.nn.MLP(64, 64, width_size=256, depth=2, key=jax.random.key(0))
optim = optax.adam(1e-3)
state = optim.init(eqx.filter(model, eqx.is_array))


@eqx.filter_jit
def step(model, state, x):
    def loss(model):
        return jnp.mean((jax.vmap(model)(x) - x) ** 2)

    value, grads = eqx.filter_value_and_grad(loss)(model)
    updates, state = optim.update(grads, state)
    return eqx.apply_updates(model, updates), state, value


batches = np.random.default_rng(0).normal(size=(5, 32, 64)).astype(np.float32)
for x in batches:
    model, state, value = step(model, state, x)
    print(f"loss {value:.4f}")
