"""`plan`: a mesh, placements and a policy for a step that is written as for one device."""

from .candidate import Candidate as Candidate
from .plan import plan as plan
from .result import Plan as Plan
from .trace import PlanError as PlanError

# Tracebacks and pickles then show the public names.
Candidate.__module__ = "mylib.results"
Plan.__module__ = "mylib"
PlanError.__module__ = "mylib.errors"
