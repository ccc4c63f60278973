"""Reports this rank's collectives for comparison with other ranks, and adds up their costs."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping

from ....metrics.catalog import communication
from ....metrics.catalog.labels import OPS, OWN_GROUP
from ....metrics.recorder import Recorder
from ...collectives.collective_table import SYMMETRIC
from ...collectives.groups import CollectiveCall, Groups, RankSet
from ...common.gil_pauses import let_training_run
from ..exchange.rank_messages import INEXACT, UNKNOWN, CallReport, CompareResult
from .call_sequence import CallSequence
from .comm_costs import CommCosts, CostTotals

logger = logging.getLogger(__name__)

# Number of calls after which training may run. Asking for the time of each call would cost a share.
CALLS_PER_PAUSE = 16
# Number of failures for the same reason at which the log says so. An alert fires after as many.
LOGGED_FAILURES = 10


class RankCommCosts:
    """Adds up the costs of the collectives that this rank issues after this object was made.

    A call is matched if the same call was found on all ranks of its rank set. The wait of a matched
    call is measured. The wait of any other call is estimated from the link, as long as the ranks
    are compared and their calls match. Otherwise the wait is unknown, and only the exposed time of
    the call is added.

    A call on a device whose duration is only bounded on some rank counts like the mean of the exact
    calls of its operation and size. Those are calls of sampled steps.

    Args:
        groups: The process groups seen so far.
        recorder: Receives the costs.
        now: A monotonic clock, in seconds.

    Attributes:
        volume_ratio: Wire bytes of a step, divided by the reference volume. None while unknown.
        unmatched: How often calls could not be matched. The reason may be that no result came,
            that calls were lost, or that the ranks had diverged.
    """

    def __init__(
        self, groups: Groups, recorder: Recorder, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.volume_ratio: float | None = None
        self.unmatched = 0
        self._groups = groups
        self._recorder = recorder
        self._now = now
        self._num_unmatched: Counter[str] = Counter()  # by reason
        self._totals = CostTotals()
        self._states: dict[RankSet, _RankSetState] = {
            rank_set: _RankSetState(CallSequence(rank_set, from_now=True, now=now))
            for rank_set in groups.rank_sets()
        }

    def poll(self, *, is_compared: bool) -> None:
        """Read new calls, so that no call is lost before its report.

        Args:
            is_compared: Whether the ranks are compared at all.
        """
        for rank_set in self._groups.rank_sets():
            state = self._state(rank_set)
            state.sequence.poll()
            self._add_unreported(state, is_compared=is_compared)
            let_training_run()

    def drain_reports(self, *, is_compared: bool) -> tuple[dict[str, CallReport], dict[int, str]]:
        """Return the calls that were not reported yet, and the names of their signatures.

        Args:
            is_compared: Whether the ranks are compared at all.

        Returns:
            One report for each rank set, by the key of the rank set. The second value holds the
            readable form of each signature in the reports.
        """
        reports: dict[str, CallReport] = {}
        names: dict[int, str] = {}
        for rank_set in self._groups.rank_sets():
            state = self._state(rank_set)
            report = state.sequence.drain_report()
            let_training_run()
            self._add_unreported(state, is_compared=is_compared)
            if rank_set.size > 1:
                reports[rank_set.key] = report
                names.update(state.sequence.names_in(report))
                if len(report.durations):
                    end = report.first_timed + len(report.durations)
                    state.reported.append((self._now(), end))
            let_training_run()
        return reports, names

    def has_pending(self) -> bool:
        """Whether reported calls wait for a result."""
        return any(state.reported for state in self._states.values())

    def match(self, rank_set: RankSet, result: CompareResult) -> None:
        """Add the costs of the calls that a result of the comparison covers.

        Args:
            rank_set: The rank set of the calls.
            result: Holds the shortest duration of each call over all ranks.
        """
        state = self._states.get(rank_set)
        if state is None:
            return
        unmatched = state.sequence.unmatched
        end, failed = result.first_call + len(result.min_durations), False
        rest: list[tuple[CollectiveCall, bool, bool]] = []
        while unmatched and unmatched[0].sequence < end:
            call = unmatched.popleft()
            at = call.sequence - result.first_call
            min_seconds = float(result.min_durations[at]) if at >= 0 else math.nan
            # A result with other ranks would have a duration: at least the one of this rank.
            if at >= 0 and call.timed:
                failed |= math.isnan(min_seconds)
                state.is_matching = not (math.isnan(min_seconds) or min_seconds == UNKNOWN)
            if math.isnan(min_seconds) or min_seconds < 0 or not _has_counterparts(call):
                rest.append((call, state.is_matching, min_seconds == INEXACT))
            else:
                costs = state.costs_of(call)
                costs.add_matched(call, min_seconds, self._totals, self.volume_ratio)
            if len(unmatched) % CALLS_PER_PAUSE == 0:
                let_training_run()
        if failed:
            self._count_unmatched(rank_set, "no rank has timed them, or the ranks have diverged")
        # Last, because the matched calls improve the link estimate.
        for number, (call, is_matching, is_inexact) in enumerate(rest):
            state.costs_of(call).refit()
            self._add_unmatched(state, call, is_compared=is_matching, is_inexact=is_inexact)
            if number % CALLS_PER_PAUSE == 0:
                let_training_run()
        while state.reported and not (unmatched and unmatched[0].sequence < state.reported[0][1]):
            state.reported.popleft()

    def excuse(self, seconds: float) -> None:
        """Let all reported calls wait longer for a result: this rank has read none for a time."""
        now = self._now()
        for state in self._states.values():
            state.reported = deque((min(at + seconds, now), end) for at, end in state.reported)

    def expire(self, patience_seconds: float, *, is_compared: bool) -> None:
        """Add reported calls as unmatched if no result came within `patience_seconds`.

        A late result is counted as a failure, unless `patience_seconds` is 0.

        Args:
            patience_seconds: Maximum time between a report and its result.
            is_compared: Whether the ranks are compared at all.
        """
        before = self._now() - patience_seconds
        for state in self._states.values():
            end = 0
            while state.reported and state.reported[0][0] <= before:
                end = state.reported.popleft()[1]
            unmatched = state.sequence.unmatched
            is_late = patience_seconds > 0 and bool(unmatched) and unmatched[0].sequence < end
            state.is_matching = state.is_matching and not is_late
            while unmatched and unmatched[0].sequence < end:
                call = unmatched.popleft()
                self._add_unmatched(state, call, is_compared=state.is_matching and is_compared)
            rank_set = state.sequence.rank_set
            if is_late:
                late = f"no result came within {patience_seconds:g} s"
                self._count_unmatched(rank_set, late)
            if state.sequence.lost and is_compared and rank_set.size > 1:
                self._count_unmatched(rank_set, "there were too many at once, or some never ended")
            state.sequence.lost = False

    def publish(self, *, is_compared: bool = True) -> None:
        """Publish the costs added since the last call. The caller opens the commit.

        Args:
            is_compared: Whether the ranks are compared at all. If not, the links are unknown.
        """
        totals, self._totals = self._totals, CostTotals()
        totals.publish(self._recorder)
        self._recorder.set(communication.EXCHANGE_FAILURES, self.unmatched, "unmatched")
        if totals.exposed:  # else there were no calls that could change an estimate
            self._publish_links(is_compared=is_compared)

    def _count_unmatched(self, rank_set: RankSet, why: str) -> None:
        """Count calls that were not matched. The log has a reason once, if it is frequent."""
        self.unmatched += 1
        self._num_unmatched[why] += 1
        if self._num_unmatched[why] == LOGGED_FAILURES:
            logger.warning("calls of group %s are often not compared: %s", rank_set.role, why)

    def _publish_links(self, *, is_compared: bool) -> None:
        by_role: dict[str, CommCosts] = {}  # for each role, the costs with the most wire bytes
        for state in self._states.values():
            rank_set = state.sequence.rank_set
            role = rank_set.role
            is_known = rank_set.size == 1 or (is_compared and state.is_matching)
            for (_, is_own), costs in state.costs.items():
                costs.refit()
                if not is_known:
                    costs.withdraw(self._recorder)
                    continue
                if is_own:
                    continue  # the few bytes of zerowatch do not show the link that training has
                if role not in by_role or costs.wire_bytes > by_role[role].wire_bytes:
                    by_role[role] = costs
        for costs in by_role.values():
            costs.publish(self._recorder)

    def issued(self) -> Mapping[str, int]:
        """Return the number of the last call that was issued on each rank set, by its key."""
        return {rank_set.key: rank_set.issued for rank_set in self._groups.rank_sets()}

    def _state(self, rank_set: RankSet) -> _RankSetState:
        if rank_set not in self._states:
            sequence = CallSequence(rank_set, from_now=False, now=self._now)
            self._states[rank_set] = _RankSetState(sequence)
        return self._states[rank_set]

    def _add_unreported(self, state: _RankSetState, *, is_compared: bool) -> None:
        """Add the costs of the calls that are never reported to the other ranks."""
        sequence = state.sequence
        calls = sequence.unreported
        if sequence.rank_set.size == 1:
            calls = [*calls, *sequence.unmatched]
            sequence.unmatched.clear()
        for call in calls:
            self._add_unmatched(state, call, is_compared=state.is_matching and is_compared)
        sequence.unreported.clear()

    def _add_unmatched(
        self,
        state: _RankSetState,
        call: CollectiveCall,
        *,
        is_compared: bool,
        is_inexact: bool = False,
    ) -> None:
        """Estimate the wait of an unmatched call if possible, else add its exposed time only.

        Args:
            state: The state of the call's rank set.
            call: The call.
            is_compared: Whether the ranks are compared and their calls match.
            is_inexact: Whether another rank has only an upper bound of the call's duration.
        """
        costs = state.costs_of(call)
        if state.sequence.rank_set.size > 1 and not is_compared:
            costs.add_exposed_only(call, self._totals)
        elif is_inexact or call.is_bound:
            costs.add_inexact(call, self._totals, self.volume_ratio)
        else:
            costs.add_estimated(call, self._totals, self.volume_ratio)


class _RankSetState:
    """Holds the calls of one rank set, the costs of these calls, and when each was reported.

    Attributes:
        is_matching: Whether the calls of all members match. False after a result without durations,
            which means that a member was left out or that the ranks have diverged.
        costs: The costs by backend, and by whether the calls are zerowatch's own collectives. Each
            entry has its own link estimate.
        reported: The time of each report, and the number after the last call in it.
    """

    def __init__(self, sequence: CallSequence) -> None:
        self.sequence = sequence
        self.is_matching = True
        self.costs: dict[tuple[str, bool], CommCosts] = {}
        self.reported: deque[tuple[float, int]] = deque()

    def costs_of(self, call: CollectiveCall) -> CommCosts:
        key = (call.group.backend, call.group.role == OWN_GROUP)
        costs = self.costs.get(key)
        if costs is None:
            costs = self.costs[key] = CommCosts(self.sequence.rank_set)
        return costs


def _has_counterparts(call: CollectiveCall) -> bool:
    return call.timed and OPS[call.op] in SYMMETRIC
