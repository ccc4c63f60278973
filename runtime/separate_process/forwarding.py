"""The part of a watch that remains in the training process, if another one analyses (`serving.py`).

The watch thread still waits for the ends of collectives and for values on the device, reads the use
of the CPU and looks for hangs. It sends everything else to the monitoring process, without waiting
for it. Training goes on unmonitored if that process ends.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from ...metrics.catalog import BY_NAME
from ...metrics.recorder import Recorder, Snapshot
from ...metrics.step_record import StepRecord
from ...metrics.thresholds import OOM_RISK_HIGH
from ..collectives.call_batch import CallBatch
from ..collectives.groups import Groups
from ..common.exit_notes import how_exited
from ..common.fail_open import FailOpen
from ..common.gil_pauses import let_training_run
from ..common.launcher_link import send_run_folder
from ..common.phase_timer import NON_TRAINING
from ..estimator.volume_check import EngineVariant, engine_variant, estimate_data_parallel
from ..instrumentation.raw_step import RawStep
from ..memory.forecast.forecast_service import ForecastState
from ..memory.memory_reader import Readings
from ..monitor.memory_analysis import MemoryAnalysis
from ..monitor.step_ring import StepRing
from ..monitor.subscriptions import CLOSE_SECONDS as LISTENER_SECONDS
from ..monitor.subscriptions import Subscriptions
from ..monitor.watch_thread import WatchThread
from ..tuner.policy.metrics_delta import MetricsDelta
from .connection import Connection, pickled
from .messages import MemoryKnowledge, OpenedRun, Peers, SeriesKey, Setup, State
from .wire import GroupSender, send_calls, send_in_flight, send_step

logger = logging.getLogger(__name__)

# Longest wait for an answer, and for the end of the monitoring process.
ANSWER_SECONDS = 2.0
START_SECONDS = 60.0
CLOSE_SECONDS = 10.0
# Time from its start until the other ranks are known. A hang is reported after it.
PEERS_SECONDS = 5.0
# Time after which what is known of other ranks is too old. The monitoring process sends it more
# often while it reads heartbeats.
MAX_PEERS_AGE_SECONDS = 15.0
# Time without progress after which calls in flight are sent.
IN_FLIGHT_SECONDS = 2.0


class MonitoringProcess:
    """The process that analyses what one rank measures.

    Raises:
        OSError: The process cannot be started.

    Args:
        rank: This rank.
        fail_open: Guards the thread that receives.
        estimate: Returns an estimate of a step of the engine, given its micro-batches.
        ring: The descriptor of the ring of steps, which the process claims.

    Attributes:
        run: Where the run is logged; None until the run has an id.
        peers: What is known of other ranks. `peers_at` is the monotonic time of its receipt.
        last_snapshot: All metric values at the end; None until then.
        on_run: Called once with `run`, on the thread that receives.
        on_records: Called with step records if there are listeners, on the same thread.
        on_forecasts: Called with new forecasts of memory, on the same thread.
    """

    def __init__(
        self,
        rank: int,
        fail_open: FailOpen,
        estimate: Callable[[int], object],
        ring: int | None = None,
    ) -> None:
        self._rank = rank
        self.run: OpenedRun | None = None
        self.peers, self.peers_at = Peers(), 0.0
        self.last_snapshot: Snapshot | None = None
        self.on_run: Callable[[OpenedRun], object] = lambda run: None
        self.on_records: Callable[[Sequence[StepRecord]], object] = lambda records: None
        self.on_forecasts: Callable[[ForecastState], object] = lambda state: None
        self._estimate = fail_open.wrap("estimate", estimate, is_kept=True)
        self._answers: dict[int, tuple[threading.Event, list[Any]]] = {}
        self._numbers = itertools.count(1)
        self._address: str | None = None
        self._live_page_url: str | None = None
        self._started_at: float | None = None
        self._is_serving = threading.Event()
        self._has_ended = threading.Event()
        self._is_closed = False
        self._connection, theirs = Connection.pair()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # No device, and no threads for computations: it only analyses numbers.
        variables = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        descriptors = [theirs.fileno(), *([] if ring is None else [ring])]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", str(__package__), *map(str, descriptors)],
                env=os.environ | variables,
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C ends the training, whose last steps it writes
            )
        except BaseException:
            self._connection.close_here()
            raise
        finally:
            theirs.close_here()
        self._thread = fail_open.thread("replies", self._receive)
        self._owner = os.getpid()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it still receives what is sent."""
        return not self._connection.is_closed

    def start(self, setup: Setup) -> None:
        """Send the setup, with which the process begins."""
        self._connection.send(("setup", setup))
        self._thread.start()

    def send(self, name: str, value: object) -> bool:
        """Send a message without waiting. Return False if it was lost."""
        return self._connection.send((name, value))

    def ask(self, name: str, timeout_seconds: float = ANSWER_SECONDS) -> Any:
        """Return the answer to a question; None if there is none in time. Any thread may ask."""
        number, answered, answers = next(self._numbers), threading.Event(), list[Any]()
        self._answers[number] = answered, answers
        try:
            if self.send("ask", (number, name)):
                answered.wait(timeout_seconds)
        finally:
            del self._answers[number]
        return answers[0] if answers else None

    @property
    def knows_peers(self) -> bool:
        """Whether it has had time to compare the ranks since it started, or has ended."""
        started_at = self._started_at
        is_ready = started_at is not None and time.monotonic() - started_at > PEERS_SECONDS
        return is_ready or not self.is_alive

    def wait_until_started(self) -> None:
        """Wait until the process handles messages, or has ended. Importing torch takes seconds."""
        self._wait(self._is_serving, START_SECONDS)

    @property
    def address(self) -> str | None:
        """Where the metrics are served. Waits until the process has started to serve."""
        self.wait_until_started()
        return self._address

    @property
    def live_page_url(self) -> str | None:
        """The URL of the live page. None until the process has started to serve."""
        return self._live_page_url

    def end(self) -> bool:
        """Let the process write what it has. Return whether the run folder is complete in time."""
        self.wait_until_started()
        self.send("end", None)
        self._connection.flush(ANSWER_SECONDS)
        if self._wait(self._has_ended, CLOSE_SECONDS):
            return True
        if not self.is_alive:
            self._thread.join(ANSWER_SECONDS)  # it says so, before the script ends
            return False
        logger.warning(
            "the monitoring process of rank %d does not respond; its last steps may be neither in "
            "the run log nor in the metrics",
            self._rank,
        )
        return False

    def linger(self, *, interrupted: bool, is_exit: bool) -> None:
        """Let the process serve until the end of the run was scraped.

        Args:
            interrupted: Whether Ctrl-C has ended the run.
            is_exit: Whether the end of the script waits for it.
        """
        self.send("linger", (interrupted, is_exit))

    def wait_for_exit(self, timeout_seconds: float) -> None:
        """Wait until the process has exited, after the last scrape."""
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            logger.info("the monitoring process %d has not exited yet", self.pid)

    def close(self) -> None:
        """Close the connection, upon which the process exits. Safe to call in a forked child."""
        if os.getpid() == self._owner:
            self._is_closed = True
            self._connection.close()
        else:
            self._connection.close_here()

    def _wait(self, event: threading.Event, timeout_seconds: float) -> bool:
        """Wait for an event, or until the process has ended."""
        waited = 0.0
        while not event.wait(0.05) and self.is_alive and waited < timeout_seconds:
            waited += 0.05
        return event.is_set()

    def _receive(self) -> None:
        for name, value in self._connection.receive():
            match name:
                case "serving":
                    self._address, self._live_page_url = value
                    self._started_at = time.monotonic()
                    self._is_serving.set()
                case "run":
                    self.run = value
                    self.on_run(value)
                case "peers":
                    self.peers, self.peers_at = value, time.monotonic()
                case "records":
                    self.on_records(value)
                case "forecasts":
                    self.on_forecasts(value)
                case "answer":
                    number, answer = value
                    answered, answers = self._answers.get(number, (None, []))
                    answers.append(answer)
                    if answered is not None:
                        answered.set()
                case "estimate":
                    number, micro_batches = value
                    self._answer_estimate(number, micro_batches)
                case "ended":
                    self.last_snapshot = value
                    self._has_ended.set()
        if not (self._is_closed or self._has_ended.is_set()):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(ANSWER_SECONDS)
            logger.error(
                "the monitoring process of rank %d %s. Training goes on, but this rank has no "
                "metrics and no log any more, except for the last steps.",
                self._rank,
                _end_of(self._process.returncode),
            )
        self._process.wait()
        self._connection.close_here()

    def _answer_estimate(self, number: int, micro_batches: int) -> None:
        """Estimate on a thread of its own, because estimating a large model takes a while."""
        threading.Thread(
            target=lambda: self.send("estimated", (number, self._estimate(micro_batches))),
            name="zerowatch-estimate",
            daemon=True,
        ).start()


