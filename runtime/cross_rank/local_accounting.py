"""This rank's own side of the exchange: what it tells, and what its collectives have cost it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from ...metrics.catalog import communication
from ...metrics.catalog.labels import OPS
from ...metrics.recorder import Recorder
from ..collectives.call import CollectiveCall
from ..collectives.groups import RankSet
from ..collectives.ops import SYMMETRIC
from .call_report import CallReport
from .call_sequence import CallSequence
from .comm_costs import CommCosts, CostTotals
from .compare_result import CompareResult


class _RankSetState:
    """One rank set: its calls, their costs, and when which of them were told.

    Attributes:
        compared: Whether the last answer held durations. Where none comes, or one without them,
            there is nobody to compare with, or the members' calls do not belong together.
    """

    def __init__(self, course: CallSequence) -> None:
        self.course = course
        self.compared = True
        self.accounts: dict[str, CommCosts] = {}  # by backend: each has a link of its own
        self.told: deque[tuple[float, int]] = deque()  # when, and up to which call

    def account_of(self, call: CollectiveCall) -> CommCosts:
        account = self.accounts.get(call.group.backend)
        if account is None:
            account = self.accounts[call.group.backend] = CommCosts(self.course.rank_set)
        return account


class LocalAccounting:
    """Follows all rank sets of this rank, from those it is made with on.

    Args:
        rank_sets: Gives the rank sets seen so far.
        recorder: Where the costs are written.
        volume_ratio: Gives wire bytes of a step over the least possible; None while unknown.
        compares: Whether the ranks are compared at all; if not, causes cannot be told.

    Attributes:
        unmatched: Times that calls could not be compared, as no answer came, calls were lost, or
            the ranks had gone different ways.
    """

    def __init__(
        self,
        rank_sets: Callable[[], Iterable[RankSet]],
        recorder: Recorder,
        volume_ratio: Callable[[], float | None],
        now: Callable[[], float] = time.monotonic,
        compares: Callable[[], bool] = lambda: True,
    ) -> None:
        self.unmatched = 0
        self._rank_sets = rank_sets
        self._recorder = recorder
        self._volume_ratio = volume_ratio
        self._now = now
        self._compares = compares
        self._totals = CostTotals()
        self._entries: dict[RankSet, _RankSetState] = {
            rank_set: _RankSetState(CallSequence(rank_set, from_now=True))
            for rank_set in rank_sets()
        }

    def follow(self) -> None:
        """Take in new calls, so that none is lost until they are told."""
        for rank_set in self._rank_sets():
            entry = self._entry(rank_set)
            entry.course.follow()
            self._count_unasked(entry)

    def take_sections(self) -> tuple[dict[str, CallReport], dict[int, str]]:
        """Return what is new, by the rank set's key, with what its signatures stand for."""
        sections: dict[str, CallReport] = {}
        names: dict[int, str] = {}
        for rank_set in self._rank_sets():
            entry = self._entry(rank_set)
            section = entry.course.take_section()
            self._count_unasked(entry)
            if rank_set.size > 1:
                sections[rank_set.key] = section
                names.update(entry.course.names_in(section))
                if len(section.durations):
                    end = section.first_timed + len(section.durations)
                    entry.told.append((self._now(), end))
        return sections, names

    def waits(self) -> bool:
        """Whether calls wait for an answer of the others."""
        return any(entry.told for entry in self._entries.values())

    def match(self, rank_set: RankSet, verdict: CompareResult) -> None:
        """Count the calls whose least duration over the ranks is known now."""
        entry = self._entries.get(rank_set)
        if entry is None:
            return
        waiting, volume_ratio = entry.course.unmatched, self._volume_ratio()
        end, failed = verdict.first + len(verdict.least), False
        rest: list[tuple[CollectiveCall, bool]] = []
        while waiting and waiting[0].sequence < end:
            call = waiting.popleft()
            at = call.sequence - verdict.first
            least_seconds = float(verdict.least[at]) if at >= 0 else math.nan
            if at >= 0 and call.timed:  # an answer would hold this rank's own duration at least
                entry.compared = not math.isnan(least_seconds)
                failed |= not entry.compared
            if math.isnan(least_seconds) or not _has_counterparts(call):
                rest.append((call, entry.compared))
            else:
                entry.account_of(call).matched(call, least_seconds, self._totals, volume_ratio)
        self.unmatched += failed
        for call, compared in rest:  # now that the others have shown what the link can do
            entry.account_of(call).renew()
            self._count_alone(entry, call, compared=compared)
        while entry.told and not (waiting and waiting[0].sequence < entry.told[0][1]):
            entry.told.popleft()

    def give_up(self, patience_seconds: float) -> None:
        """Count alone what got no answer for so long; without patience, that is no failure."""
        before = self._now() - patience_seconds
        for entry in self._entries.values():
            end = 0
            while entry.told and entry.told[0][0] <= before:
                end = entry.told.popleft()[1]
            waiting = entry.course.unmatched
            late = patience_seconds > 0 and bool(waiting) and waiting[0].sequence < end
            entry.compared = entry.compared and not late
            while waiting and waiting[0].sequence < end:
                self._count_alone(entry, waiting.popleft(), compared=entry.compared)
            self.unmatched += late + entry.course.lost
            entry.course.lost = False

    def publish(self) -> None:
        """Write all that was counted since the last time; to be called within a commit."""
        totals, self._totals = self._totals, CostTotals()
        standing: dict[str, CommCosts] = {}
        for entry in self._entries.values():
            role = entry.course.rank_set.role
            for account in entry.accounts.values():
                account.renew()
                if role not in standing or account.wire_bytes > standing[role].wire_bytes:
                    standing[role] = account
        totals.publish(self._recorder)
        for account in standing.values():
            account.publish(self._recorder)
        self._recorder.set(communication.EXCHANGE_FAILURES, self.unmatched, "unmatched")

    def arrived(self) -> Mapping[str, int]:
        """Return the number of the last call issued, by the rank set's key."""
        return {rank_set.key: rank_set.issued for rank_set in self._rank_sets()}

    def _entry(self, rank_set: RankSet) -> _RankSetState:
        if rank_set not in self._entries:
            self._entries[rank_set] = _RankSetState(CallSequence(rank_set, from_now=False))
        return self._entries[rank_set]

    def _count_unasked(self, entry: _RankSetState) -> None:
        """Count the calls of which no other rank is asked."""
        calls = entry.course.alone
        if entry.course.rank_set.size == 1:
            calls = [*calls, *entry.course.unmatched]
            entry.course.unmatched.clear()
        for call in calls:
            self._count_alone(entry, call, compared=entry.compared)
        entry.course.alone.clear()

    def _count_alone(self, entry: _RankSetState, call: CollectiveCall, *, compared: bool) -> None:
        account = entry.account_of(call)
        if entry.course.rank_set.size == 1 or (compared and self._compares()):
            account.alone(call, self._totals, self._volume_ratio())
        else:
            account.incomparable(call, self._totals)


def _has_counterparts(call: CollectiveCall) -> bool:
    return call.timed and OPS[call.op] in SYMMETRIC
