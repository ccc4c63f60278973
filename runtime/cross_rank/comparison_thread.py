"""Compares the ranks' collectives and step times on a thread, over the c10d store.

The thread never waits for another rank. It writes its own reports, and reads only reports that
exist. While the store fails, the thread compares nothing and retries the store from time to time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ...metrics.catalog import communication
from ...metrics.catalog.across_ranks import STATISTICS
from ...metrics.catalog.labels import COMPARED_PHASES
from ...metrics.recorder import Recorder
from ...metrics.settings import CrossRankSettings
from ...metrics.step_record import StepRecord
from ..collectives.groups import Groups, RankSet
from ..collectives.unseen_calls import num_unseen
from ..common.fail_open import FailOpen
from ..common.gil_pauses import let_training_run
from ..common.phase_timer import PhaseTimer
from ..common.rank_store import StoreClientFactory
from .accounting.rank_comm_costs import RankCommCosts
from .exchange.rank_messages import CompareResult, Heartbeat, RankReport
from .exchange.store_channel import PATIENCE_EXCHANGES, StoreChannel
from .exchange.store_log import StoreConnection, excused_seconds
from .rank_figures import Figures, RankFigures
from .rank_statistics import RankStatistics
from .same_losses import LossWindows, SameLosses
from .stragglers import StepTimes, StepTimeSampler, Straggler, compared_rank_set

logger = logging.getLogger(__name__)

# A heartbeat is sent at each poll. Polls are frequent, so a missing heartbeat shows a silent rank.
POLLS_PER_EXCHANGE = 5
MAX_POLL_INTERVAL_SECONDS = 2.0
# Longest wait for results at the end of a run.
CLOSING_SECONDS = 1.0
# Minimum time for which a call waits for its result. The watch threads settle calls once a second,
# and the seconds of two ranks begin at different moments.
MIN_PATIENCE_SECONDS = 4.0
# Time without progress after which a rank reads whether another rank announces a hang. The hang
# limits of ranks differ, so the other rank may find the hang earlier.
IDLE_SECONDS_BEFORE_HEARTBEATS = 5.0
# Minimum time between two exchanges over a FileStore, which only grows, and between two heartbeats
# there while training makes progress. A rank without collectives then writes 2 MiB a day to its
# file, else 15 MiB. Each collective per second adds 0.4 MiB a day, as all durations are sent. An
# interval that is set to less than the default is kept: a short run may need it.
GROWING_STORE_EXCHANGE_SECONDS = 20.0
GROWING_STORE_HEARTBEAT_SECONDS = 10.0
DEFAULT_EXCHANGE_SECONDS = CrossRankSettings().interval_seconds
# Heartbeats that were read longer ago are unknown: the store does not respond.
MAX_READ_AGE_SECONDS = 15.0
# Time in the store after which the store counts as lost: a call of it may wait for ever.
MAX_STORE_SECONDS = 30.0
# Number of times that this rank has sent step times without an answer, after which nothing is known
# of slow ranks. It is greater than the number of times for which the other ranks are waited for.
MAX_UNANSWERED_STEP_TIMES = 8
# Minimum time between two log lines per rank and phase. A change within this time is logged later.
SECONDS_BETWEEN_LINES = 600.0


class ComparisonThread:
    """Exchanges reports with the other ranks from `start` until `stop`.

    The overhead metric contains the thread's CPU time as part `cross_rank_thread`.

    Args:
        clients: Creates clients of the c10d store for this thread alone. If None, nothing is
            compared.
        rank: This rank.
        world_size: Number of ranks of the job.
        host: This rank's host.
        groups: The process groups seen so far.
        phase_timer: Measures the time without progress. Heartbeats are read if it is long.
        recorder: Receives the metric values.
        fail_open: Guards the functions that run on this thread.
        interval_seconds: Time between two exchanges.
        stuck_seconds: Time without progress after which the heartbeats of other ranks are read.
        now: A monotonic clock, in seconds.

    Attributes:
        step_times: Collects this rank's steps.
        volume_ratio: Wire bytes of a step, divided by the reference volume. None until known. Any
            thread may set it.
        expected_pause: Returns the reason why this rank is expected to make no progress now, or
            None while it trains. Must be set before `start`.
        is_silent: Returns whether this rank does not run now, though this thread does. It then
            sends nothing, so that the other ranks see a silent rank. Must be set before `start`.
        counts_unseen: Whether heartbeats have the calls that no wrapper sees, such as those of DDP.
            Must be set before `start`.
        cpu_seconds: CPU time that this thread has used.
    """

    def __init__(
        self,
        *,
        clients: StoreClientFactory | None,
        rank: int,
        world_size: int,
        host: str,
        groups: Groups,
        phase_timer: PhaseTimer,
        recorder: Recorder,
        fail_open: FailOpen,
        interval_seconds: float,
        stuck_seconds: float,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.step_times = StepTimeSampler()
        self.volume_ratio: float | None = None
        self.expected_pause: Callable[[], str | None] = lambda: None
        self.is_silent: Callable[[], bool] = lambda: False
        self.counts_unseen = False
        self.cpu_seconds = 0.0
        self._rank, self._world_size, self._host = rank, world_size, host
        self._groups = groups
        self._phase_timer = phase_timer
        self._recorder = recorder
        self._interval_seconds = interval_seconds
        self._patience_seconds = max(PATIENCE_EXCHANGES * interval_seconds, MIN_PATIENCE_SECONDS)
        self._heartbeat_seconds = 0.0  # minimum time between two heartbeats; 0 for each poll
        self._stuck_seconds = stuck_seconds
        self._now = now
        self._accounting = RankCommCosts(groups, recorder, now)
        # Another thread uses `_accounting` only while this one is in the store. The other clears
        # `_is_free` before it looks whether this one is there, and this one leaves the store before
        # it waits for `_is_free`. So no lock is held while `_accounting` pauses.
        self._in_store_since: float | None = None
        self._late_since: float | None = None  # at the last look of the other thread
        self._is_free = threading.Event()
        self._is_free.set()
        if clients is not None:
            recorder.start_counters((communication.EXCHANGE_FAILURES,))
        self._reporter = CompareReporter(recorder, rank, now)
        self._statistics = RankStatistics(recorder)
        self._figures = RankFigures(recorder, now)
        self._read_figures = fail_open.wrap("rank figures", self._figures.read)
        self._loss_windows = LossWindows()
        self._publish_same_losses = fail_open.wrap(
            "same losses", SameLosses(recorder, world_size).publish
        )
        self._publish_statistics = fail_open.wrap("rank statistics", self._statistics.publish)
        self._connection = None if clients is None else StoreConnection(clients, now)
        self._channel: StoreChannel | None = None
        self._own_step_times: StepTimes | None = None
        self._is_store_lost = self._hangs = self._stopping = False
        self._next_exchange = self._next_heartbeat = 0.0
        self._read_at = self._polled_at = now()
        self._last_step = 0
        self._wake = threading.Event()
        self._num_requested = self._num_done = 0  # reports that `report_now` waits for
        self._connect = fail_open.wrap("cross_rank", self._connect_once)
        self._poll = fail_open.wrap("cross_rank", self._poll_once)
        self._thread = fail_open.thread("cross-rank", self._run)

    @property
    def peers(self) -> Mapping[int, Heartbeat]:
        """Last heartbeats of other ranks by rank. Read only while training makes no progress."""
        channel = self._responding_channel
        return {} if channel is None else channel.peers

    @property
    def rank_figures(self) -> Mapping[int, Figures]:
        """The last figures of all ranks, on rank 0; else empty. Any thread may read them."""
        return self._statistics.figures

    @property
    def stragglers(self) -> Sequence[Straggler]:
        """The slow ranks of the rank set over which this rank's step times are compared."""
        return self._reporter.stragglers

    @property
    def divergence(self) -> str | None:
        """A message that names the ranks whose collectives diverged, or None if none diverged."""
        return self._reporter.divergence

    @property
    def others_hang(self) -> bool:
        """Whether another rank announces a hang."""
        channel = self._responding_channel
        return channel is not None and channel.others_hang

    def compare_losses(self) -> None:
        """Compare the losses of the ranks, because each of them should have its own data."""
        self._figures.read_losses = lambda: self._loss_windows.last

    def on_step(self, record: StepRecord) -> None:
        """Add a step and its loss, on the watch thread."""
        self._last_step = record.step
        self._loss_windows.add(record.step, record.loss)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def account_if_stuck(self) -> None:
        """Add up the costs of calls as if nothing were compared, if the store does not respond.

        Must be called each second on another thread: this one may wait for the store for ever. The
        store is lost at the second late look only, because the process may just have been stopped.
        """
        since, before = self._in_store_since, self._late_since
        is_late = since is not None and self._now() - since > MAX_STORE_SECONDS
        self._late_since = since if is_late else None
        if self._stopping or not is_late or since != before:
            return
        self._is_free.clear()
        try:
            if self._in_store_since == since:
                self._account_without_store()
        finally:
            self._is_free.set()

    def _account_without_store(self) -> None:
        if not self._is_store_lost:
            self._lose_store("no answer")
            if self._rank == 0:
                self._publish_statistics({})
        self._accounting.drain_reports(is_compared=False)
        self._accounting.expire(0.0, is_compared=False)
        with self._recorder.commit():
            self._accounting.publish(is_compared=False)

    def stop(self) -> None:
        """Send a last report, wait up to a second for results, and end the thread.

        Safe to call twice.
        """
        self._stopping = True
        if self._connection is not None:  # no call may outlive the interpreter
            self._connection.set_timeout(CLOSING_SECONDS)
        self._wake.set()
        self._thread.join(2 * CLOSING_SECONDS)

    def report_now(self) -> None:
        """Send a report at once, and wait up to a second until it is sent. Any thread may call."""
        self._num_requested += 1
        requested, end = self._num_requested, time.monotonic() + CLOSING_SECONDS
        self._next_exchange = 0.0
        self._wake.set()
        while self._num_done < requested and time.monotonic() < end and self._thread.is_alive():
            time.sleep(0.005)

    def announce_hang(self, hangs: bool) -> None:
        """Announce to the other ranks, from the next poll on, whether this rank hangs."""
        self._hangs = hangs

    def _run(self) -> None:
        self._connect()
        while not self._stopping:
            self._wake.wait(poll_interval_seconds(self._interval_seconds))
            self._wake.clear()
            if not self.is_silent():
                self._poll()
            self.cpu_seconds = time.thread_time()
        self._close()

    def _close(self) -> None:
        end = time.monotonic() + CLOSING_SECONDS
        self._next_exchange = 0.0
        self._poll()
        while self._is_compared and self._accounting.has_pending() and time.monotonic() < end:
            time.sleep(CLOSING_SECONDS / 20)
            self._poll()
        self._patience_seconds = 0.0
        self._poll()
        if self._connection is not None:
            if (channel := self._open_channel) is not None:
                with self._store_may_fail(self._connection):
                    channel.post_last_report()
            self._connection.close_for_good()
        self.cpu_seconds = time.thread_time()

    @property
    def _open_channel(self) -> StoreChannel | None:
        connection = self._connection  # after a failure, the channel waits for the store to respond
        return self._channel if connection is not None and connection.is_open else None

    @property
    def _responding_channel(self) -> StoreChannel | None:
        """The channel, unless the store has not responded for a while."""
        is_old = self._now() - self._read_at > MAX_READ_AGE_SECONDS
        return None if is_old else self._open_channel

    @property
    def _is_compared(self) -> bool:
        return self._open_channel is not None

    @property
    def _awaits_namespace(self) -> bool:
        """Whether the first connection is expected soon. Calls are kept until then."""
        connection = self._connection
        if connection is None or connection.is_open or self._is_store_lost or self._stopping:
            return False
        return self._now() - connection.opened_at < self._patience_seconds

    def _connect_once(self) -> None:
        """Connect if an attempt is due. After a failure, the channel's logs continue."""
        connection = self._connection
        if connection is None or self._stopping or connection.is_open:
            return
        with self._store_may_fail(connection):
            connection.open()
            if connection.is_open:
                if connection.only_grows and self._interval_seconds >= DEFAULT_EXCHANGE_SECONDS:
                    self._write_less()
                self._channel = self._channel or self._new_channel(connection)

    def _write_less(self) -> None:
        self._interval_seconds = max(self._interval_seconds, GROWING_STORE_EXCHANGE_SECONDS)
        self._patience_seconds = PATIENCE_EXCHANGES * self._interval_seconds
        self._heartbeat_seconds = GROWING_STORE_HEARTBEAT_SECONDS

    def _new_channel(self, connection: StoreConnection) -> StoreChannel:
        return StoreChannel(
            connection,
            rank=self._rank,
            world_size=self._world_size,
            host=self._host,
            patience_seconds=PATIENCE_EXCHANGES * self._interval_seconds,
            stuck_seconds=self._stuck_seconds,
            recorder=self._recorder,
        )

    def _poll_once(self) -> None:
        now, requested = self._now(), self._num_requested
        gap_seconds, self._polled_at = now - self._polled_at, now
        if excused := excused_seconds(gap_seconds, self._patience_seconds):
            self._accounting.excuse(excused)
        self._accounting.volume_ratio = self.volume_ratio
        is_due = now >= self._next_exchange
        if is_due:
            self._leave_old_namespace()
        self._connect_once()
        let_training_run()
        if is_due and not self._awaits_namespace:
            self._next_exchange = now + self._interval_seconds
            self._report()
            self._num_done = requested
        let_training_run()
        self._accounting.poll(is_compared=self._is_compared)
        let_training_run()
        if self._connection is not None and (channel := self._open_channel) is not None:
            self._read(self._connection, channel)
        let_training_run()
        is_compared = self._is_compared
        self._accounting.expire(
            self._patience_seconds if is_compared else 0.0, is_compared=is_compared
        )
        let_training_run()
        with self._recorder.commit():
            self._accounting.publish(is_compared=is_compared)

    def _leave_old_namespace(self) -> None:
        """Start over if the ranks have changed to another namespace of the store."""
        connection = self._connection
        if connection is None or not connection.is_open:
            return
        with self._store_may_fail(connection):
            if connection.has_moved():
                connection.close()
                self._channel = None

    def _report(self) -> None:
        calls, names = self._accounting.drain_reports(is_compared=self._is_compared)
        let_training_run()
        new_step_times = self.step_times.drain()
        self._own_step_times = new_step_times or self._own_step_times
        if new_step_times is not None:
            self._reporter.expect_reference()
        if self._connection is None:
            return
        let_training_run()
        own_figures = self._read_figures()
        let_training_run()
        figures = {} if own_figures is None else {self._rank: own_figures}
        if (channel := self._open_channel) is not None:
            figures |= channel.known_figures()
        if self._rank == 0:
            self._publish_statistics({} if channel is None else figures)
            let_training_run()
            self._publish_same_losses(figures)
            figures = {}  # nobody reads them
        if channel is None:
            return
        let_training_run()
        step_times = {} if new_step_times is None else {self._rank: new_step_times}
        report = RankReport(calls=calls, names=names, step_times=step_times, figures=figures)
        with self._store_may_fail(self._connection):
            channel.post_report(report)

    def _read(self, connection: StoreConnection, channel: StoreChannel) -> None:
        rank_sets = self._groups.rank_sets()
        results: list[tuple[RankSet, CompareResult]] = []
        with self._store_may_fail(connection):
            results = channel.poll(rank_sets, compared_rank_set(rank_sets))
        for rank_set, result in results:
            self._accounting.match(rank_set, result)
            self._reporter.publish(rank_set, result, self._own_step_times)
            let_training_run()
        let_training_run()
        if connection.is_open:
            with self._store_may_fail(connection):
                self._exchange_heartbeats(channel, rank_sets)

    def _exchange_heartbeats(self, channel: StoreChannel, rank_sets: Sequence[RankSet]) -> None:
        idle_seconds = self._phase_timer.idle_seconds()
        is_idle = idle_seconds > min(self._stuck_seconds, IDLE_SECONDS_BEFORE_HEARTBEATS)
        if is_idle or self._now() >= self._next_heartbeat:
            self._next_heartbeat = self._now() + self._heartbeat_seconds
            channel.post_heartbeat(
                self._accounting.issued(),
                self.expected_pause(),
                self._last_step,
                num_unseen(self._groups) if self.counts_unseen else {},
                self._heartbeat_seconds,
            )
        silence_seconds = channel.longest_silence_seconds()
        self._recorder.set(communication.PEER_HEARTBEAT_AGE, silence_seconds)
        if self._hangs:
            channel.announce_hang()
        if is_idle:
            channel.poll_heartbeats(rank_sets, is_stuck=idle_seconds > self._stuck_seconds)
        else:
            channel.clear_heartbeats()
        self._read_at = self._now()
        if self._is_store_lost:
            self._is_store_lost = False
            logger.info("c10d store responds again: comparison with other ranks resumed")

    @contextmanager
    def _store_may_fail(self, connection: StoreConnection) -> Iterator[None]:
        """If the store does not respond, stop using the store for a while.

        The body must not change `_accounting`, as `account_if_stuck` may do so meanwhile. At the
        end of a run, the process that hosts the store may exit first. That is not a failure.
        """
        try:
            self._in_store_since = self._now()
            try:
                yield
            finally:
                self._in_store_since = None
                self._is_free.wait()
        except RuntimeError as error:
            connection.mark_failed()
            if self._stopping:
                return
            self._lose_store(error)

    def _lose_store(self, why: object) -> None:
        """Count a failure of the store, and withdraw what the last comparison has found."""
        self._recorder.add(communication.EXCHANGE_FAILURES, 1, "store")
        self._recorder.remove(communication.PEER_HEARTBEAT_AGE)
        self._reporter.withdraw()
        if not self._is_store_lost:
            self._is_store_lost = True
            logger.info("c10d store does not respond: comparison with other ranks paused (%s)", why)


