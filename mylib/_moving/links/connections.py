"""This process's connections to others, by which their arrays come here.

JAX's transfer server gives arrays to whoever asks for them by a number. Unlike transfers of
`jax.device_put`, those can't be mixed up: the numbers are of all that was sent before, too.
"""

import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any

import jax

from ..._core.compat import (
    TransferServer,
    break_connection,
    coordination_client,
    start_transfer_server,
    value_at,
)
from ..processes import (
    TIMEOUT,
    Lane,
    Processes,
    TransferError,
    Turn,
    about_lost,
    comparison,
    connected,
    digest,
    lost,
    other_settings,
    patience,
    transport_of_all,
)
from .division import Device

# Seconds between two looks for a process that has begun no transfer.
_LOOK = 0.05
_LOOPBACK = "127.0.0.1"
_PLACE = "mylib/links/addresses"


class Links:
    """The connections for arrays of one platform (cpu, cuda, ...)."""

    def __init__(self, server: TransferServer, platform: str):
        self._server = server
        self._platform = platform
        self._me = jax.process_index()
        self._connections: dict[int, Any] = {}
        self.client = connected()
        self.client.key_value_set(
            f"{_PLACE}/{platform}/{self._me}", f"{server.address()} {socket.gethostname()}"
        )

    def lane(self, peer: int) -> Lane:
        processes = tuple(sorted((self._me, peer)))
        return comparison().lane(f"arrays on {self._platform}", processes)

    def offer(self, call: Turn, peer: int, pieces: Sequence[jax.Array]) -> None:
        """Gives pieces to a process, when it asks for them."""
        self._server.await_pull(_number(call, self._me, peer), list(pieces))
        call.lane.give(call, tuple(pieces))

    def ask(self, call: Turn, peer: int, pieces: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Pieces of another process. Returns at once: they come when it sends them."""
        arrays = self._connection(peer).pull(_number(call, peer, self._me), list(pieces))
        call.lane.take(call, tuple(arrays))
        return arrays

    def break_off(self, peers: Processes) -> None:
        for peer in {*peers}.intersection(self._connections):
            break_connection(self._connections[peer])

    def _connection(self, peer: int) -> Any:
        if peer not in self._connections:
            self._connections[peer] = self._server.connect(self._address(peer))
        return self._connections[peer]

    def _address(self, peer: int) -> str:
        limit, since = patience(), time.monotonic()
        key = f"{_PLACE}/{self._platform}/{peer}"
        while (value := value_at(self.client, key)) is None:
            if text := other_settings((peer,)):
                raise TransferError(text)
            if peer in lost():
                raise TransferError(f"{about_lost([peer], self._me)} has begun no transfer")
            if time.monotonic() - since > limit:
                raise TransferError(
                    f"process {self._me} waits for arrays of process {peer}, which has begun no "
                    f"transfer within {limit:g} s. All processes must make the same transfers. If "
                    f"one is slow, set {TIMEOUT} to more seconds"
                )
            time.sleep(_LOOK)
        address, host = value.split(" ", 1)
        if address.startswith((_LOOPBACK, "[::1]")) and host != socket.gethostname():
            raise TransferError(
                f"process {peer} is on another host ({host}), and accepts connections of its own "
                "host only. Call mylib.mpmd.initialize(address=...) at the start of each process, "
                "with its address in the network of these hosts"
            )
        return address


# The address at which this process accepts connections.
_host = [_LOOPBACK]
_links: dict[str, Links] = {}
_starting = threading.Lock()


def open_links(address: str) -> None:
    """Sets the address at which other processes reach this one, before its first transfer."""
    if _links:
        raise RuntimeError("the address must be set before the first transfer between processes")
    _host[:] = [_address_of_this_host(address)]


def _address_of_this_host(name: str) -> str:
    """An address of this host: that, or what a name stands for. Given a name, JAX's server would
    accept connections at all addresses.
    """
    try:
        candidates = socket.getaddrinfo(name.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        candidates = []
    for family, *_, place in candidates:
        with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind(place)
            host = str(place[0])
            if not ip_address(host.partition("%")[0]).is_unspecified:
                return f"[{host}]" if family == socket.AF_INET6 else host
    raise ValueError(
        f"{name!r} is not an address of this host: give one at which the others reach it, such as "
        "'10.0.0.7', and '127.0.0.1' if all of them are on this host. '0.0.0.0' would accept "
        "connections at all of its addresses"
    )


def links_for(platform: str) -> Links | None:
    """The links for arrays of a platform; None if JAX has none there, or they are switched off."""
    if transport_of_all() == "program":
        return None
    with _starting:
        links = _links.get(platform)
        if links is None or links.client is not coordination_client():
            server = start_transfer_server(jax.local_devices(backend=platform)[0].client, _host[0])
            if server is None:
                return None
            links = _links[platform] = Links(server, platform)
            comparison().break_off = _break_off
        return links


def _break_off(processes: Processes) -> None:
    for links in _links.values():
        links.break_off(processes)


def get_ready(devices: Iterable[Device]) -> None:
    """Lets other processes find this one, so that their first transfer need not wait for it."""
    if jax.process_count() > 1:
        platforms = {device.platform for device in jax.local_devices()}
        for platform in sorted(platforms.intersection(device.platform for device in devices)):
            links_for(platform)


@contextmanager
def explained_errors(processes: Processes) -> Iterator[None]:
    """Waiting for an array that doesn't come raises JAX's error of a closed connection. This one
    says why it was closed. And nothing is returned if the processes are known to be out of step.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        # The thread that records the reason may be a moment behind.
        until = time.monotonic() + 4.0
        while not comparison().failures and time.monotonic() < until:
            time.sleep(0.05)
        for text in comparison().failures.values():
            raise TransferError(text) from error
        raise
    comparison().check(processes)


def transport(platform: str) -> str:
    """How arrays of a platform travel between processes: `"links"`, or `"program"` without them."""
    return "program" if links_for(platform) is None else "links"


def _number(call: Turn, giver: int, taker: int) -> int:
    """A number that both processes compute alike for the same transfer, and for no other."""
    return int(digest([call.lane.name, giver, taker, call.number, call.digest])[:15], 16)
