"""Several ranks' exchanges in one process, over one store and on one clock moved by hand."""

from __future__ import annotations

from collections.abc import Callable

from fakes.clock import FakeClock
from fakes.rank_sets import FakeGroup
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import Store

from zerowatch.metrics.catalog import communication
from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.metrics.catalog.spec import MetricSpec
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.collectives.call import CollectiveCall
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.cross_rank.cross_rank_thread import LOOKS_PER_EXCHANGE, CrossRankThread
from zerowatch.runtime.cross_rank.step_times import LEAST_STEPS, WARM_UP_STEPS

SECONDS = 5.0
STUCK_SECONDS = 15.0


class Party:
    """One rank: its groups, its values and its exchange.

    Call `open` and `look` where no thread of the exchange is to do that.
    """

    def __init__(
        self,
        rank: int,
        clock: FakeClock,
        connect: Callable[[], Store | None] | None,
        *groups: FakeGroup,
        moved: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank = rank
        self.groups = list(groups)
        self.recorder = Recorder()
        self.fail_open = FailOpen()
        self.idle_seconds = 0.0
        self.exchange = CrossRankThread(
            connect=connect,
            rank=rank,
            host=f"host-{rank}",
            rank_sets=lambda: [group.rank_set for group in self.groups],
            recorder=self.recorder,
            fail_open=self.fail_open,
            seconds=SECONDS,
            volume_ratio=lambda: None,
            idle_seconds=lambda: self.idle_seconds,
            stuck_seconds=STUCK_SECONDS,
            moved=moved,
            now=clock,
        )

    def open(self) -> Party:
        self.exchange._open()
        return self

    def look(self) -> None:
        self.exchange._look()

    def run(self, ms: float = 1.0, op: str = "all_reduce", size: int = 1000) -> CollectiveCall:
        return self.groups[0].run(op, size, ms)

    def step(self, **milliseconds: float) -> None:
        """End a step; the first steps of all are the warm-up."""
        phase_ns = [round(1e6 * milliseconds.get(phase, 10.0)) for phase in PHASES]
        self.exchange.pace.add(phase_ns, [0] * len(PHASES))

    def steps(self, **milliseconds: float) -> None:
        """End as many steps as are enough to be compared."""
        for _ in range(LEAST_STEPS):
            self.step(**milliseconds)

    def milliseconds(self, spec: MetricSpec, *labels: str) -> float:
        return 1000 * (self.recorder.snapshot().value(spec, *labels) or 0.0)

    def failures(self, reason: str) -> float:
        return self.recorder.snapshot().value(communication.EXCHANGE_FAILURES, reason) or 0.0


class Parties:
    """All ranks of a job, in one data parallel group."""

    def __init__(
        self, num_ranks: int, *, watched: int | None = None, threads: bool = False
    ) -> None:
        self.clock = FakeClock()
        self.store: Store = HashStore()
        self.members = tuple(range(num_ranks))
        self.all = [self.join(rank) for rank in range(watched or num_ranks)]
        for party in self.all:
            if threads:
                party.exchange.start()
            else:
                party.open()

    def join(self, rank: int) -> Party:
        party = Party(rank, self.clock, lambda: self.store, FakeGroup(self.members))
        for _ in range(WARM_UP_STEPS):
            party.step()
        return party

    def __getitem__(self, rank: int) -> Party:
        return self.all[rank]

    def exchange(self, *silent: int, times: int = 1) -> None:
        """Let so many exchanges pass, in which all but some look."""
        for _ in range(times * LOOKS_PER_EXCHANGE):
            for party in self.all:
                if party.rank not in silent:
                    party.look()
            self.clock.seconds += SECONDS / LOOKS_PER_EXCHANGE
