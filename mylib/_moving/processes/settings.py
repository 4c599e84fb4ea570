"""Settings that must be the same in all processes. Each tells its own before its first transfer."""

import functools

from ..._core.compat import CoordinationClient, index_of_process, set_once, values_by_process
from .coordination import Processes, connected
from .environment import environment
from .groups import named
from .order import TransferError

_SETTINGS = "mylib/transports"


def transport_of_all() -> str:
    """How arrays travel between processes. Raises if others differ, and soon in those, too."""
    try:
        transport = environment().transport
    except ValueError as error:
        set_once(connected(), f"{_SETTINGS}/{index_of_process()}", str(error))
        raise
    _tell(connected(), f"MYLIB_TRANSPORT is {transport!r}")
    return transport


@functools.cache
def _tell(client: CoordinationClient, setting: str) -> None:
    set_once(client, f"{_SETTINGS}/{index_of_process()}", setting)
    if text := other_settings((index_of_process(),)):
        raise TransferError(text)


def other_settings(processes: Processes) -> str | None:
    """The error if one of these processes has told other settings than any other one."""
    told = values_by_process(connected(), _SETTINGS)
    who: dict[str, list[int]] = {}
    for index, setting in sorted(told.items()):
        who.setdefault(setting, []).append(index)
    if len(who) < 2 or told.keys().isdisjoint(processes):
        return None
    texts = "; ".join(f"{named(indices)}: {setting}" for setting, indices in who.items())
    return f"processes have different settings, so no array can travel between them. {texts}"
