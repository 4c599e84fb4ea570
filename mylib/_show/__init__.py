"""`show` and `explain`: where every array of a tree is, or would go, and why."""

# No module has the name of a function: the API pages would show the module.
from . import html as html
from .explanation import Explanation as Explanation, explain as explain
from .moves import Move as Move
from .overview import Changes as Changes, Overview as Overview, show as show
from .pictures import bar as bar, stacked as stacked
from .rows import Row as Row, show_place as show_place
from .text import (
    BOLD as BOLD,
    columns as columns,
    for_stdout as for_stdout,
    paint_for_stdout as paint_for_stdout,
    wrapped as wrapped,
)

# Tracebacks and pickles then show the public names.
for _class in (Changes, Explanation, Move, Overview, Row):
    _class.__module__ = "mylib"
