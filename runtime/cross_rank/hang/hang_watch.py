"""Looks for hangs each second, and when there is one counts, tells, reports and may abort.

Everything it looks at is there already: a look takes some microseconds and waits for nobody. What
may block, the disk and the log, has a thread of its own for the moment of a hang.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from time import perf_counter_ns

from ....metrics.catalog import communication
from ....metrics.catalog.labels import PHASES
from ....metrics.recorder import Recorder
from ....metrics.settings import HangSettings
from ....metrics.step_record import StepRecord
from ...common.fail_open import FailOpen
from ...common.phase_timer import PhaseTimer
from .detector import Detector, Look, State
from .evidence import Evidence, Sources
from .expected_pauses import ExpectedPauses
from .missing_ranks import summary
from .report import write_report
from .stacks import place

logger = logging.getLogger(__name__)

ABORT_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h
FLUSH_SECONDS = 1.0


class HangWatch:
    """Watches one training thread, the one that makes it. Used on the watch thread."""

    def __init__(
        self,
        *,
        rank: int,
        settings: HangSettings,
        clock: PhaseTimer,
        sources: Sources,
        recorder: Recorder,
        fail_open: FailOpen,
        now_ns: Callable[[], int] = perf_counter_ns,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._rank = rank
        self._settings = settings
        self._clock = clock
        self._sources = sources
        self._recorder = recorder
        self._now_ns = now_ns
        self._leave = leave
        self._training_thread = threading.get_ident()
        self._detector = Detector(settings.seconds)
        self._limit_seconds = settings.seconds  # as of the last look, for other threads
        self._pauses = ExpectedPauses(clock, sources)
        self._step = 0
        self._told = False
        self._report = fail_open.wrap("hang report", self._write_and_say)
        self._writing: threading.Thread | None = None
        if settings.enabled:  # from the start: a rate needs a value before the rise
            recorder.add(communication.HANGS, 0)

    @property
    def pause(self) -> str | None:
        """Why this rank may stand still now, for its peers to know; None while it trains.

        Costs a look at the stacks where it stands still; may be asked on any thread.
        """
        still_seconds = (self._now_ns() - self._activity_ns()) / 1e9
        return self._pauses.to_tell(still_seconds, self._limit_seconds)

    def step_ended(self, record: StepRecord) -> None:
        """Take note of a step, on the watch thread."""
        self._step = record.step
        self._detector.step_ended(record.training_seconds)

    def look(self) -> None:
        """Take one look; to be called each second."""
        if not self._settings.enabled:
            return
        now_ns, activity_ns = self._now_ns(), self._activity_ns()
        still_seconds = (now_ns - activity_ns) / 1e9
        limit_seconds = self._limit_seconds = self._detector.limit_seconds
        state = self._detector.look(
            Look(
                now_ns=now_ns,
                activity_ns=activity_ns,
                paused=self._pauses.is_lawful(still_seconds, limit_seconds),
                others_hang=bool(self._sources.others_hang()),
                excused=lambda: self._pauses.is_excused(still_seconds, limit_seconds),
            )
        )
        match state:
            case State.HANG:
                self._on_hang()
            case State.TOLD:
                self._on_told()
            case State.LASTING if self._settings.abort:
                self._end_process()
            case State.MOVED:
                self._go_on()

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Wait a moment for a report that is being written."""
        if self._writing is not None:
            self._writing.join(timeout_seconds)

    def _activity_ns(self) -> int:
        return max(self._clock.since_ns, self._sources.last_activity_ns() or 0)

    def _go_on(self) -> None:
        self._told = False
        self._sources.tell_others(False)
        _aside("zerowatch-hang", lambda: logger.warning("rank %d moves again", self._rank))

    def _on_hang(self) -> None:
        self._recorder.add(communication.HANGS, 1)
        if not self._told:  # else the report is written, and all others are told too
            self._sources.tell_others(True)
            self._write_aside(told=False)

    def _on_told(self) -> None:
        self._told = True
        self._write_aside(told=True)

    def _write_aside(self, *, told: bool) -> None:
        evidence = self._evidence(told=told)
        self._writing = _aside("zerowatch-hang", lambda: self._report(evidence))

    def _evidence(self, *, told: bool) -> Evidence:
        return Evidence(
            rank=self._rank,
            host=socket.gethostname(),
            at_unix_seconds=time.time(),
            step=self._step,
            phase=PHASES[self._clock.current],
            silent_seconds=self._detector.silent_seconds,
            limit_seconds=self._detector.limit_seconds,
            told=told,
            divergence=self._sources.divergence(),
            place=place(self._training_thread),
            peers=self._sources.peers(),
            groups={group.key: group for group in self._sources.groups() or ()},
            calls=self._sources.last_calls() or (),
        )

    def _write_and_say(self, evidence: Evidence) -> None:
        """Write the report, then say in one line what it says and where it is."""
        folder, path, trouble = self._sources.folder(), None, "no run folder is written"
        if folder is not None:
            trouble = "this rank has written as many as a run keeps"
            try:
                path = write_report(folder, evidence, self._sources.flight_dump)
            except OSError as error:
                trouble = f"it cannot be written: {error}"
        where = f"report: {path}" if path is not None else f"no report, as {trouble}"
        logger.error("training hangs: %s (%s)", summary(evidence), where)

    def _end_process(self) -> None:
        """End the process at once; neither log nor output may hold that up."""

        def last_words() -> None:
            logger.error(
                "rank %d ends with exit code %d, as hang.abort asks for it",
                self._rank,
                ABORT_EXIT_CODE,
            )
            for handler in (
                *logging.getLogger().handlers,
                *logging.getLogger("zerowatch").handlers,
            ):
                handler.flush()
            sys.stdout.flush()
            sys.stderr.flush()

        self.close()
        _aside("zerowatch-abort", last_words).join(FLUSH_SECONDS)
        self._leave(ABORT_EXIT_CODE)


def _aside(name: str, body: Callable[[], object]) -> threading.Thread:
    """Run something that may block on a thread of its own."""
    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread
