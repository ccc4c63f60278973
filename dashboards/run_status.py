"""The state of a run as a number, with its name; recorded for dashboards.

An active state is below `FIRST_END`. A run with an active state whose ranks no longer answer has
vanished: it ended without a final scrape.
"""

from __future__ import annotations

from enum import IntEnum


class RunStatus(IntEnum):
    """The states, of which Prometheus stores the number."""

    TRAINING = 1
    STARTING = 2
    STALLED = 3
    HANGING = 4
    COMPLETED = 10
    INTERRUPTED = 11
    PEER_FAILED = 12
    HANG_ABORT = 13
    EXCEPTION = 14
    OUT_OF_MEMORY = 15
    ENDED = 16
    VANISHED = 20


FIRST_END = RunStatus.COMPLETED
# The reasons of ranks for their end, by the state of the run. If ranks name several, the last here
# counts: a rank that lost a peer does not know why the peer failed.
STATE_BY_REASON = {
    "completed": RunStatus.COMPLETED,
    "interrupted": RunStatus.INTERRUPTED,
    "peer_failed": RunStatus.PEER_FAILED,
    "hang_abort": RunStatus.HANG_ABORT,
    "exception": RunStatus.EXCEPTION,
    "out_of_memory": RunStatus.OUT_OF_MEMORY,
}
