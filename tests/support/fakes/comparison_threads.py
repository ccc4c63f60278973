"""Several ranks' comparison threads in one process, over one store, by one fake clock."""

from __future__ import annotations

from collections.abc import Callable

from fakes.clock import FakeClock
from fakes.rank_sets import FakeGroup, FakeGroups
from fakes.store_clients import FakeClients
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import Store

from zerowatch.metrics.catalog import communication
from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.metrics.catalog.spec import MetricSpec
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.collectives.groups import CollectiveCall
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.cross_rank.comparison_thread import POLLS_PER_EXCHANGE, ComparisonThread
from zerowatch.runtime.cross_rank.stragglers import MIN_STEPS, WARM_UP_STEPS

INTERVAL_SECONDS = 5.0
STUCK_SECONDS = 15.0


class FakePhaseTimer:
    """Fake of the progress clock: a test sets the seconds without progress."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def idle_seconds(self) -> float:
        return self.seconds


class ComparedRank:
    """One rank: its groups, its metrics and its comparison thread.

    Call `connect` and `poll` where the thread is not started.
    """

    def __init__(
        self,
        rank: int,
        clock: FakeClock,
        connect: Callable[[], Store | None] | None,
        *groups: FakeGroup,
        world_size: int | None = None,
    ) -> None:
        self.rank = rank
        self.groups = list(groups)
        self.recorder = Recorder()
        self.fail_open = FailOpen()
        self.phase_timer = FakePhaseTimer()
        self.clients = None if connect is None else FakeClients(connect)
        self.thread = ComparisonThread(
            clients=self.clients,
            rank=rank,
            world_size=world_size or groups[0].size,
            host=f"host-{rank}",
            groups=FakeGroups(self.groups),
            phase_timer=self.phase_timer,
            recorder=self.recorder,
            fail_open=self.fail_open,
            interval_seconds=INTERVAL_SECONDS,
            stuck_seconds=STUCK_SECONDS,
            now=clock,
        )

    def connect(self) -> ComparedRank:
        self.thread._connect()
        return self

    def poll(self) -> None:
        self.thread._poll()

    def run(self, ms: float = 1.0, op: str = "all_reduce", size: int = 1000) -> CollectiveCall:
        return self.groups[0].run(op, size, ms)

    def step(self, **milliseconds: float) -> None:
        """End a step without generation; the first steps of all are the warm-up."""
        usual = dict.fromkeys(PHASES, 10.0) | {"generate": 0.0}
        phase_ns = [round(1e6 * each) for each in (usual | milliseconds).values()]
        self.thread.step_times.add(phase_ns, [0] * len(PHASES))

    def steps(self, **milliseconds: float) -> None:
        """End as many steps as are enough to be compared."""
        for _ in range(MIN_STEPS):
            self.step(**milliseconds)

    def milliseconds(self, spec: MetricSpec, *labels: str) -> float:
        return 1000 * (self.recorder.snapshot().value(spec, *labels) or 0.0)

    def failures(self, reason: str) -> float:
        return self.recorder.snapshot().value(communication.EXCHANGE_FAILURES, reason) or 0.0


class ComparedRanks:
    """All ranks of a job, in one data parallel group."""

    def __init__(
        self, num_ranks: int, *, monitored: int | None = None, threads: bool = False
    ) -> None:
        self.clock = FakeClock()
        self.store: Store = HashStore()
        self.members = tuple(range(num_ranks))
        self.all = [self.join(rank) for rank in range(monitored or num_ranks)]
        for rank in self.all:
            if threads:
                rank.thread.start()
            else:
                rank.connect()

    def join(self, number: int) -> ComparedRank:
        rank = ComparedRank(number, self.clock, lambda: self.store, FakeGroup(self.members))
        for _ in range(WARM_UP_STEPS):
            rank.step()
        return rank

    def __getitem__(self, rank: int) -> ComparedRank:
        return self.all[rank]

    def exchange(self, *silent: int, times: int = 1) -> None:
        """Run exchanges, in which all ranks except for some poll."""
        for _ in range(times * POLLS_PER_EXCHANGE):
            for rank in self.all:
                if rank.rank not in silent:
                    rank.poll()
            self.clock.seconds += INTERVAL_SECONDS / POLLS_PER_EXCHANGE
