"""Runs notebooks from a clean kernel and keeps their outputs, which the site shows:
`python tools/run_notebooks.py examples/shard_a_model.ipynb ...`
"""

import os
import sys
from pathlib import Path

import nbclient
import nbformat


def run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    # Leave out the version of Python.
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    # The kernel of this interpreter, not one that the user has registered under the same name.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    for name in sys.argv[1:]:
        run(Path(name))
