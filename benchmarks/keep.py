"""Runs a benchmark and keeps what it prints: `python benchmarks/keep.py placement` writes
`benchmarks/results/placement.md`, with the command and the versions. More arguments are those of
the benchmark. `models.py` and `tests/clients/run.py` write their own tables, by `--write`.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main(name: str, *options: str) -> None:
    command = [str(FOLDER / f"{name}.py"), *options]
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True)
    shown = " ".join(["python", f"benchmarks/{name}.py", *options])
    versions = f"jax {importlib.metadata.version('jax')}, Python {platform.python_version()}"
    text = (
        f"# {name}\n\n`{shown}`\n\n{versions}, {os.cpu_count()} cores.\n\n{done.stdout.strip()}\n"
    )
    (FOLDER / "results" / f"{name}.md").write_text(text, encoding="utf-8")
    print(done.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:] or sys.exit(__doc__))
