"""How fast a device computes: the formulas of estimates and of prices, and their constants."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..machines import CHIPS, Chip
from .links import stated
from .work import Operation


class Speed(NamedTuple):
    """What a device does in a second: products by dtype, bytes of its memory, and bytes from and to
    its host's. And the shares of the first two that are reached. Numbers may be arrays.
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
        return products / share, self.moving(operation.bytes)

    def moving(self, nbytes: Any) -> Any:
        """The seconds in which bytes are read from memory, or written there."""
        return nbytes / self.memory / self.of_memory

    def multiplying(self, seconds: Any, nbytes: Any) -> Any:
        """The seconds of products that take so long at the data sheet's rates, and read these
        bytes: of the two, which happen at the same time, the longer.
        """
        return np.maximum(seconds / self.of_products, self.moving(nbytes))

    def copying(self, nbytes: Any) -> Any:
        """The seconds of copies between the device and its host."""
        return nbytes / self.host


def speeds(chip: Chip, dtypes: Iterable[str]) -> tuple[Speed, Speed, list[str]]:
    """The speed of the data sheet for products of these dtypes, the part of it that is reached, and
    what is assumed. An operation whose rate is unknown costs only what it reads and writes.
    """
    rates: dict[str, float] = {}
    assumed: list[str] = []
    for dtype in dtypes:
        instead, rate = _rate(chip, dtype)
        # Data sheets are of chips, and some chips are two devices.
        known = math.inf if rate is None else stated(chip, f"rate of {dtype}", rate)
        rates[dtype] = known / chip.devices
        if rate is None:
            assumed.append(f"products of {dtype}, without a rate, cost only their memory")
        elif instead != dtype:
            assumed.append(f"{dtype} is multiplied as {instead}")
    if rates and all(map(math.isinf, rates.values())):
        stated(chip, f"rate of {', '.join(rates)}", None)
    memory = stated(chip, "memory bandwidth", chip.memory_bandwidth)
    host = math.inf if chip.host_bandwidth is None else chip.host_bandwidth
    ideal = Speed(rates, memory / chip.devices, host / chip.devices)
    like = CHIPS[_LIKE.get(chip.platform, "h100")]
    missing = [name for name in _SHARES if name not in chip.reached]
    if missing:
        assumed.append(
            f"the shares that {', '.join(missing)} reach on {chip.name} are not known (`reached` "
            f"in mylib.machines.Chip), and are those of {like.name}"
        )
    shares = {f"of_{name}": chip.reached.get(name, like.reached[name]) for name in _SHARES}
    return ideal, ideal._replace(**shares), assumed


def slowest(chip: Chip, real: Speed) -> Speed:
    """With the lowest share that is known of any chip in the place of one that is not."""
    known = [x.reached for x in CHIPS.values()]
    missing = [name for name in _SHARES if name not in chip.reached]
    return real._replace(**{f"of_{n}": min(x[n] for x in known if n in x) for n in missing})


_SHARES = "products", "kernels", "memory"
# The chip whose shares stand for unknown ones: the newest with which published steps were compared.
_LIKE = {"tpu": "v6e"}


# The dtype that a chip multiplies instead, if it has no rate for one.
_AS = {
    "float8_e5m2": "float8_e4m3fn",
    "float8_e4m3fn": "bfloat16",
    "int4": "int8",
    "uint8": "int8",
    "int8": "bfloat16",
    "float16": "bfloat16",
}


def _rate(chip: Chip, dtype: str) -> tuple[str, float | None]:
    """The dtype that a chip multiplies instead of this one, and operations per second."""
    while dtype not in chip.flops:
        # JAX's default on TPUs is to multiply float32 as bfloat16.
        instead = "bfloat16" if (chip.platform, dtype) == ("tpu", "float32") else _AS.get(dtype)
        if instead is None:
            return dtype, None
        dtype = instead
    return dtype, chip.flops[dtype]
