"""Fake comparison of one rank, whose results a test sets."""

from __future__ import annotations

import numpy as np
from fakes.clock import FakeClock
from fakes.rank_sets import FakeGroup, FakeGroups

from zerowatch.metrics.catalog import communication
from zerowatch.metrics.catalog.spec import MetricSpec
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.cross_rank.accounting.rank_comm_costs import RankCommCosts
from zerowatch.runtime.cross_rank.exchange.rank_messages import CallReport, CompareResult

PATIENCE = 20.0


class AccountedRank:
    """The accounting of one rank on one group.

    Set `is_compared` to False where there is no other rank to compare with.
    """

    def __init__(self, group: FakeGroup, volume_ratio: float | None = None) -> None:
        self.group = group
        self.recorder = Recorder()
        self.clock = FakeClock()
        self.is_compared = True
        self.accounting = RankCommCosts(FakeGroups([group]), self.recorder, self.clock)
        self.accounting.volume_ratio = volume_ratio

    def report(self) -> CallReport | None:
        reports, _ = self.accounting.drain_reports(is_compared=self.is_compared)
        return reports.get(self.group.rank_set.key)

    def expire(self, patience_seconds: float) -> None:
        self.accounting.expire(patience_seconds, is_compared=self.is_compared)

    def match(self, first_call: int, *milliseconds: float) -> None:
        durations = np.array(milliseconds, np.float32) / 1000
        result = CompareResult(first_call=first_call, min_durations=durations)
        self.accounting.match(self.group.rank_set, result)

    def value(self, spec: MetricSpec, *labels: str) -> float:
        """Publish, and return one value in milliseconds."""
        with self.recorder.commit():
            self.accounting.publish()
        return 1000 * (self.recorder.snapshot().value(spec, *labels) or 0.0)

    def causes(self) -> dict[str, float]:
        names = ("imbalance", "latency", "redundancy", "bandwidth")
        return {name: self.value(communication.COMM_CAUSE_SECONDS, name) for name in names}