def _end_of(exit_code: int | None) -> str:
    """Say how the monitoring process has ended, and where the reason is found."""
    if exit_code is None:
        return "no longer responds"
    if exit_code >= 0:
        return f"has failed (exit code {exit_code}): its last lines on stderr have the reason"
    how = how_exited(exit_code)
    if exit_code == -signal.SIGKILL:
        how += ": by hand, or by the kernel, which ran out of memory; `dmesg` shows the latter"
    return f"was killed ({how})"


class ForwardedRecorder(Recorder):
    """Holds the values of the training process. A snapshot contains those of both processes."""

    def __init__(self, process: MonitoringProcess) -> None:
        super().__init__()
        self._process = process
        self._sent: dict[SeriesKey, float] = {}

    def snapshot(self) -> Snapshot:
        """Ask the monitoring process for all values; without an answer return those of here."""
        found: Snapshot | None = self._process.last_snapshot or self._process.ask("snapshot")
        return super().snapshot() if found is None else found

    def changes(self) -> tuple[list[tuple[SeriesKey, float]], list[SeriesKey]]:
        """Return the series with new values since the last call, and those that have ended."""
        now = {
            (spec.name, labels): value
            for spec, series in super().snapshot().values.items()
            for labels, value in series.items()
        }
        before, self._sent = self._sent, now
        changed = []
        for key, value in now.items():
            last = before.get(key)
            if last is None or last != value:
                is_counter = BY_NAME[key[0]].kind == "counter"
                changed.append((key, value - (last or 0.0) if is_counter else value))
        return changed, [key for key in before if key not in now]


