"""Names of other libraries, and `__call__` of users' classes, that are replaced during a call of
ours. docs/changes-in-other-libraries.md lists them.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Makes what stands for the original.
Make = Callable[[Any], object]
_lock = threading.Lock()
# The original object of each replaced name, and by how many calls it is replaced.
_replaced: dict[tuple[object, str], tuple[Any, int]] = {}


@dataclass(frozen=True, eq=False)
class Replacement:
    """A context in which a name of a module or class is `make(its original object)`. Other threads
    see that, too, so it must do in them what the original does.
    """

    owner: object
    name: str
    make: Make

    @property
    def original(self) -> Any:
        with _lock:
            entry = _replaced.get((self.owner, self.name))
            return vars(self.owner)[self.name] if entry is None else entry[0]

    def __enter__(self) -> None:
        key = self.owner, self.name
        with _lock:
            original, count = _replaced.get(key) or (vars(self.owner)[self.name], 0)
            _replaced[key] = original, count + 1
            if not count:
                _set(self.owner, self.name, self.make(original))

    def __exit__(self, *_: object) -> None:
        with _lock:
            original, count = _replaced.pop((self.owner, self.name))
            if count > 1:
                _replaced[self.owner, self.name] = original, count - 1
            else:
                _set(self.owner, self.name, original)


def _set(owner: object, name: str, new: object) -> None:
    # A class may have a metaclass that forbids it, as Equinox's Modules do.
    if isinstance(owner, type):
        type.__setattr__(owner, name, new)
    else:
        setattr(owner, name, new)
