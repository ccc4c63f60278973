"""Finds which rank caused the error of a collective, from the calls of this rank alone.

A launcher kills the other ranks a tenth of a second after the first rank has died. This time is too
short for an exchange between ranks. The analysis uses that each step issues the same calls as the
previous step. If the failed call never followed the same calls before, this rank has diverged.
Otherwise a peer has failed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from ...metrics.catalog import communication
from ...metrics.catalog.labels import OPS
from ...metrics.recorder import Recorder
from ..collectives.groups import CollectiveCall
from .accounting.call_sequence import describe_call
from .comparison_thread import ComparisonThread
from .divergence import context_match_length

logger = logging.getLogger(__name__)

# Number of calls in a known order that must precede a call for it to count as a divergence.
MIN_CONTEXT = 2
# Maximum number of last calls that are compared. The comparison takes some milliseconds.
MAX_CALLS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The likely cause of a collective's error, from the view of one rank.

    Attributes:
        rank: This rank.
        role: Role of the group.
        members: Ranks of the group.
        sequence: Number of the failed call.
        issued: The failed call.
        expected: If this rank has diverged, the call that earlier followed the same calls. None if
            a peer has died: the failed call is then the expected call, or a new call, such as in
            the first evaluation or checkpoint.
    """

    rank: int
    role: str
    members: Sequence[int]
    sequence: int
    issued: str
    expected: str | None

    def message(self) -> str:
        """Format the attribution for the log."""
        call = f"call {self.sequence} of group {self.role}"
        if self.expected is not None:
            return (
                f"rank {self.rank} diverged from the common sequence of collectives at {call}: "
                f"issued {self.issued}, where {self.expected} has followed so far; it skipped or "
                "added a collective"
            )
        others = [rank for rank in self.members if rank != self.rank]
        who = f"rank {others[0]}" if len(others) == 1 else "another rank"
        return (
            f"{self.issued} failed on rank {self.rank} at {call}, in its usual order: "
            f"{who} died, or diverged from the common sequence of collectives there"
        )


class CollectiveErrorAnalyzer:
    """Logs the likely cause when a collective raises, before the exception propagates.

    Args:
        rank: This rank.
        recorder: Counts the divergences.
        thread: Reports at once which calls this rank has issued.
    """

    def __init__(self, rank: int, recorder: Recorder, thread: ComparisonThread) -> None:
        self._rank = rank
        self._recorder = recorder
        self._thread = thread
        self._done = False

    def analyze(self, failed: CollectiveCall) -> None:
        """Log the likely cause of the first error. Later errors are its consequences."""
        if self._done:
            return
        self._done = True
        attribution = attribute_failure(self._rank, failed)
        if attribution is not None:
            if attribution.expected is not None:
                self._recorder.add(communication.COLLECTIVE_MISMATCHES, 1)
            logger.error("%s", attribution.message())
        self._thread.report_now()


def attribute_failure(rank: int, failed: CollectiveCall) -> Attribution | None:
    """Compare the failed call with earlier calls in the same place. None if there are too few."""
    calls = [call for call in failed.group.rank_set.recent.copy() if call.sequence]
    while calls and calls[-1].sequence > failed.sequence:
        calls.pop()  # issued while the failed call was in flight
    if len(calls) < 2 or calls[-1] is not failed:
        return None
    *before, last = ((c.op, c.dtype, c.payload_bytes) for c in calls[-MAX_CALLS:])
    lengths = {call: context_match_length(before, call) for call in set(before)}
    usual = max(lengths, key=lambda call: lengths[call])
    has_diverged = lengths[usual] > MIN_CONTEXT and 0 < lengths.get(last, 0) < lengths[usual]
    return Attribution(
        rank=rank,
        role=failed.group.role,
        members=failed.group.rank_set.members,
        sequence=failed.sequence,
        issued=_describe(last),
        expected=_describe(usual) if has_diverged else None,
    )


def _describe(call: tuple[int, object, int]) -> str:
    op, dtype, payload_bytes = call
    return describe_call(OPS[op], str(dtype).removeprefix("torch."), payload_bytes)