class Forwarder:
    """Sends settled steps with their calls, and the state. Stands for a `StepAnalysis`.

    Args:
        process: Gets everything.
        fail_open: Guards sending.
        groups: Numbers the process groups.
        known: Records these groups.
        on_step: Called with the number and the training seconds of each step.

    Attributes:
        num_lost: Steps that could not be sent.
        wants_records: Returns whether somebody here wants the records of steps.
        state: Returns the present state; None after a failure. Must be set before the watch thread
            starts, as must `risks`.
        risks: Returns the risk of running out of memory, by device.
    """

    has_unwritten = False
    publishes_log = True
    num_unlogged = 0

    def __init__(
        self,
        process: MonitoringProcess,
        fail_open: FailOpen,
        groups: GroupSender,
        known: Groups,
        on_step: Callable[[int, float], object],
    ) -> None:
        self.num_lost = 0
        self.wants_records: Callable[[], bool] = lambda: False
        self.state: Callable[[], State | None] = lambda: None
        self.risks: Callable[[], Mapping[str, float]] = dict
        # Calls issued before the watch are part of the setup.
        self._last_sent = {rank_set: rank_set.issued for rank_set in known.rank_sets()}
        self._send_guarded = fail_open.wrap("forwarding", self._send_now, is_kept=True)
        self._send_in_flight = fail_open.wrap("forwarding", self._send_in_flight_now, is_kept=True)
        self._process, self._groups, self._known = process, groups, known
        self._on_step = on_step
        # Each is pickled by itself, so that training need not wait for those of a whole second.
        self._items: list[bytes] = []
        self._num_steps = 0

    @property
    def is_risky(self) -> bool:
        """Whether memory may soon run out, by the last forecast."""
        return max(self.risks().values(), default=0.0) >= OOM_RISK_HIGH

    def add_calls(self, batch: CallBatch) -> None:
        """Send the calls of a batch with the next message."""
        self._items.append(pickled(("calls", send_calls(batch, self._groups))))
        last_sent = self._last_sent
        for call in batch.calls:
            call.settle()  # from now on nothing reads its events, which other calls may use
            rank_set, sequence = call.group.rank_set, call.sequence
            if sequence > last_sent.get(rank_set, 0):
                last_sent[rank_set] = sequence

    def add_step(self, raw: RawStep) -> None:
        """Send a step with the next message."""
        self._items.append(pickled(("step", send_step(raw))))
        self._num_steps += 1
        spent = sum(raw.phase_ns) - sum(raw.phase_ns[phase] for phase in NON_TRAINING)
        self._on_step(raw.step, spent / 1e9)

    def write_log(self) -> None:
        """Send the steps so far, which the monitoring process writes to the run log."""
        if self._items:
            self._send(None)

    def publish(self) -> None:
        """Send the steps so far and the state, with which they are published.

        While training makes no progress, calls in flight are sent too: one may differ from those of
        the other ranks.
        """
        state = self.state()
        let_training_run()
        self._send(state)
        if state is not None and (perf_counter_ns() - state.since_ns) / 1e9 > IN_FLIGHT_SECONDS:
            self._send_in_flight()

    def report_now(self) -> None:
        """Let the monitoring process report all calls to the other ranks, and wait for it."""
        self._send_in_flight()
        self._process.ask("report")

    def _send(self, state: State | None) -> None:
        items, self._items = self._items, []
        num_steps, self._num_steps = self._num_steps, 0
        if not self._send_guarded(items, state) and num_steps:
            self.num_lost += num_steps
            self.has_unwritten = True

    def _send_now(self, items: Sequence[bytes], state: State | None) -> bool:
        new_groups = self._groups.changes(self._known)
        return self._process.send("second", (new_groups, items, state))

    def _send_in_flight_now(self) -> None:
        rows = send_in_flight(self._known, self._groups, self._last_sent)
        self._process.send("in flight", (self._groups.changes(self._known), rows))


