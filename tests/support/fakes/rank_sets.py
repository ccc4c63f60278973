"""Process groups and their calls made by hand, as the instrumentation would record them."""

from __future__ import annotations

import torch

from zerowatch.metrics.catalog.labels import OPS, PHASES
from zerowatch.runtime.collectives.collective_table import wire_factor
from zerowatch.runtime.collectives.groups import CollectiveCall, RankSet

MS = 1_000_000
POINT_TO_POINT = ("send", "recv")


class FakeGroup:
    """One rank's view of a process group, with a rank set of its own unless one is given."""

    def __init__(
        self,
        members: tuple[int, ...],
        role: str = "dp",
        backend: str = "gloo",
        rank_set: RankSet | None = None,
    ) -> None:
        self.rank_set = rank_set or RankSet(members)
        self.rank_set.roles = [role]
        self.role, self.backend, self.size = role, backend, len(members)
        self.busy_until_ns = self.maybe_busy_until_ns = -(2**63)
        self.num_unseen = 0
        self.on_device = False
        self.recorded = self.replayed = 0
        self._now_ns = 0

    def wire_factor(self, op: int, payload_bytes: int) -> float:
        return wire_factor(OPS[op], self.backend, self.size, payload_bytes)

    def num_issued(self) -> int:
        return self.recorded + self.num_unseen

    def num_under_way(self) -> int:
        return 0

    def records(self) -> list[FakeGroup]:
        return [self]

    def issue(
        self, op: str = "all_reduce", size: int = 1000, phase: str = "backward"
    ) -> CollectiveCall:
        """Issue a call that is in flight."""
        call = CollectiveCall(OPS.index(op), self, size, torch.float32, PHASES.index(phase))
        if op not in POINT_TO_POINT:
            self.rank_set.issued += 1
            call.sequence = self.rank_set.issued
        self.rank_set.recent.append(call)
        return call

    def settle(
        self, call: CollectiveCall, ms: float, exposed_ms: float | None = None, batch: int = 0
    ) -> CollectiveCall:
        """End a call `ms` after it began, having blocked training for all of that or less."""
        call.start_ns = self._now_ns
        call.end_ns = self._now_ns = self._now_ns + round(ms * MS)
        call.issued_ns = call.start_ns + round((ms if exposed_ms is None else exposed_ms) * MS)
        call.settle(batch)
        return call

    def run(
        self,
        op: str = "all_reduce",
        size: int = 1000,
        ms: float = 1.0,
        exposed_ms: float | None = None,
        phase: str = "backward",
    ) -> CollectiveCall:
        """Issue a call and end it."""
        return self.settle(self.issue(op, size, phase), ms, exposed_ms)


class FakeGroups:
    """All process groups of one rank."""

    def __init__(self, groups: list[FakeGroup]) -> None:
        self.groups = groups

    def rank_sets(self) -> list[RankSet]:
        return [group.rank_set for group in self.groups]

    def known(self) -> list[FakeGroup]:
        return [group for group in self.groups if isinstance(group, FakeGroup)]
