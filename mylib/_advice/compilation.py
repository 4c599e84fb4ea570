"""What advice is about."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from .._tree import Arrays


@dataclass(frozen=True, eq=False)
class Compilation:
    """A call of the function `name` that has compiled a program, which was given `arrays`."""

    name: str
    # Finding the arrays' names takes time, and seldom are they needed.
    find_names: Callable[[], list[str]]
    arrays: Arrays
    returned: Arrays

    @cached_property
    def names(self) -> list[str]:
        return self.find_names()
