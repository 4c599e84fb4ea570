"""`show` and `explain`: where every array of a tree is, or would go, and why."""

from . import html as html
from .explain import Explanation as Explanation, explain as explain
from .moves import Move as Move
from .pictures import bar as bar
from .rows import Row as Row
from .show import Changes as Changes, Overview as Overview, show as show
from .text import show_bytes as show_bytes
