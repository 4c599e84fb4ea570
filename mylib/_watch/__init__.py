"""`watch`: who is stuck, in one process or in many, and why."""

from .watch import Watching as Watching, watch as watch