class ForwardedMemory(MemoryAnalysis):
    """Sends what `MemoryAnalysis` would analyse. Its own forecasts know no step."""

    def __init__(self, recorder: Recorder, *args: Any, **kwargs: Any) -> None:
        super().__init__(Recorder(), *args, **kwargs)
        self.baseline_bytes: Mapping[str, float] = kwargs["baseline_bytes"]
        self._readings: Readings | None = None

    def add_idle_readings(self, readings: Readings) -> None:
        """Keep readings for the next state."""
        self._readings = readings

    def take_idle_readings(self) -> Readings | None:
        """Return the readings since the last call, or None."""
        readings, self._readings = self._readings, None
        return readings

    def publish(self) -> None:
        """Do nothing: the steps have their samples."""

    def catch_up(
        self, process: MonitoringProcess, thread: WatchThread, timeout_seconds: float
    ) -> None:
        """Take over what the monitoring process knows of memory, for a report on an error.

        The time is that for the watch thread, and again for the answer.
        """
        thread.catch_up(timeout_seconds)
        known: MemoryKnowledge | None = process.ask("memory", timeout_seconds)
        if known is not None:
            self.metrics.categories = dict(known.categories)
            self.forecasts.restore(known.forecasts)
            self.leaks.restore(known.growth_bytes_per_step)


class RemoteIntervals:
    """The intervals whose metrics the advisor diagnoses, measured by the monitoring process."""

    def __init__(self, process: MonitoringProcess) -> None:
        self._process = process
        self.is_waiting = False

    def start(self) -> None:
        """Begin an interval."""
        self._ask("interval start")

    def end(self) -> MetricsDelta | None:
        """Return what the metrics did in the interval, and begin the next one."""
        return self._ask("interval")

    def _ask(self, question: str) -> MetricsDelta | None:
        """Return the answer; None if the interval is not complete, or if there is no answer."""
        found: MetricsDelta | None
        self.is_waiting, found = self._process.ask(question) or (False, None)
        return found


class ForwardedSubscriptions(Subscriptions):
    """Calls listeners with the records that the monitoring process sends back.

    Attributes:
        is_wanted: Returns whether listeners or sinks wait for records.
    """

    def __init__(self, fail_open: FailOpen, process: MonitoringProcess) -> None:
        super().__init__(fail_open)
        self.is_wanted: Callable[[], bool] = lambda: False
        self._process = process

    def close(self, timeout_seconds: float = LISTENER_SECONDS) -> None:
        """Wait until the last records have arrived, and listeners have handled them."""
        if self.is_wanted():
            self._process.wait_until_started()
            self._process.ask("records sent", CLOSE_SECONDS)
        super().close(timeout_seconds)


class ForwardedRunFolder:
    """The run folder as the training process knows it. The monitoring process writes it.

    The ring of steps remains here, in case both processes are killed.

    Args:
        process: The monitoring process.
        rank: This rank.
        is_logged: Whether a run log is written.
        ring: The ring, of which the process has the descriptor.
    """

    def __init__(
        self, process: MonitoringProcess, *, rank: int, is_logged: bool, ring: StepRing | None
    ) -> None:
        self._process = process
        self.rank, self.is_logged, self.ring = rank, is_logged, ring
        process.on_run = self._on_run

    @property
    def run_id(self) -> str | None:
        """The id of the run. None until it is known."""
        run = self._process.run
        return None if run is None else run.run_id

    def wait(self) -> None:
        """Wait until the run is known, or for START_SECONDS. Not for the training thread."""
        end = time.monotonic() + START_SECONDS
        while self._process.run is None and self._process.is_alive and time.monotonic() < end:
            time.sleep(0.05)

    @property
    def path(self) -> Path | None:
        """The folder. None until the run has an id, or if no run log is written."""
        run = self._process.run
        return None if run is None or run.folder is None else Path(run.folder)

    def _on_run(self, run: OpenedRun) -> None:
        if self.ring is not None and run.log is not None:
            self.ring.set_log(Path(run.log), run.identity, every_step=run.every_step)
        if run.folder is not None and run.identity.get("local_rank") == 0:
            send_run_folder(Path(run.folder), rank=self.rank)

    def close(self, *, is_complete: bool = True) -> None:
        """Let the monitoring process complete the folder, and release the ring."""
        has_ended = False
        try:
            has_ended = self._process.end()
        finally:
            self.close_ring(is_complete=is_complete and has_ended)

    def withdraw_targets(self) -> None:
        """Do nothing: the monitoring process does it after the last scrape."""

    def close_ring(self, *, is_complete: bool) -> None:
        """Release the ring. Its file remains if not all steps were sent."""
        if self.ring is not None:
            self.ring.close(deletes_file=is_complete)


