"""Lets processes meet, agree on what to place, and compare the data that they hold."""

from .agreement import (
    agree as agree,
    checksum as checksum,
    described as described,
    one_call as one_call,
    owners as owners,
    processes_of_call as processes_of_call,
    raised_in_all as raised_in_all,
    shared_indices as shared_indices,
)
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
from .environment import TIMEOUT as TIMEOUT, environment as environment, patience as patience
from .groups import (
    digest as digest,
    members as members,
    named as named,
    text_of as text_of,
)
from .meeting import (
    AbsentError as AbsentError,
    Meet as Meet,
    everybody as everybody,
    exchange as exchange,
    gather_messages as gather_messages,
    meeting as meeting,
    on_the_way as on_the_way,
    processes_of as processes_of,
)
from .order import Lane as Lane, TransferError as TransferError, Turn as Turn
from .replicas import check_replicas as check_replicas
