"""How full the devices are, the fullest first."""

from collections.abc import Mapping
from typing import Any

from .._text import counted, show_bytes
from .text import BLUE, Paint, show_devices

# The most lines, and the characters of the longest bar.
_LINES, _BAR = 12, 24


def load_groups(bytes_by_device: Mapping[Any, int]) -> list[tuple[int, list[Any]]]:
    """The devices with the same number of bytes together; nothing if all have the same."""
    groups: dict[int, list[Any]] = {}
    for device, nbytes in bytes_by_device.items():
        groups.setdefault(nbytes, []).append(device)
    return sorted(groups.items(), key=lambda x: -x[0]) if len(groups) > 1 else []


def load_lines(bytes_by_device: Mapping[Any, int], paint: Paint) -> list[str]:
    groups = load_groups(bytes_by_device)
    if not groups:
        return []
    most = groups[0][0]
    lines = ["devices by bytes:"]
    for nbytes, devices in groups[:_LINES]:
        bar = "█" * max(1, round(_BAR * nbytes / most)) if nbytes else ""
        padded = paint(bar, BLUE) + " " * (_BAR - len(bar))
        lines.append(f"{show_bytes(nbytes):>10}  {padded}  {show_devices(devices)}")
    left = sum(len(devices) for _, devices in groups[_LINES:])
    return lines + [f"            and {counted(left, 'device')} with less"] * bool(left)
