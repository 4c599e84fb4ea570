"""A program's placements and collectives, as a text file to compare with."""

import difflib
from collections import Counter
from pathlib import Path

from .attribution import UNKNOWN
from .groups import in_words
from .report import Report
from .table import over


def snapshot_of(report: Report) -> str:
    """The placements of the arguments and the bytes of the collectives, sorted. The number of
    collectives, their names and their order are left out, as they change between versions of JAX.
    """
    lines = [
        f"mesh: {in_words(report.axes) or 'unknown'}",
        "",
        "placements, with each device's part:",
    ]
    for p in sorted(report.parameters, key=lambda p: p.path):
        divided = "not known" if p.axes is None else ", ".join(p.axes) or "whole"
        lines.append(f"  {p.path}: {p.dtype}{list(p.shape)} {divided}")
    lines += ["", "communicated in a call, in bytes:"]
    sums: Counter[str] = Counter()
    unknown: set[str] = set()
    for c in report.collectives:
        # A phase that is unknown would change with the compiler's names.
        phase = "" if c.phase in ("", UNKNOWN) else f", {c.phase}"
        name = f"{c.kind} over {over(c)}{phase}"
        sums[name] += c.bytes * (c.times or 1)  # of a loop of unknown length, in one turn
        if c.times is None:
            unknown.add(name)
    for name, size in sorted(sums.items()):
        lines.append(f"  {name}: {size}" + (" in each iteration" if name in unknown else ""))
    if not sums:
        lines.append("  nothing")
    return "\n".join(lines) + "\n"


def check_snapshot(report: Report, path: Path, *, update: bool) -> None:
    """Compares a report with the snapshot in a file, or writes it there. The pytest fixture
    `program_snapshot` calls it.

    **Arguments:**

    - `report`: the result of `mylib.audit`.
    - `path`: the path of the file.
    - `update`: whether to write the file.

    **Raises:**

    `AssertionError` with the lines that differ.

    !!! Example

        ```python
        import pathlib, tempfile

        report = mylib.audit(jnp.sin, jnp.ones(3))
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "sin.txt")
            mylib.testing.check_snapshot(report, path, update=True)
            mylib.testing.check_snapshot(report, path, update=False)
        ```
    """
    __tracebackhide__ = True
    text = snapshot_of(report)
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    if not path.exists():
        raise AssertionError(f"there is no {path}: run pytest with --snapshot-update to write it")
    before = path.read_text()
    if before != text:
        lines = difflib.unified_diff(
            before.splitlines(), text.splitlines(), "snapshot", "now", lineterm="", n=0
        )
        changed = "\n".join(line for line in lines if not line.startswith("@@"))
        raise AssertionError(
            f"{report.name} is not as in {path}:\n{changed}\n\nIf that is meant, run pytest with "
            "--snapshot-update"
        )
