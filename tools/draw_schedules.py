"""Draws the schedules of pipelines for the site: `python tools/draw_schedules.py`."""

from pathlib import Path

from mylib import mpmd

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schedules"
# In pixels: a unit of time, a row, and where rows begin.
_UNIT, _ROW, _LEFT, _TOP = 22, 26, 64, 62
_WHOLE = {"F": "forward", "B": "backward"}
_SPLIT = {"F": "forward", "B": "gradient of the input", "W": "gradient of the weights"}
# Light colours under black text. Those of a mesh's later stages are darker.
_HUES = {"F": 210, "B": 310, "W": 50}
_FAINT, _IDLE = "#555555", "#e8e8e8"


def _fill(kind: str, chunk: int) -> str:
    return f"hsl({_HUES[kind]},70%,{84 - 9 * chunk}%)"


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{style}>{text}</text>\n'


def _bar(x: float, y: float, width: float, height: int, fill: str, style: str = "") -> str:
    where = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height}"'
    return f'<rect {where} fill="{fill}"{style}/>\n'


def draw(schedule: mpmd.Schedule, unit: float = _UNIT) -> str:
    """Time runs to the right, and each mesh has a row. `unit` is the time of a forward pass."""
    lines, outlined = schedule.timeline(), f' stroke="{_FAINT}" stroke-width="0.5"'
    end = max(line[-1][1] for line in lines)
    bottom = _TOP + _ROW * schedule.meshes
    title, notes, *_ = str(schedule).splitlines()
    drawn = _text(14, 26, title, style=' font-size="14" font-weight="bold"')
    drawn += _text(14, 45, notes, style=f' fill="{_FAINT}"')
    for mesh, line in enumerate(lines):
        top = _TOP + _ROW * mesh
        drawn += _text(_LEFT - 8, top + 17, f"mesh {mesh}", "end")
        drawn += _bar(_LEFT, top + 2, unit * end, _ROW - 4, _IDLE)
        for start, stop, (kind, stage, microbatch) in line:
            fill = _fill(kind, stage // schedule.meshes)
            x, width = _LEFT + unit * start, unit * (stop - start)
            drawn += _bar(x, top + 2, width, _ROW - 4, fill, outlined)
            label = f"{kind}{microbatch}" if width >= _UNIT else f"{microbatch}"
            drawn += _text(x + width / 2, top + 17, label, "middle")
    drawn += _text(_LEFT - 8, bottom + 16, "time", "end", f' fill="{_FAINT}"')
    for time in range(0, int(end * unit / _UNIT) + 1, 5):
        x = _LEFT + _UNIT * time
        drawn += _bar(x - 0.5, bottom, 1, 4, _FAINT)
        drawn += _text(x, bottom + 16, f"{time}", "middle", f' fill="{_FAINT}"')
    names = _SPLIT if schedule.splits_backward else _WHOLE
    entries = [(_fill(kind, 0), f"{kind}: {name}") for kind, name in names.items()]
    if schedule.stages > schedule.meshes:
        entries.append((_fill("F", 1), "darker: later stages of a mesh"))
    for i, (fill, name) in enumerate([*entries, (_IDLE, "idle")]):
        drawn += _bar(14 + 190 * i, bottom + 34, 12, 12, fill, outlined)
        drawn += _text(32 + 190 * i, bottom + 44, name)
    width, height = max(_LEFT + unit * end, 190 * (len(entries) + 1)) + 14, bottom + 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" '
        f'width="{width:g}" height="{height}" font-family="sans-serif" font-size="11" '
        f'fill="#111111">\n'
        f"{_bar(0, 0, width, height, '#ffffff')}{drawn}</svg>\n"
    )


def pictures() -> dict[str, str]:
    """The SVG of each file."""
    return {
        "gpipe.svg": draw(mpmd.gpipe(stages=4, microbatches=8)),
        "one_f_one_b.svg": draw(mpmd.one_f_one_b(stages=4, microbatches=8)),
        # A stage of half the size takes half the time.
        "interleaved.svg": draw(mpmd.interleaved(meshes=4, microbatches=8, chunks=2), _UNIT / 2),
        "zero_bubble.svg": draw(mpmd.zero_bubble(stages=4, microbatches=8)),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (FOLDER / name).write_text(svg)
        print(f"{FOLDER / name}: {len(svg)} bytes")
