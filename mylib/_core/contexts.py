"""Parts of JAX's key for traces: a function that is traced with other ones is traced anew.

All are made here, at `import mylib`: JAX would compile again whatever it compiled before one is
made.
"""

from typing import Any

import jax

# True if placements are ignored: `mylib.testing.verify` runs a step as one device would.
on_one_device: Any = jax.make_user_context(False)
# True if our `dtype=`, `reduce_dtype=` and `send_dtype=` are ignored.
in_own_dtypes: Any = jax.make_user_context(False)
# True in the loss of `accumulate`, whose weights are gathered.
are_gathered: Any = jax.make_user_context(False)
# What a layer of `fully_shard` knows of how its kernels are split; None outside of layers.
kernel_axes: Any = jax.make_user_context(None)
# Where the plan of a step keeps weights, and its mesh, while the step runs under it.
plan_in_force: Any = jax.make_user_context(None)
# The number of the trace in which `mylib.plan` replaces calls in this thread, or None. JAX keeps
# such keys, so it must not be the calls themselves, which hold tracers.
planned_trace: Any = jax.make_user_context(None)
# Who raises the errors of checks in a program: see `_training/jit/error_checks.py`.
calling: Any = jax.make_user_context(None)