class ForwardedServer:
    """The server of the monitoring process, as `Watch` closes it."""

    def __init__(self, process: MonitoringProcess, linger_seconds: float) -> None:
        self._process, self._linger_seconds = process, linger_seconds

    def close(self) -> None:
        """Close the server at once."""
        self._process.close()

    def wait_for_final_scrape(self, *, interrupted: bool = False) -> None:
        """Wait until the regular scrapers have read that the run is over."""
        self._process.linger(interrupted=interrupted, is_exit=True)
        self._process.wait_for_exit(self._linger_seconds + CLOSE_SECONDS)

    def wait_for_next_scrape(self) -> None:
        """Wait until the monitoring process has exited, after the next scrape."""
        self._process.send("next scrape", None)
        self._process.wait_for_exit(self._linger_seconds + CLOSE_SECONDS)

    def close_after_final_scrape(self, before_close: Callable[[], object]) -> None:
        """Let the server close by itself after the last scrape."""
        self._process.linger(interrupted=False, is_exit=False)


class NoPart:
    """Stands for a part that only the monitoring process has. Its methods do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def close_after_fork(self) -> None:
        """Do nothing."""

    def rebind_engine(self) -> None:
        """Do nothing: only a TrainingRun replaces engines."""

    def trace_run_error(self, error: BaseException | None) -> None:
        """Do nothing, because there are no traces."""

    def wait_for_end(self) -> None:
        """Do nothing, because nothing is sent."""

    def give_up(self) -> None:
        """Do nothing, because nothing is sent."""


class ForwardedComparison:
    """The comparison with other ranks, as hang detection and the analysis of errors use it."""

    def __init__(self, process: MonitoringProcess) -> None:
        self._process = process
        self.hangs = False
        self.report_now: Callable[[], object] = lambda: None

    @property
    def peers(self) -> Mapping[int, Any]:
        """Last heartbeats of other ranks by rank. Read only while training makes no progress."""
        return self._process.peers.heartbeats if self._knows_peers else {}

    @property
    def _knows_peers(self) -> bool:
        """Whether what is known of other ranks is new enough: old heartbeats would hide a hang."""
        age_seconds = time.monotonic() - self._process.peers_at
        return self._process.is_alive and age_seconds < MAX_PEERS_AGE_SECONDS

    @property
    def divergence(self) -> str | None:
        """A message that names the ranks whose collectives diverged, or None if none diverged."""
        return self._process.peers.divergence

    @property
    def others_hang(self) -> bool:
        """Whether another rank announces a hang."""
        return self._process.peers.others_hang and self._knows_peers

    def announce_hang(self, hangs: bool) -> None:
        """Announce to the other ranks, with the next state, whether this rank hangs."""
        self.hangs = hangs

    def rebind_engine(self, engine: Any) -> None:
        """Do nothing: only a TrainingRun replaces engines."""

    def forget_hooks(self) -> None:
        """Do nothing, because there is no profiler."""

    def close_hooks(self) -> None:
        """Do nothing, because there is no profiler."""


class EngineChanges:
    """Counts the changes of an engine that decide its collectives, on the watch thread."""

    def __init__(self, engine: Callable[[], Any]) -> None:
        self._engine = engine
        self._last: EngineVariant | None = None
        self.count = 0

    @property
    def is_patched(self) -> bool:
        """Whether methods of the engine were patched at the last look."""
        return self._last is not None and bool(self._last.patches)

    def look(self) -> None:
        """Compare the engine with its state at the last look."""
        engine = self._engine()
        if engine is None:
            return
        before, self._last = self._last, engine_variant(engine)
        if before is not None and not self._last.equals(before):
            self.count += 1

    def estimate(self, micro_batches: int) -> object:
        """Return the estimate of a step of the engine, or None."""
        return estimate_data_parallel(self._engine(), micro_batches)
