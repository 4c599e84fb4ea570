"""Saved values in host memory, where XLA reads wrong ones back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._known_faults import OFFLOADED, VERSION


def checkpoint(run: Callable[..., Any], policy: Any, **options: Any) -> Callable[..., Any]:
    """`jax.checkpoint`. Where offloading is wrong, gradients on GPUs are refused if the policy
    offloads.
    """
    if policy is None or not OFFLOADED.is_on("gpu"):
        return jax.checkpoint(run, policy=policy, **options)
    observed = _observed(policy)

    def marked(*args: Any) -> Any:
        return run(*jax.tree.map(lambda x: _marked_p.bind(x, policy=observed, moves=False), args))

    return jax.checkpoint(marked, policy=observed, **options)


@dataclass
class _ObservedPolicy:
    """A policy, and whether it has offloaded anything: JAX asks when a function is differentiated,
    and that the program is for GPUs is known later.
    """

    policy: Callable[..., Any]
    offloads: bool = field(default=False, compare=False)

    def __call__(self, *args: Any, **params: Any) -> Any:
        answer = self.policy(*args, **params)
        # Other answers are bools, or have no memory kind.
        self.offloads = self.offloads or hasattr(answer, "dst")
        return answer

    def __hash__(self) -> int:
        return hash(self.policy)


# One for each policy: JAX caches traces by policy, and doesn't ask another one that is equal.
_observed = lru_cache(maxsize=256)(_ObservedPolicy)

# Marks, in a program, the inputs of a computation under a policy, and their tangents.
_marked_p = Primitive("under_policy")
_marked_p.def_impl(lambda x, **_: x)
_marked_p.def_abstract_eval(lambda x, **_: x)


def _jvp(primals: Any, tangents: Any, *, policy: _ObservedPolicy, moves: bool) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    return x, _marked_p.bind(ad.instantiate_zeros(tangent), policy=policy, moves=True)


def _batch(xs: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    return _marked_p.bind(*xs, **params), dims[0]


def _lower_for_gpus(ctx: Any, x: Any, *, policy: _ObservedPolicy, moves: bool) -> Any:
    if moves and policy.offloads:
        raise RuntimeError(
            "filter_checkpoint, fully_shard: policy= offloads saved values to host memory. On GPUs "
            f"{OFFLOADED.what} ({OFFLOADED.told}) with jaxlib {VERSION}, and gradients would be "
            "wrong. Use another version of jaxlib, or a policy that doesn't offload"
        )
    return [x]


ad.primitive_jvps[_marked_p] = _jvp
ad.primitive_transposes[_marked_p] = lambda ct, x, **params: [_marked_p.bind(ct, **params)]
batching.primitive_batchers[_marked_p] = _batch
mlir.register_lowering(_marked_p, lambda ctx, x, **_: [x])
mlir.register_lowering(_marked_p, _lower_for_gpus, platform="gpu")
