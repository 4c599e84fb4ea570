"""How fast a device computes."""

from collections.abc import Mapping
from typing import NamedTuple

from .work import Operation


class Speed(NamedTuple):
    """What a device does in a second: products by dtype, and bytes of its memory. And the shares of
    these that are reached.
    """

    flops: Mapping[str, float]
    memory: float
    of_products: float = 1
    of_kernels: float = 1
    of_memory: float = 1

    def seconds(self, operation: Operation) -> tuple[float, float]:
        """The seconds of the products of an operation, and of its memory traffic."""
        products = sum(n / self.flops[dtype] for dtype, n in operation.flops)
        share = self.of_kernels if operation.is_kernel else self.of_products
        return products / share, operation.bytes / self.memory / self.of_memory
