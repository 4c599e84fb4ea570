"""Goes on with the processes that are left when some are lost."""

from .joining import RESTART as RESTART, initialize as initialize
from .replicas import Loss as Loss
from .team import Team as Team

# Tracebacks and pickles then show the public names.
for _class in (Loss, Team):
    _class.__module__ = "mylib.elastic"
