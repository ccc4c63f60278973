"""The exchange: a thread on which the ranks compare their collectives, over the c10d store.

It waits for nobody: it leaves its own reports there, reads what others have left, and goes on.
While the store fails, this rank's costs are counted alone; now and then it is tried anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch.distributed.distributed_c10d import Store

from ...metrics.catalog import communication
from ...metrics.recorder import Recorder
from ..collectives.groups import RankSet
from ..common.fail_open import FailOpen
from .call_report import RankReport, StepTimes
from .compare_reporter import CompareReporter
from .coordinator_reader import PATIENCE_EXCHANGES
from .heartbeats import Heartbeat
from .local_accounting import LocalAccounting
from .step_times import StepTimeSampler, largest_rank_set
from .store_channel import StoreChannel
from .store_connection import StoreConnection

logger = logging.getLogger(__name__)

# Of the seconds between two exchanges, how many pass between two looks at what others have left.
# Signs of life are left at each look, and must come often enough to be told from silence.
LOOKS_PER_EXCHANGE = 5
MOST_SECONDS_BETWEEN_LOOKS = 2.0
CLOSING_SECONDS = 1.0
# A rank that stands still looks from then on whether another one hangs: that may be sooner found
# there, as the limits differ.
NOTICE_IDLE_SECONDS = 5.0


class CrossRankThread:
    """Runs until `stop`. Made, started and stopped by the watch.

    Args:
        connect: Makes a client of the c10d store for this thread alone; gives None while it is not
            known where the ranks meet. None instead of it compares nothing.
        rank: This rank.
        host: This rank's host.
        rank_sets: Gives the rank sets of ranks seen so far.
        recorder: Where the values are written.
        fail_open: Guards what runs here.
        seconds: Time between two exchanges.
        volume_ratio: Gives wire bytes of a step over the least possible; None while unknown.
        idle_seconds: Gives the time since training last moved.
        stuck_seconds: How long that must be for the others' signs of life to be read.
        moved: Whether the ranks meet elsewhere by now, so that `connect` must be called again.

    Attributes:
        pace: Takes this rank's steps.
        cpu_seconds: CPU time this thread has used.
        pause: Gives why this rank may lawfully stand still, None while it trains; to be replaced
            before `start`.
    """

    def __init__(
        self,
        *,
        connect: Callable[[], Store | None] | None,
        rank: int,
        host: str,
        rank_sets: Callable[[], Iterable[RankSet]],
        recorder: Recorder,
        fail_open: FailOpen,
        seconds: float,
        volume_ratio: Callable[[], float | None],
        idle_seconds: Callable[[], float],
        stuck_seconds: float,
        moved: Callable[[], bool] = lambda: False,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pace = StepTimeSampler()
        self.cpu_seconds = 0.0
        self.pause: Callable[[], str | None] = lambda: None
        self._stuck_seconds = stuck_seconds
        self._moved = moved
        self._rank, self._host = rank, host
        self._rank_sets = rank_sets
        self._recorder = recorder
        self._seconds = seconds
        self._patience_seconds = PATIENCE_EXCHANGES * seconds
        self._idle_seconds = idle_seconds
        self._now = now
        self._books = LocalAccounting(
            rank_sets, recorder, volume_ratio, now, lambda: self._is_compared
        )
        self._announcer = CompareReporter(recorder, rank, now)
        self._connection = None if connect is None else StoreConnection(connect, now)
        self._letters: StoreChannel | None = None
        self._own_pace: StepTimes | None = None
        self._lost = self._hangs = self._stopping = False
        self._due = 0.0
        self._wake = threading.Event()
        self._asked = self._answered = 0  # reports that somebody waits for
        self._open = fail_open.wrap("cross_rank", self._reach_store)
        self._look = fail_open.wrap("cross_rank", self._look_once)
        self._thread = threading.Thread(target=self._run, name="zerowatch-exchange", daemon=True)

    @property
    def peers(self) -> Mapping[int, Heartbeat]:
        """The others' last signs of life, by rank; read only while training does not move."""
        letters = self._open_letters
        return {} if letters is None else letters.peers

    @property
    def divergence(self) -> str | None:
        """Who left the common sequence of collectives, in words; None while nobody did."""
        return self._announcer.divergence

    @property
    def others_hang(self) -> bool:
        """Whether another rank has told that it hangs."""
        letters = self._open_letters
        return letters is not None and letters.others_hang

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Tell what is left, wait a moment for the answer, and end. Safe to call twice."""
        self._stopping = True
        if self._connection is not None:  # no call may outlive the interpreter
            self._connection.set_timeout(CLOSING_SECONDS)
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * CLOSING_SECONDS)

    def report_now(self) -> None:
        """Report at once, and return when that is done, or after a moment in any case."""
        self._asked += 1
        asked, end = self._asked, time.monotonic() + CLOSING_SECONDS
        self._due = 0.0
        self._wake.set()
        while self._answered < asked and time.monotonic() < end and self._thread.is_alive():
            time.sleep(0.005)

    def tell_of_hang(self, hangs: bool) -> None:
        """Let the others know, from the next look on, whether this rank hangs."""
        self._hangs = hangs

    def _run(self) -> None:
        self._open()
        while not self._stopping:
            self._wake.wait(seconds_between_looks(self._seconds))
            self._wake.clear()
            self._look()
            self.cpu_seconds = time.thread_time()
        self._close()

    def _close(self) -> None:
        end = time.monotonic() + CLOSING_SECONDS
        self._due = 0.0
        self._look()
        while self._is_compared and self._books.waits() and time.monotonic() < end:
            time.sleep(CLOSING_SECONDS / 20)
            self._look()
        self._patience_seconds = 0.0
        self._look()
        self.cpu_seconds = time.thread_time()

    @property
    def _open_letters(self) -> StoreChannel | None:
        connection = self._connection  # what was left unread waits for the store to answer again
        return self._letters if connection is not None and connection.is_open else None

    @property
    def _is_compared(self) -> bool:
        return self._open_letters is not None

    @property
    def _awaits_place(self) -> bool:
        """Whether it will soon be known where the ranks meet: until then calls are kept."""
        connection = self._connection
        if connection is None or connection.is_open or self._lost or self._stopping:
            return False
        return self._now() - connection.since < self._patience_seconds

    def _reach_store(self) -> None:
        """Connect where that is due; after a failure, whatever was told before goes on."""
        connection = self._connection
        if connection is None or self._stopping or connection.is_open:
            return
        with self._store_may_fail(connection):
            connection.open()
            if connection.is_open:
                self._letters = self._letters or self._new_letters(connection)
                if self._lost:
                    self._lost = False
                    logger.info("the c10d store answers again: this rank is compared again")

    def _new_letters(self, connection: StoreConnection) -> StoreChannel:
        return StoreChannel(
            connection,
            rank=self._rank,
            host=self._host,
            patience_seconds=PATIENCE_EXCHANGES * self._seconds,
            stuck_seconds=self._stuck_seconds,
            on_failure=lambda: self._count_failure("peer"),
            now=self._now,
        )

    def _look_once(self) -> None:
        now, asked = self._now(), self._asked
        is_due = now >= self._due
        if is_due:
            self._follow_the_others()
        self._reach_store()
        if is_due and not self._awaits_place:
            self._due = now + self._seconds
            self._report()
            self._answered = asked
        self._books.follow()
        if self._connection is not None and (letters := self._open_letters) is not None:
            with self._store_may_fail(self._connection):
                self._read(letters)
        self._books.give_up(self._patience_seconds if self._is_compared else 0.0)
        with self._recorder.commit():
            self._books.publish()

    def _follow_the_others(self) -> None:
        """Begin anew where the ranks meet elsewhere by now."""
        connection = self._connection
        if connection is None or not connection.is_open:
            return
        with self._store_may_fail(connection):
            if self._moved():
                connection.leave()
                self._letters = None

    def _report(self) -> None:
        sections, names = self._books.take_sections()
        new_pace = self.pace.take()
        self._own_pace = new_pace or self._own_pace
        if self._connection is None or (letters := self._open_letters) is None:
            return
        paces = {} if new_pace is None else {self._rank: new_pace}
        with self._store_may_fail(self._connection):
            letters.report(RankReport(sections=sections, names=names, paces=paces))

    def _read(self, letters: StoreChannel) -> None:
        rank_sets = list(self._rank_sets())
        for rank_set, verdict in letters.read(rank_sets, largest_rank_set(rank_sets)):
            self._books.match(rank_set, verdict)
            self._announcer.announce(rank_set, verdict, self._own_pace)
        letters.beat(self._books.arrived(), self.pause())
        self._recorder.set(communication.PEER_HEARTBEAT_AGE, letters.silence())
        if self._hangs:
            letters.tell_of_hang()
        idle_seconds = self._idle_seconds()
        if idle_seconds > min(self._stuck_seconds, NOTICE_IDLE_SECONDS):
            letters.look_for_peers(rank_sets, is_stuck=idle_seconds > self._stuck_seconds)
        else:
            letters.forget_peers()

    @contextmanager
    def _store_may_fail(self, connection: StoreConnection) -> Iterator[None]:
        """Do without the store for a while if it does not answer.

        At the end of a run its host may be gone first, which is no failure.
        """
        try:
            yield
        except RuntimeError as error:
            connection.lose()
            if self._stopping:
                return
            self._count_failure("store")
            if not self._lost:
                self._lost = True
                logger.info("the c10d store does not answer (%s); ranks are not compared", error)

    def _count_failure(self, reason: str) -> None:
        self._recorder.add(communication.EXCHANGE_FAILURES, 1, reason)


def seconds_between_looks(seconds_between_exchanges: float) -> float:
    """Return how often to look at what others have left, and to leave a sign of life."""
    return min(seconds_between_exchanges / LOOKS_PER_EXCHANGE, MOST_SECONDS_BETWEEN_LOOKS)
