"""Lets processes meet, agree on what to place, and compare the data that they hold."""

from .agreement import (
    agree as agree,
    checksum as checksum,
    described as described,
    raised_in_all as raised_in_all,
    shared_indices as shared_indices,
)
from .alive import about_lost as about_lost, lost as lost
from .calls import CommonCall as CommonCall, call_on as call_on
from .comparing import PROGRAMS as PROGRAMS, comparison as comparison
from .coordination import (
    JUDGED as JUDGED,
    Conclusion as Conclusion,
    Judge as Judge,
    Processes as Processes,
    Series as Series,
    connected as connected,
)
from .differences import (
    Difference as Difference,
    Facts as Facts,
    compare as compare,
    difference_of as difference_of,
    everybodys_faults as everybodys_faults,
    faults_in_full as faults_in_full,
    in_brief as in_brief,
)
from .environment import TIMEOUT as TIMEOUT, patience as patience
from .gate import Gate as Gate, gate_of as gate_of
from .groups import digest as digest, members as members, named as named, text_of as text_of
from .meeting import (
    AbsentError as AbsentError,
    Continued as Continued,
    Meet as Meet,
    everybody as everybody,
    exchange as exchange,
    gather_messages as gather_messages,
    meeting as meeting,
    processes_at as processes_at,
    processes_of as processes_of,
)
from .order import Lane as Lane, TransferError as TransferError, Turn as Turn
from .replicas import check_replicas as check_replicas
from .settings import other_settings as other_settings, transport_of_all as transport_of_all
