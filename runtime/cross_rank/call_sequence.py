"""This rank's calls in one rank set: what the others were told of, and what is yet to be matched.

Read from the tap's record of recent calls; nothing here runs on the training thread.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from ...metrics.catalog.labels import OPS
from ..collectives.call import CollectiveCall
from ..collectives.groups import RECENT_CALLS, RankSet
from .call_report import CallReport, SequenceHash, signature
from .numbered_range import MOST_VALUES

# Members may rightly give it different sizes, and one's does not belong to another's duration.
UNEVEN = OPS.index("all_to_all")
# A job with ever new sizes has ever new signatures: more than so many are not remembered.
MOST_SIGNATURES = 4096


class CallSequence:
    """Follows the calls of one rank set.

    Attributes:
        rank_set: The rank set.
        names: What each signature stands for.
        unmatched: Calls that were told to the others and wait for their answer, in order.
        alone: Settled calls that are not compared: such as send, or those dropped before they were
            told.
        lost: Whether calls were dropped since the last time, being more than are kept.
    """

    def __init__(self, rank_set: RankSet, *, from_now: bool) -> None:
        self.rank_set = rank_set
        self.names: dict[int, str] = {}
        self.unmatched: deque[CollectiveCall] = deque()
        self.alone: list[CollectiveCall] = []
        self.lost = False
        self._signatures: dict[tuple[object, ...], int] = {}
        self._under_way: deque[CollectiveCall] = deque()
        self._settled: deque[CollectiveCall] = deque()  # numbered, and yet to be told
        self._unsettled: deque[CollectiveCall] = deque()  # neither numbered, nor kept in order
        self._issued: list[int] = []  # signatures yet to be told
        self._last_seen: CollectiveCall | None = None
        self._first_issued = self._next_timed = 1
        if from_now:
            self._skip_what_was()
        self._history: SequenceHash | None = SequenceHash(since=self._first_issued, crc=0)

    def follow(self) -> None:
        """Take in what is new, before the tap's record of recent calls is full."""
        for call in self._new_calls():
            self._under_way.append(call)
            if call.sequence:
                self._note_issued(call)
        self._advance()
        while len(self._under_way) > RECENT_CALLS:  # one that never settles must not stop the rest
            self._drop(self._under_way)
            self._advance()
        while len(self._settled) > MOST_VALUES:  # more than anybody would keep
            self._drop(self._settled)
        for _ in range(len(self._unsettled)):
            self._put_aside(self._unsettled.popleft())

    def take_section(self) -> CallReport:
        """Return what is new: the calls issued, and the durations of those that have settled."""
        self.follow()
        history, signatures = self._history, np.array(self._issued, np.uint32)
        self._history = None if history is None else history.extended(signatures)
        settled = self._take_settled()
        self._next_timed = settled[0].sequence if settled else self._next_timed
        section = CallReport(
            first_timed=self._next_timed,
            durations=np.array(
                [call.duration_ns / 1e9 if call.timed else np.nan for call in settled], np.float32
            ),
            first_issued=self._first_issued,
            signatures=signatures,
            history=history,
        )
        self._first_issued += len(self._issued)
        self._issued.clear()
        self._next_timed += len(settled)
        self.unmatched.extend(settled)
        return section

    def names_in(self, section: CallReport) -> dict[int, str]:
        """Say what the signatures of a section stand for."""
        return {one: self.names[one] for one in set(section.signatures.tolist())}

    def _skip_what_was(self) -> None:
        for call in self.rank_set.recent.copy():
            self._last_seen = call
            if call.sequence:
                self._first_issued = self._next_timed = call.sequence + 1

    def _new_calls(self) -> list[CollectiveCall]:
        try:
            new, complete = self._back_to_last_seen(self.rank_set.recent)
        except RuntimeError:  # the tap has noted another meanwhile; a copy is taken at once
            new, complete = self._back_to_last_seen(self.rank_set.recent.copy())
        self.lost |= not complete
        if new:
            self._last_seen = new[-1]
        return new

    def _back_to_last_seen(
        self, recent: deque[CollectiveCall]
    ) -> tuple[list[CollectiveCall], bool]:
        """Return the calls since the last time, and whether none is missing before them."""
        new: list[CollectiveCall] = []
        for call in reversed(recent):
            if call is self._last_seen:
                return new[::-1], True
            new.append(call)
        return new[::-1], self._last_seen is None

    def _note_issued(self, call: CollectiveCall) -> None:
        if not self._issued and len(self._signatures) > MOST_SIGNATURES:
            self._signatures.clear()
            self.names.clear()
        if call.sequence != self._first_issued + len(self._issued):
            self.lost, self._history = True, None
            self._first_issued = call.sequence
            self._issued.clear()
        self._issued.append(self._signature(call))

    def _advance(self) -> None:
        """Pass on the calls that have settled, the numbered ones in their order."""
        while self._under_way and (self._under_way[0].settled or not self._under_way[0].sequence):
            call = self._under_way.popleft()
            if call.sequence:
                self._settled.append(call)
            else:
                self._put_aside(call)

    def _drop(self, calls: deque[CollectiveCall]) -> None:
        """Compare the first of these calls no more; what it cost is counted all the same."""
        self.lost = True
        self._put_aside(calls.popleft())

    def _put_aside(self, call: CollectiveCall) -> None:
        if call.settled:
            self.alone.append(call)
            return
        self._unsettled.append(call)
        if len(self._unsettled) > RECENT_CALLS:
            self._unsettled.popleft()
            self.lost = True

    def _take_settled(self) -> list[CollectiveCall]:
        """Return the numbered calls that have settled, as far as there is no gap."""
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
            self.names[known] = describe(op, dtype, size)
        return known


def describe(op: str, dtype: str, payload_bytes: int) -> str:
    """Say what a call is: "all_reduce of 4096 bytes (float32)"."""
    return f"{op} of {payload_bytes} bytes ({dtype})" if payload_bytes else op
