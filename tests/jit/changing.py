"""Static arguments that can change in place."""

import dataclasses
from typing import Any


@dataclasses.dataclass(unsafe_hash=True)
class Config:
    rate: Any


@dataclasses.dataclass(frozen=True)
class Holder:
    config: Any
    name: str = "a"
