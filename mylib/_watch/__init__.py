"""`watch`: who is stuck, in one process or in many, and why."""

from .news import Bulletin as Bulletin
from .record import Record as Record
from .watch import Watching as Watching, watch as watch
