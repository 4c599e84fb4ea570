"""Refuses policies that offload, where XLA reads offloaded values wrongly."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jaxlib
from jax.ad_checkpoint import Offloadable

from .._placement import current_world

Policy = Callable[..., Any]

# With these XLA:GPU reads what the turns of a scan have saved in host memory in reverse order, and
# gradients are wrong: https://github.com/openxla/xla/pull/46231.
_WRONG = ("0.11.0",)


def refused_where_wrong(policy: Policy | None, version: str = jaxlib.__version__) -> Policy | None:
    """The policy, which raises an error if it offloads on a GPU with such a jaxlib."""
    if policy is None or version not in _WRONG or _platform() != "gpu":
        return policy
    return RefusesOffloading(policy, version)


@dataclass(frozen=True)
class RefusesOffloading:
    # Equal by value, because JAX caches traces by policy.
    policy: Policy
    version: str

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        answer = self.policy(primitive, *avals, **params)
        if isinstance(answer, Offloadable):
            raise NotImplementedError(
                f"with jaxlib {self.version} gradients are wrong on GPUs if a checkpoint's policy "
                "offloads the values of a scan (https://github.com/openxla/xla/pull/46231): use "
                "jaxlib 0.12, or a policy that doesn't offload"
            )
        return answer


def _platform() -> str:
    """That of the devices in force, or else of JAX's default device."""
    devices = current_world().devices
    device = jax.devices()[0] if devices is None else devices.devices.flat[0]
    return device.platform
