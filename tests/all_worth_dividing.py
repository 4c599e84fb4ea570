"""Runs a script as Python does, with `ReplicatedWarning` also for programs of few products, as
those of small examples are: python tests/all_worth_dividing.py SCRIPT
"""

import runpy
import sys
from pathlib import Path

from mylib._training.advice import replicated

replicated._FEW = 1
del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
