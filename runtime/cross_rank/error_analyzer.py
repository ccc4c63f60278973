"""Who is to blame when a collective raises, as far as this rank alone can tell, and at once.

A launcher ends the other ranks a tenth of a second after the first has died, so there is no time to
ask them. What a rank issues in a step is what it has issued in the step before: a call that never
followed upon the calls before it is this rank's own fault, another one is a peer's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...metrics.catalog import communication
from ...metrics.catalog.labels import OPS
from ...metrics.recorder import Recorder
from ..collectives.call import CollectiveCall
from .call_sequence import describe
from .divergence import context_match_length

logger = logging.getLogger(__name__)

# How many calls must have come in a known order before what breaks the order is called a fault.
LEAST_CONTEXT = 2
MOST_CALLS = 1024  # some milliseconds' work


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """What one rank makes of a collective that raised.

    `expected` is what had followed upon the same calls before, None if what was issued did, or is
    new: then it may be the first evaluation or checkpoint, in which a peer has died.
    """

    rank: int
    role: str
    members: Sequence[int]
    sequence: int
    issued: str
    expected: str | None

    def sentence(self) -> str:
        """Say it in words."""
        call = f"call {self.sequence} of group {self.role}"
        if self.expected is not None:
            return (
                f"rank {self.rank} left the common sequence of collectives at {call}: issued "
                f"{self.issued}, where {self.expected} has followed so far; it skipped or added a "
                "collective"
            )
        others = [rank for rank in self.members if rank != self.rank]
        who = f"rank {others[0]}" if len(others) == 1 else "another rank"
        return (
            f"rank {self.rank} issued {self.issued} at {call}, in its usual order as far as it can "
            f"tell, and it failed: {who} died, or left the common sequence of collectives there"
        )


class CollectiveErrorAnalyzer:
    """Called with a collective that raised, before the exception goes on.

    Args:
        rank: This rank.
        recorder: Where the fault is counted.
        report_now: Tells the others what this rank has issued; waits for that, but not long.
    """

    def __init__(self, rank: int, recorder: Recorder, report_now: Callable[[], None]) -> None:
        self._rank = rank
        self._recorder = recorder
        self._report_now = report_now
        self._done = False

    def __call__(self, failed: CollectiveCall) -> None:
        """Say who is to blame. The first failure only: it brings others with it."""
        if self._done:
            return
        self._done = True
        finding = attribute_failure(self._rank, failed)
        if finding is not None:
            if finding.expected is not None:
                self._recorder.add(communication.COLLECTIVE_MISMATCHES, 1)
            logger.error("%s", finding.sentence())
        self._report_now()


def attribute_failure(rank: int, failed: CollectiveCall) -> Attribution | None:
    """Look at the calls that led to the one that raised; None if nothing can be told."""
    calls = [call for call in failed.group.rank_set.recent.copy() if call.sequence]
    while calls and calls[-1].sequence > failed.sequence:
        calls.pop()  # issued since, while the one that failed was under way
    if len(calls) < 2 or calls[-1] is not failed:
        return None
    *before, last = ((c.op, c.dtype, c.payload_bytes) for c in calls[-MOST_CALLS:])
    known = {what: context_match_length(before, what) for what in set(before)}
    usual = max(known, key=lambda what: known[what])
    surprising = known[usual] > LEAST_CONTEXT and 0 < known.get(last, 0) < known[usual]
    return Attribution(
        rank=rank,
        role=failed.group.role,
        members=failed.group.rank_set.members,
        sequence=failed.sequence,
        issued=_words(last),
        expected=_words(usual) if surprising else None,
    )


def _words(what: tuple[int, object, int]) -> str:
    op, dtype, payload_bytes = what
    return describe(OPS[op], str(dtype).removeprefix("torch."), payload_bytes)
