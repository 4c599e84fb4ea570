"""Saved values in host memory, where XLA reads wrong ones back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from .._known_faults import OFFLOADED, VERSION


def checkpoint(run: Callable[..., Any], policy: Any, **options: Any) -> Callable[..., Any]:
    """`jax.checkpoint`. With GPUs on which offloading is wrong, a policy may not offload."""
    if policy is not None and OFFLOADED.is_on(jax.default_backend()):
        policy = _Refusing(policy)
    return jax.checkpoint(run, policy=policy, **options)


@dataclass(frozen=True)
class _Refusing:
    """A policy that raises an error once it offloads: JAX asks when a function is differentiated.
    Equal by value, because JAX caches traces by policy.
    """

    policy: Callable[..., Any]

    def __call__(self, *args: Any, **params: Any) -> Any:
        answer = self.policy(*args, **params)
        # Other answers are bools, or have no memory kind.
        if hasattr(answer, "dst"):
            raise RuntimeError(
                "filter_checkpoint, fully_shard: policy= offloads saved values to host memory. On "
                f"GPUs {OFFLOADED.what} ({OFFLOADED.told}) with jaxlib {VERSION}, and gradients "
                "would be wrong. Use another version of jaxlib, or a policy that doesn't offload"
            )
        return answer
