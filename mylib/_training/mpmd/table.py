"""A schedule as text: a row for each mesh, a column for each step."""

from collections.abc import Sequence

from ..._core.text import more
from .simulation import Timed

# How wide a block of columns may be, in characters; and how many blocks are printed.
_WIDTH, _BLOCKS = 90, 12


def table(lines: Sequence[Sequence[Timed]], short: bool) -> str:
    """The lines of a timeline whose actions all take one step. `short` leaves out the stage, for
    meshes that have only one.
    """
    steps = max(round(line[-1][1]) for line in lines)
    cells = [[""] * steps for _ in lines]
    for row, line in zip(cells, lines, strict=True):
        for start, _, action in line:
            row[round(start)] = f"{action.kind}{action.microbatch}" if short else str(action)
    width = max(len(cell) for row in cells for cell in row)
    rows = {f"mesh {mesh}": row for mesh, row in enumerate(cells)}
    margin = max(map(len, rows))
    per_block = max(1, (_WIDTH - margin) // (1 + width))
    starts = range(0, steps, per_block)
    blocks = [
        "\n".join(
            " ".join(
                [name.ljust(margin), *(x.ljust(width) for x in row[start:][:per_block])]
            ).rstrip()
            for name, row in {"step": list(map(str, range(steps))), **rows}.items()
        )
        for start in starts[:_BLOCKS]
    ]
    return "\n\n".join([*blocks, *more(steps - _BLOCKS * per_block, "step")])
