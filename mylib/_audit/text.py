"""Formats sizes and tables."""

from collections.abc import Sequence

from .._sizes import scaled


def readable(size: float) -> str:
    """A size as text: `1.5 MiB`."""
    size, unit = scaled(size)
    if unit in ("GiB", "TiB"):
        return f"{size:.2f} {unit}"
    return f"{size:.0f} {unit}" if unit == "B" or size == int(size) else f"{size:.1f} {unit}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return ["  " + "  ".join(row).rstrip() for row in cells]
