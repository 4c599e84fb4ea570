"""`show` and `explain`: where every array of a tree is, or would go, and why."""

# No module has the name of a function: the API pages would show the module.
from . import html as html
from .explanation import Explanation as Explanation, explain as explain
from .fold import united as united
from .moves import Move as Move
from .overview import Changes as Changes, Overview as Overview, show as show
from .rows import Row as Row, show_place as show_place
from .text import (
    columns as columns,
    for_stdout as for_stdout,
    paint_for_stdout as paint_for_stdout,
    width_of_stdout as width_of_stdout,
    width_of_table as width_of_table,
    wrapped as wrapped,
)

# Tracebacks and pickles then show the public names.
for _class in (Changes, Explanation, Move, Overview, Row):
    _class.__module__ = "mylib.results"
