"""Draws the schedules of pipelines for the site: docs/schedules/*.svg.

python tools/draw_schedules.py
"""

from pathlib import Path

from mylib import mpmd

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "schedules"


def pictures() -> dict[str, str]:
    """The SVG of each file."""
    schedules = {
        "gpipe": mpmd.gpipe(stages=4, microbatches=8),
        "one_f_one_b": mpmd.one_f_one_b(stages=4, microbatches=8),
        "interleaved": mpmd.interleaved(meshes=4, microbatches=8, chunks=2),
        "zero_bubble": mpmd.zero_bubble(stages=4, microbatches=8),
    }
    # A stage of half the size takes half the time; a backward pass takes as long as two forward
    # ones, or as one and a weight pass.
    times = {"interleaved": {"forward": 0.5, "backward": 1.0}}
    return {
        f"{name}.svg": schedule.draw(**times.get(name, {})) + "\n"
        for name, schedule in schedules.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (FOLDER / name).write_text(svg)
        print(f"{FOLDER / name}: {len(svg)} bytes")
