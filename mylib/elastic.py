"""Training that goes on when processes are lost, with those that are left."""

from ._training.elastic import (
    RESTART as RESTART,
    Loss as Loss,
    Team as Team,
    initialize as initialize,
)
