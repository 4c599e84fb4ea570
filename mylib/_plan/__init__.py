"""`plan`: a mesh, placements and a policy for a step that is written as for one device."""

from .plan import plan as plan
from .result import Candidate as Candidate, Plan as Plan
from .trace import PlanError as PlanError

# Tracebacks and pickles then show the public names.
for _class in (Candidate, Plan, PlanError):
    _class.__module__ = "mylib"
