"""Follows the calls that this rank issues on one rank set, and reports each call once.

The comparison thread runs this module. It reads the instrumentation's record of recent calls.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from ....metrics.catalog.labels import OPS
from ...collectives.groups import RECENT_CALLS, CollectiveCall, RankSet
from ...common.gil_pauses import let_training_run
from ..exchange.rank_messages import (
    INEXACT,
    MAX_PENDING_VALUES,
    CallReport,
    SequenceHash,
    signature,
)

# The operation whose size may differ between members. The size on one rank therefore does not
# explain the duration on another rank.
UNEVEN = OPS.index("all_to_all")
# Maximum number of cached signatures. Without a limit, a job whose sizes keep changing would add
# signatures forever.
MAX_SIGNATURES = 4096
# Time between two searches for calls that never settle. Numbered calls settle in the order of their
# numbers, within moments. A call that is behind has never returned, or its batch was lost.
SEARCH_SECONDS = 30.0


class CallSequence:
    """Holds the calls of one rank set on this rank, from the issue of a call to its comparison.

    Args:
        rank_set: The rank set.
        from_now: Whether to leave out the calls issued so far.
        now: A monotonic clock, in seconds.

    Attributes:
        rank_set: The rank set.
        names: The readable form of each signature.
        unmatched: Calls that are reported and wait for a result, in order.
        unreported: Settled calls that are never reported. These are calls without a sequence
            number, such as send, and dropped calls.
        lost: Whether calls were missed, or dropped because there were too many or they did not
            settle. The code that reads this flag resets it.
    """

    def __init__(
        self,
        rank_set: RankSet,
        *,
        from_now: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank_set = rank_set
        self.names: dict[int, str] = {}
        self.unmatched: deque[CollectiveCall] = deque()
        self.unreported: list[CollectiveCall] = []
        self.lost = False
        self._signatures: dict[tuple[object, ...], int] = {}
        self._in_flight: deque[CollectiveCall] = deque()
        self._settled: deque[CollectiveCall] = deque()  # numbered, not reported yet
        self._deferred: deque[CollectiveCall] = deque()  # unnumbered or dropped, not settled yet
        self._issued: list[int] = []  # signatures not reported yet
        self._last_seen: CollectiveCall | None = None
        self._now = now
        self._search_due = now() + SEARCH_SECONDS
        self._in_flight_before: set[CollectiveCall] = set()  # at the last search
        self._first_issued = self._next_timed = 1
        if from_now:
            self._skip_recent()
        self._prefix_hash: SequenceHash | None = SequenceHash(since=self._first_issued, crc=0)

    def poll(self) -> None:
        """Read new calls, before the instrumentation's record of recent calls overflows."""
        for call in self._new_calls():
            self._in_flight.append(call)
            if call.sequence:
                self._add_signature(call)
        self._advance()
        # A call that never settles must not block the calls after it.
        while len(self._in_flight) > RECENT_CALLS:
            self._drop_first(self._in_flight)
            self._advance()
        if self._now() >= self._search_due:
            self._search_due = self._now() + SEARCH_SECONDS
            self._drop_unsettled()
            self._advance()
        while len(self._settled) > MAX_PENDING_VALUES:  # the receiver would not keep more
            self._drop_first(self._settled)
        for _ in range(len(self._deferred)):
            self._defer(self._deferred.popleft())

    def drain_report(self) -> CallReport:
        """Return a report with the signatures of newly issued calls.

        The report also has the durations of newly settled calls.
        """
        self.poll()
        prefix_hash, signatures = self._prefix_hash, np.array(self._issued, np.uint32)
        self._prefix_hash = None if prefix_hash is None else prefix_hash.extended(signatures)
        let_training_run()
        settled = self._drain_settled()
        let_training_run()
        self._next_timed = settled[0].sequence if settled else self._next_timed
        report = CallReport(
            first_timed=self._next_timed,
            durations=np.array([_reported_seconds(call) for call in settled], np.float32),
            first_issued=self._first_issued,
            signatures=signatures,
            prefix_hash=prefix_hash,
        )
        self._first_issued += len(self._issued)
        self._issued.clear()
        self._next_timed += len(settled)
        self.unmatched.extend(settled)
        return report

    def names_in(self, report: CallReport) -> dict[int, str]:
        """Return the readable form of each signature in a report."""
        return {one: self.names[one] for one in set(report.signatures.tolist())}

    def _skip_recent(self) -> None:
        for call in self.rank_set.recent.copy():
            self._last_seen = call
            if call.sequence:
                self._first_issued = self._next_timed = call.sequence + 1

    def _new_calls(self) -> list[CollectiveCall]:
        try:
            new, is_complete = self._since_last_seen(self.rank_set.recent)
        except RuntimeError:  # another thread recorded a call meanwhile; a copy is atomic
            new, is_complete = self._since_last_seen(self.rank_set.recent.copy())
        self.lost |= not is_complete
        if new:
            self._last_seen = new[-1]
        return new

    def _since_last_seen(self, recent: deque[CollectiveCall]) -> tuple[list[CollectiveCall], bool]:
        """Return the calls since the last poll, and whether the record still held all of them."""
        new: list[CollectiveCall] = []
        for call in reversed(recent):
            if call is self._last_seen:
                return new[::-1], True
            new.append(call)
        return new[::-1], self._last_seen is None

    def _add_signature(self, call: CollectiveCall) -> None:
        if not self._issued and len(self._signatures) > MAX_SIGNATURES:
            self._signatures.clear()
            self.names.clear()
        if call.sequence != self._first_issued + len(self._issued):
            self.lost, self._prefix_hash = True, None
            self._first_issued = call.sequence
            self._issued.clear()
        self._issued.append(self._signature(call))

    def _advance(self) -> None:
        """Move settled calls, in order, to `_settled`. Defer calls without a number."""
        while self._in_flight and (self._in_flight[0].settled or not self._in_flight[0].sequence):
            call = self._in_flight.popleft()
            if call.sequence:
                self._settled.append(call)
            else:
                self._defer(call)

    def _drop_unsettled(self) -> None:
        """Drop calls that were in flight at the last search already, and have been overtaken.

        A call that is not timed may settle at any time: one that was left out does when it is
        issued.
        """
        overtaken = list(self._in_flight)
        while overtaken and not (
            overtaken[-1].settled and overtaken[-1].timed and overtaken[-1].sequence
        ):
            overtaken.pop()
        for call in overtaken:
            if call in self._in_flight_before and not call.settled:
                self._in_flight.remove(call)
                self.lost = True
                self._defer(call)
        self._in_flight_before = set(self._in_flight)

    def _drop_first(self, calls: deque[CollectiveCall]) -> None:
        """Exclude the first of these calls from the comparison. Its cost is still counted."""
        self.lost = True
        self._defer(calls.popleft())

    def _defer(self, call: CollectiveCall) -> None:
        """Add a call to `unreported` once it has settled."""
        if call.settled:
            self.unreported.append(call)
            return
        self._deferred.append(call)
        if len(self._deferred) > RECENT_CALLS:
            self._deferred.popleft()
            self.lost = True

    def _drain_settled(self) -> list[CollectiveCall]:
        """Remove and return the settled calls up to the first gap in their numbers."""
        settled: list[CollectiveCall] = []
        while self._settled:
            if settled and self._settled[0].sequence != settled[-1].sequence + 1:
                break
            settled.append(self._settled.popleft())
        return settled

    def _signature(self, call: CollectiveCall) -> int:
        size = 0 if call.op == UNEVEN else call.payload_bytes
        key = (call.op, call.dtype, size)
        known = self._signatures.get(key)
        if known is None:
            op, dtype = OPS[call.op], str(call.dtype).removeprefix("torch.")
            known = self._signatures[key] = signature(op, dtype, size)
            self.names[known] = describe_call(op, dtype, size)
        return known


def _reported_seconds(call: CollectiveCall) -> float:
    if call.is_bound:
        return INEXACT
    return call.duration_ns / 1e9 if call.timed else np.nan


def describe_call(op: str, dtype: str, payload_bytes: int) -> str:
    """Describe a call, such as "all_reduce of 4096 bytes (float32)"."""
    return f"{op} of {payload_bytes} bytes ({dtype})" if payload_bytes else op
