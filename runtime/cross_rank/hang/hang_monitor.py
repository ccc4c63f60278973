"""Checks each second whether training hangs. On a hang it writes a report, and may abort.

A check only reads memory, and takes some microseconds. If it has to ask the driver, as for the
report, another thread asks, and the check waits for at most two seconds. Writing the report and the
log lines may block, so they are written on a thread of their own. The watch thread writes files, so
it may block, too: another thread then checks instead of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns

from ....metrics.catalog import communication, training
from ....metrics.catalog.labels import PHASES
from ....metrics.recorder import Recorder
from ....metrics.settings import HangSettings
from ....metrics.step_record import StepRecord
from ...common.exit_notes import ExitNote, write_exit_note
from ...common.fail_open import FailOpen
from ...common.liveness_file import current_process
from ...common.phase_timer import PhaseTimer
from .expected_pauses import ExpectedPauses
from .hang_context import HangContext
from .hang_detector import HangDetector, HangState, ProgressSample
from .hang_evidence import HangEvidence
from .hang_report import note_resumed, summary, write_flight_recorder_dump, write_report
from .missing_ranks import awaited_rank
from .thread_stacks import python_location

logger = logging.getLogger(__name__)

ABORT_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h
# Time between two looks whether the watch thread still checks: less than the longest accepted gap
# between two samples. Time between two checks instead of that thread.
LOOK_SECONDS = 2.0
CHECK_SECONDS = 1.0
# Longest wait for a report that is being written.
REPORT_SECONDS = 2.0
# Longest wait for the log before the process ends.
FLUSH_SECONDS = 1.0


class HangMonitor:
    """Detects hangs of the training thread.

    It must be created on the training thread. Its methods run on the watch thread. If `start` was
    called, a thread of its own checks while the watch thread does not.

    Args:
        context: Provides the collectives, the peers and the run folder.
        settings: The settings.
        phase_timer: The phases of the training thread.
        recorder: Counts the hangs.
        fail_open: Guards the writing of the report.
        now_ns: The clock that `phase_timer` uses.
        exit_process: Ends the process at once with an exit code.
        on_hang: Called once per hang with a sentence about it. It must not raise.
        is_ready: Returns whether the run folder and the other ranks may be known. Until then,
            checks do nothing.
    """

    def __init__(
        self,
        *,
        context: HangContext,
        settings: HangSettings,
        phase_timer: PhaseTimer,
        recorder: Recorder,
        fail_open: FailOpen,
        now_ns: Callable[[], int] = perf_counter_ns,
        exit_process: Callable[[int], object] = os._exit,
        on_hang: Callable[[str], object] = lambda _: None,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._context = context
        self._settings = settings
        self._phase_timer = phase_timer
        self._recorder = recorder
        self._now_ns = now_ns
        self._exit_process = exit_process
        self._on_hang_found, self._is_ready = on_hang, is_ready
        self._detector = HangDetector(settings.timeout_seconds)
        self._limit_seconds = settings.timeout_seconds  # at the last check; read by other threads
        self._pauses = ExpectedPauses(phase_timer, context)
        self._step = 0
        self._is_announced = False
        self._report = fail_open.wrap("hang report", self._write_and_log)
        self._writing: threading.Thread | None = None
        self._last_report: Path | None = None
        self._is_checking = settings.enabled
        self._lock = threading.Lock()  # of the detector
        self._num_checks = 0
        self._is_closed = threading.Event()
        self._check_guarded = fail_open.wrap("hang", self.check)
        self._thread = fail_open.thread("hang-checks", self._check_if_late)
        if settings.enabled:
            recorder.start_counters((communication.HANGS,))
            recorder.set(communication.HANG_ACTIVE, 0)

    def start(self) -> None:
        """Start the thread that checks if nothing else does, such as while a disk does not respond.

        Raises:
            RuntimeError: The system allows no more threads.
        """
        if self._settings.enabled:
            self._context.start()
            self._thread.start()

    def expected_pause(self) -> str | None:
        """Return the reason why no progress is expected now, or None while the rank trains.

        The reason is sent to the peers. Reads all stacks if there is no progress. May be called on
        any thread.
        """
        idle_seconds = (self._now_ns() - self._activity_ns()) / 1e9
        return self._pauses.announced(idle_seconds, self._limit_seconds)

    def on_step_end(self, record: StepRecord) -> None:
        """Call `add_step` with the step of a record."""
        self.add_step(record.step, record.training_seconds)

    def add_step(self, step: int, training_seconds: float) -> None:
        """Update the limit with the duration of a step that has ended."""
        with self._lock:
            self._step = step
            self._detector.add_step(training_seconds)

    def check(self) -> None:
        """Check once for a hang. Must be called each second."""
        if self._is_checking:
            with self._lock:
                self._num_checks += 1
                if self._is_ready():
                    self._check()

    def _check(self) -> None:
        now_ns, activity_ns = self._now_ns(), self._activity_ns()
        idle_seconds = (now_ns - activity_ns) / 1e9
        limit_seconds = self._limit_seconds = self._detector.limit_seconds
        sample = ProgressSample(
            now_ns=now_ns,
            activity_ns=activity_ns,
            is_pause=self._pauses.is_expected(idle_seconds, limit_seconds),
            others_hang=bool(self._context.others_hang()),
        )
        state = self._detector.update(
            sample, lambda: self._pauses.is_busy(idle_seconds, limit_seconds)
        )
        match state:
            case HangState.HANG:
                self._on_hang()
            case HangState.ANNOUNCED:
                self._on_announced()
            case HangState.ABORT_LIMIT if self._settings.abort:
                self._abort()
            case HangState.RESUMED:
                self._on_resumed()

    def stop_checks(self) -> None:
        """Check no more: what happens at the end of monitoring is no progress of training."""
        self._is_checking = False

    def close(self, timeout_seconds: float = REPORT_SECONDS) -> None:
        """End a hang, and wait up to `timeout_seconds` for a report that is being written."""
        self._is_closed.set()
        self._thread.join(timeout_seconds)
        if self._settings.enabled:
            self._set_no_hang()
        self._wait_for_report(timeout_seconds)
        self._context.close()  # last: the report asks the driver, too

    def _check_if_late(self) -> None:
        """Check once a second while nothing else checks. Else only look from time to time."""
        num_seen, seconds = 0, LOOK_SECONDS
        while not self._is_closed.wait(seconds):
            is_late = self._num_checks == num_seen
            if is_late:
                self._check_guarded()
            seconds = CHECK_SECONDS if is_late else LOOK_SECONDS
            num_seen = self._num_checks

    def _set_no_hang(self) -> None:
        self._recorder.set(communication.HANG_ACTIVE, 0)
        self._recorder.remove(communication.HANG_AWAITED_RANK)

    def _wait_for_report(self, timeout_seconds: float) -> None:
        if self._writing is not None:
            self._writing.join(timeout_seconds)

    def _activity_ns(self) -> int:
        return max(self._phase_timer.activity_ns, self._context.last_activity_ns() or 0)

    def _on_hang(self) -> None:
        with self._recorder.commit():
            self._recorder.add(communication.HANGS, 1)
            self._recorder.set(communication.HANG_ACTIVE, 1)
        if not self._is_announced:  # else the report is written and the others know of it
            self._context.announce_hang(True)
            self._start_report(is_announced=False)

    def _on_announced(self) -> None:
        self._is_announced = True
        self._start_report(is_announced=True)

    def _on_resumed(self) -> None:
        self._is_announced = False
        self._set_no_hang()
        self._context.announce_hang(False)
        _run_on_thread("zerowatch-hang", self._note_and_log_resumed)

    def _note_and_log_resumed(self) -> None:
        self._wait_for_report(REPORT_SECONDS)
        report, self._last_report = self._last_report, None
        if report is not None:
            note_resumed(report, time.time())
        logger.warning("rank %d: training resumed", self._context.rank)

    def _start_report(self, *, is_announced: bool) -> None:
        evidence = self._evidence(is_announced=is_announced)
        awaited = awaited_rank(evidence)
        if awaited is not None:
            self._recorder.set(communication.HANG_AWAITED_RANK, awaited)
        self._on_hang_found(summary(evidence))
        self._writing = _run_on_thread("zerowatch-hang", lambda: self._report(evidence))

    def _evidence(self, *, is_announced: bool) -> HangEvidence:
        context = self._context
        rank_sets = context.rank_sets() or ()
        calls = context.last_calls() if rank_sets else ()
        is_driver_blocked = context.is_driver_blocked()  # at once: the driver may answer later
        return HangEvidence(
            rank=context.rank,
            host=socket.gethostname(),
            at_unix_seconds=time.time(),
            step=self._step,
            phase=PHASES[self._phase_timer.current],
            silent_seconds=self._detector.silent_seconds,
            limit_seconds=self._detector.limit_seconds,
            is_announced=is_announced,
            divergence=context.divergence(),
            location=python_location(self._phase_timer.training_thread),
            peers=context.peers(),
            rank_sets={rank_set.key: rank_set for rank_set in rank_sets},
            calls=calls or (),
            is_driver_blocked=is_driver_blocked,
        )

    def _write_and_log(self, evidence: HangEvidence) -> None:
        """Log the summary, then write the report and log its path: a disk may not respond."""
        logger.error("training hangs: %s", summary(evidence))
        folder, path, reason = self._context.folder(), None, "no run folder is written"
        if folder is not None:
            reason = "this rank has written as many as a run keeps"
            try:
                path = write_report(folder, evidence)
            except OSError as error:
                reason = f"it cannot be written: {error}"
        self._last_report = path
        if path is not None and (dump := self._context.flight_recorder_dump()) is not None:
            write_flight_recorder_dump(path, dump)
        where = f"report: {path}" if path is not None else f"no report: {reason}"
        logger.error("rank %d hangs; %s", self._context.rank, where)

    def _abort(self) -> None:
        """End the process at once. Neither the log nor other output may delay the end."""
        self._recorder.set_info(training.RUN_END_INFO, "hang_abort")
        self._wait_for_report(REPORT_SECONDS)
        bodies = (self._note_abort, self._log_abort_and_flush)
        for thread in [_start_thread("zerowatch-abort", body) for body in bodies]:
            if thread is not None:
                thread.join(FLUSH_SECONDS)
        self._exit_process(ABORT_EXIT_CODE)

    def _note_abort(self) -> None:
        """Write a note for the next start of the job, which reports ranks that exited uncleanly."""
        text = f"ended itself with code {ABORT_EXIT_CODE}, as training hung and hang.abort is set"
        folder = self._context.folder()
        process = current_process(self._context.rank, socket.gethostname())
        if folder is not None and process is not None:
            note = ExitNote(text=text, may_be_oom_kill=False)
            with contextlib.suppress(OSError):
                write_exit_note(folder, process, "hang", note)

    def _log_abort_and_flush(self) -> None:
        rank = self._context.rank
        logger.error("rank %d exits with code %d, as hang.abort is set", rank, ABORT_EXIT_CODE)
        for name in (None, "zerowatch"):
            for handler in logging.getLogger(name).handlers:
                handler.flush()
        sys.stdout.flush()
        sys.stderr.flush()


def _run_on_thread(name: str, body: Callable[[], object]) -> threading.Thread | None:
    """Run a function that may block on a new thread, or here if no thread can be started."""
    thread = _start_thread(name, body)
    if thread is None:
        body()
    return thread


def _start_thread(name: str, body: Callable[[], object]) -> threading.Thread | None:
    """Start a thread and return it. Return None if the system allows no more threads."""
    thread = threading.Thread(target=body, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
