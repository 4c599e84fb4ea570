"""How fast a device computes."""

from collections.abc import Mapping
from typing import NamedTuple

from .work import Operation


class Speed(NamedTuple):
    """What a device does in a second: products by dtype, bytes of its memory, and bytes from and to
    its host's. And the shares of the first two that are reached.
    """

    flops: Mapping[str, float]
    memory: float
    host: float
    of_products: float = 1
    of_kernels: float = 1
    of_memory: float = 1

    def seconds(self, operation: Operation) -> tuple[float, float]:
        """The seconds of the products of an operation, and of its memory traffic."""
        products = sum(n / self.flops[dtype] for dtype, n in operation.flops)
        share = self.of_kernels if operation.is_kernel else self.of_products
        return products / share, operation.bytes / self.memory / self.of_memory

    def copying(self, operation: Operation) -> float:
        """The seconds of an operation's copies between the device and its host."""
        return operation.host / self.host
