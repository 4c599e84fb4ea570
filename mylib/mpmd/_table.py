"""A schedule as text: a row for each mesh, a column for each step."""

from collections.abc import Sequence

from ._simulation import Timed

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
    names = [f"mesh {mesh}" for mesh in range(len(lines))]
    margin = max(map(len, names))
    column = 1 + max(len(cell) for row in cells for cell in row)
    per_block = max(1, (_WIDTH - margin) // column)
    starts = range(0, steps, per_block)
    blocks: list[str] = []
    for start in starts[:_BLOCKS]:
        heads = [str(step) for step in range(start, min(start + per_block, steps))]
        body = [row[start : start + per_block] for row in cells]
        texts = zip(["step", *names], [heads, *body], strict=True)
        blocks.append("\n".join(_line(name.ljust(margin), row, column) for name, row in texts))
    if len(starts) > _BLOCKS:
        blocks.append(f"and {steps - _BLOCKS * per_block} more steps")
    return "\n\n".join(blocks)


def _line(name: str, row: Sequence[str], column: int) -> str:
    return (name + "".join(f" {cell:<{column - 1}}" for cell in row)).rstrip()
