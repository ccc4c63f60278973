"""Finds which rank caused the error of a collective, from the calls of this rank alone.

A launcher kills the other ranks a tenth of a second after the first rank has died. This time is too
short for an exchange between ranks. The analysis uses that each step issues the same calls as the
previous step. If another call has always followed the same calls, and the failed call is one of the
same step, this rank has diverged. Otherwise a peer has failed, as far as is known: the first call
of an evaluation, or of a batch of another size, does not follow the usual calls either.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ...metrics.catalog import communication
from ...metrics.catalog.labels import OPS
from ...metrics.recorder import Recorder
from ..collectives.groups import CollectiveCall
from ..common.phase_timer import NON_TRAINING
from .accounting.call_sequence import UNEVEN, describe_call
from .comparison_thread import ComparisonThread
from .divergence import MAX_CONTEXT, context_match_length

Call = tuple[int, Hashable, int, int]  # operation, data type, size and phase

logger = logging.getLogger(__name__)

# Number of calls in a known order that must precede a call for it to count as a divergence.
MIN_CONTEXT = 2
# Number of times that the same call must have followed those calls.
MIN_TIMES = 3
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
        expected: If this rank has diverged, the call that has always followed the same calls. None
            if a peer has died, or if it is unknown who has failed.
        is_usual: Whether the failed call is the expected call.
    """

    rank: int
    role: str
    members: Sequence[int]
    sequence: int
    issued: str
    expected: str | None
    is_usual: bool

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
        place = f"{self.issued} failed on rank {self.rank} at {call}"
        if self.is_usual:
            place += ", in its usual order"
        return f"{place}: {who} died, or diverged from the common sequence of collectives there"


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
    *before, last = (
        (call.op, call.dtype, 0 if call.op == UNEVEN else call.payload_bytes, call.phase)
        for call in calls[-MAX_CALLS:]
    )
    lengths = {call: context_match_length(before, call) for call in set(before)}
    last_length = lengths.get(last, 0)
    is_usual = last_length == max(lengths.values()) > 1
    expected = None
    if not is_usual and failed.phase not in NON_TRAINING:  # else it is no part of a step
        expected = _expected_call(before, last, last_length)
    return Attribution(
        rank=rank,
        role=failed.group.role,
        members=failed.group.rank_set.members,
        sequence=failed.sequence,
        issued=_describe(last),
        expected=None if expected is None else _describe(expected),
        is_usual=is_usual,
    )


def _expected_call(before: Sequence[Call], last: Call, last_length: int) -> Call | None:
    """Return the only call that has followed the last calls of `before`. None if it is unknown.

    It is unknown, too, if `last` was not issued since they came for the last time: evaluations and
    checkpoints are no part of the step. The same holds if the sizes of calls vary, such as with the
    length of the samples.

    Args:
        before: The calls before the failed call. The last of them are those in question: more
            than have come before `last`, and as many as have come MIN_TIMES.
        last: The failed call.
        last_length: The length of the longest run of calls, ending with `last`, in `before`.
    """
    size = max(MIN_CONTEXT, last_length)
    lengths = _context_lengths(before)
    places = [at for at, length in enumerate(lengths) if length >= size]
    if len(places) < MIN_TIMES or last not in before[places[-1] :]:
        return None
    longest = sorted(lengths)[-MIN_TIMES]
    followers = {before[at] for at in places if lengths[at] >= longest}
    if len(followers) > 1 or _sizes_vary(before, longest):
        return None
    return followers.pop()


def _sizes_vary(calls: Sequence[Call], length: int) -> bool:
    """Return whether calls that differ only in size have followed the same `length` calls."""
    followers: dict[tuple[object, ...], int] = {}  # the size, by the calls before and the rest
    for at in range(length, len(calls)):
        op, dtype, size, phase = calls[at]
        key = (*calls[at - length : at], (op, dtype, phase))
        if followers.setdefault(key, size) != size:
            return True
    return False


def _context_lengths(calls: Sequence[Hashable]) -> list[int]:
    """Return, by place, how many calls before it equal the last calls; at most MAX_CONTEXT."""
    lengths = []
    for at in range(len(calls)):
        length = 0
        while length < min(at, MAX_CONTEXT) and calls[at - 1 - length] == calls[-1 - length]:
            length += 1
        lengths.append(length)
    return lengths


def _describe(call: Call) -> str:
    op, dtype, payload_bytes, _ = call
    return describe_call(OPS[op], str(dtype).removeprefix("torch."), payload_bytes)
