"""Numbers of bytes in units that can be read."""


def scaled(count: float) -> tuple[float, str]:
    """Bytes in the largest unit that makes the number at least 1: `(1.5, "MiB")`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return count, unit
        count /= 1024
    return count, "TiB"