def figures_by_name(by_rank: Mapping[int, Figures]) -> dict[int, dict[str, float]]:
    """Return the known figures of each rank by their names (`across_ranks.STATISTICS`)."""
    return {
        rank: {
            name: value
            for name, value in zip(STATISTICS, figures[: len(STATISTICS)].tolist(), strict=True)
            if not math.isnan(value)
        }
        for rank, figures in by_rank.items()
    }


def slow_phases(stragglers: Sequence[Straggler]) -> dict[int, dict[str, float]]:
    """Return by rank the phases in which it is slow, with its score."""
    slow: dict[int, dict[str, float]] = {}
    for straggler in stragglers:
        slow.setdefault(straggler.rank, {})[straggler.phase] = straggler.score
    return slow


class CompareReporter:
    """Publishes the results of comparisons as metrics and log lines.

    Each rank publishes its metrics; only the first rank of a rank set logs.

    Attributes:
        divergence: A message that names the ranks whose collectives diverged, or None.
        stragglers: The ranks that are slow now.
    """

    def __init__(
        self, recorder: Recorder, rank: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.divergence: str | None = None
        self.stragglers: Sequence[Straggler] = ()
        self._recorder = recorder
        self._rank = rank
        self._now = now
        self._logged: set[tuple[int, str]] = set()  # stragglers, by rank and phase
        self._logged_at: dict[tuple[int, str], float] = {}
        self._num_unanswered = 0  # step times of this rank since the last reference
        recorder.start_counters((communication.COLLECTIVE_MISMATCHES,))

    def publish(
        self, rank_set: RankSet, result: CompareResult, own_step_times: StepTimes | None
    ) -> None:
        """Publish a result. `own_step_times` are the step times that this rank reported last."""
        logs = self._rank == rank_set.members[0]
        if result.divergence is not None:
            self._recorder.add(communication.COLLECTIVE_MISMATCHES, 1)
            self.divergence = result.divergence.message(rank_set.role)
            if logs:
                logger.error("%s", self.divergence)
        if result.reference is not None:
            self.stragglers, self._num_unanswered = result.stragglers, 0
            if own_step_times is not None:
                scores = result.reference.scores(own_step_times)
                for phase, score in zip(COMPARED_PHASES, scores, strict=True):
                    self._recorder.set(communication.STRAGGLER_SCORE, score, phase)
            if logs:
                self._log_stragglers(result)

    def expect_reference(self) -> None:
        """Note that this rank sends step times. Without an answer for long, nothing is known."""
        self._num_unanswered += 1
        if self._num_unanswered > MAX_UNANSWERED_STEP_TIMES:
            self.withdraw()

    def withdraw(self) -> None:
        """Remove what is known of slow ranks, because the ranks are no longer compared."""
        self.stragglers = ()
        for phase in COMPARED_PHASES:
            self._recorder.remove(communication.STRAGGLER_SCORE, phase)

    def _log_stragglers(self, result: CompareResult) -> None:
        """Log which ranks have become slow, and which ranks are no longer slow."""
        slow = {(straggler.rank, straggler.phase): straggler for straggler in result.stragglers}
        for key in sorted(self._logged ^ slow.keys()):
            logged_at = self._logged_at.get(key, -SECONDS_BETWEEN_LINES)
            if self._now() - logged_at < SECONDS_BETWEEN_LINES:
                continue
            self._logged_at[key] = self._now()
            if key in slow:
                logger.warning("%s", slow[key].message())
            else:
                logger.warning("rank %d is no longer slow in %s", *key)
            self._logged ^= {key}


def poll_interval_seconds(exchange_seconds: float) -> float:
    """Return the time between two polls, given the time between two exchanges."""
    return min(exchange_seconds / POLLS_PER_EXCHANGE, MAX_POLL_INTERVAL_SECONDS)
