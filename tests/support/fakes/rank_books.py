"""One rank's side of an exchange, to which a test gives the answers of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
from fakes.clock import FakeClock
from fakes.rank_sets import FakeGroup

from zerowatch.metrics.catalog import communication
from zerowatch.metrics.catalog.spec import MetricSpec
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.cross_rank.compare_result import CompareResult
from zerowatch.runtime.cross_rank.local_accounting import LocalAccounting

PATIENCE = 20.0


class Rank:
    """The books of one rank on one group.

    Set `compares` to False where nobody is there to compare with.
    """

    def __init__(self, group: FakeGroup, volume_ratio: float | None = None) -> None:
        self.group = group
        self.recorder = Recorder()
        self.clock = FakeClock()
        self.compares = True
        self.books = LocalAccounting(
            lambda: [group.rank_set],
            self.recorder,
            lambda: volume_ratio,
            self.clock,
            compares=lambda: self.compares,
        )

    def tell(self) -> Any:
        return self.books.take_sections()[0].get(self.group.rank_set.key)

    def learn(self, first: int, *milliseconds: float) -> None:
        least = np.array(milliseconds, np.float32) / 1000
        self.books.match(self.group.rank_set, CompareResult(first=first, least=least))

    def value(self, spec: MetricSpec, *labels: str) -> float:
        """Publish, and return one value in milliseconds."""
        with self.recorder.commit():
            self.books.publish()
        return 1000 * (self.recorder.snapshot().value(spec, *labels) or 0.0)

    def causes(self) -> dict[str, float]:
        names = ("imbalance", "latency", "redundancy", "bandwidth")
        return {name: self.value(communication.COMM_CAUSE_SECONDS, name) for name in names}
