"""The programs of examples/models, as modules."""

import importlib
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "models"
TRAINED = ["llama", "experts", "adapters", "vit", "state_space", "long_context", "flash"]
# Those with a step of their own.
OTHERS = ["unet", "gan"]
PROGRAMS = [*TRAINED, *OTHERS, "generate"]


def program(name):
    """One of the programs as a module; `running` has been told that devices are simulated."""
    assert "device_count" in os.environ["XLA_FLAGS"]
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))


def size_of(name, size="SMALL"):
    return getattr(program(name), size, None) or getattr(program("llama"), size)


def task_of(name, how=None, size="SMALL"):
    return program(name).task(size_of(name, size), **(how.options if how else {}))
