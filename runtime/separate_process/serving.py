"""The monitoring process of one rank, which `__main__.py` starts.

It receives what the rank measures (`forwarding.py`), and does all that needs no engine: step log,
metrics, their server and log, forecasts, readings of GPUs, and the comparison with other ranks. It
ends with the training process, after the last scrape. If that process is killed, it completes the
step log.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, cast

import psutil

from ...metrics.catalog import BY_NAME, overhead, training
from ...metrics.exporters.server import MetricsServer
from ...metrics.recorder import Recorder
from ...metrics.step_record import StepRecord
from ...metrics.thresholds import OOM_RISK_HIGH
from ..collectives.call_recorder import CallRecorder
from ..common.fail_open import FailOpen
from ..common.phase_timer import PhaseTimer
from ..common.rank_store import RankStore, StoreClientFactory, TargetDiscovery
from ..common.step_errors import StepErrors
from ..cross_rank.comparison_thread import figures_by_name, slow_phases
from ..devices.nvml_probe import nvml_device_of
from ..estimator.step_estimate import StepEstimate
from ..estimator.volume_check import EngineVariant, WireVolumeCheck
from ..instrumentation.flops import FlopsCounter
from ..instrumentation.watch_context import WatchContext
from ..live_page.live_page import page_url
from ..memory.memory_reader import Readings
from ..monitor.build_watch import live_page_of
from ..monitor.comparison_monitor import new_comparison_thread
from ..monitor.console_logging import show_own_lines
from ..monitor.device_sampler import DeviceSampler
from ..monitor.memory_analysis import MemoryAnalysis
from ..monitor.metrics_log import MetricsLog
from ..monitor.overhead_metrics import publish_overhead
from ..monitor.run_folder import RUN_ID_TIMEOUT_SECONDS, RunFolder
from ..monitor.run_info import RunInfoPublisher, publish_thresholds
from ..monitor.step_analysis import StepAnalysis
from ..monitor.step_log import keeps_every_step
from ..monitor.step_metrics import StepMetrics
from ..monitor.step_ring import RingClaim, recover
from ..monitor.subscriptions import for_each
from ..tuner.policy.step_time_observer import SnapshotIntervals
from .connection import Connection
from .messages import JobStore, MemoryKnowledge, OpenedRun, Peers, Setup, State
from .wire import ReceivedGroups, receive_calls, receive_in_flight, receive_step

logger = logging.getLogger(__name__)

# Without a message for this time, the process does its regular work by itself.
SILENT_SECONDS = 1.0
# Time without a message after which scrapes are not answered, and nothing is sent to other ranks. A
# message comes every second.
MAX_SILENT_SECONDS = 10.0
# Time between two readings of the GPUs if their interval is shorter; longest wait for their end.
GPU_SECONDS = 1.0
# Time between two messages about other ranks, even if nothing has changed: old ones do not count.
PEERS_SECONDS = 5.0
# Time between two looks for the id of the run at the start.
START_POLL_SECONDS = 0.1
# Time between two messages to the training process with forecasts, unless memory may soon run out.
FORECAST_SECONDS = 5.0
# Longest wait for an estimate, which the training process makes.
ESTIMATE_SECONDS = 600.0


class EngineState:
    """What is known of the engine of the training process. Stands for the engine."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        self.config = ds_config
        self.global_steps = 0
        self._variant: object = ds_config
        self._num_changes, self._is_patched = 0, False

    def update(self, state: State) -> None:
        """Take over the state."""
        self.global_steps, self._is_patched = state.step, state.is_patched
        if state.variant != self._num_changes:
            self._num_changes, self._variant = state.variant, object()

    def variant(self) -> EngineVariant:
        """Return the settings that decide the collectives, as far as their changes are known."""
        patches: Any = (self._patch,) if self._is_patched else ()
        return EngineVariant(step=self.global_steps, config=self._variant, patches=patches)

    @staticmethod
    def _patch() -> None:
        """Stands for a patch."""


class ReceivedTimer:
    """Knows since when the training thread has made no progress. Processes share its clock."""

    def __init__(self) -> None:
        self.since_ns = perf_counter_ns()

    def idle_seconds(self) -> float:
        """Return the time since the last change of phase that is known here."""
        return (perf_counter_ns() - self.since_ns) / 1e9


class Comparison:
    """The comparison of this rank with other ranks, and with the estimate of its steps."""

    def __init__(
        self,
        context: WatchContext,
        setup: Setup,
        job_store: JobStore,
        ask_estimate: Callable[[int], Any],
    ) -> None:
        process, clients = setup.process, None
        if setup.store is not None:
            clients = StoreClientFactory(
                process.rank, process.attempt, setup.watch_index, job_store.find
            )
        self.thread = new_comparison_thread(context, clients)
        if setup.each_rank_has_own_data:
            self.thread.compare_losses()
        self.volume_check = WireVolumeCheck(
            context.engine(),
            context.recorder,
            context.fail_open,
            logs_differences=context.identity.rank == 0,
            estimate=lambda engine, micro_batches: ask_estimate(micro_batches),
            variant_of=lambda engine: engine.variant(),
        )
        self.listeners: list[Callable[[Sequence[StepRecord]], object]] = [
            for_each(context.fail_open.wrap("same losses", self.thread.on_step)),
            context.fail_open.wrap("volume", self._check_volume),
        ]

    def add_step_times(self, phase_ns: Sequence[int], blocked_ns: Sequence[int]) -> None:
        """Add the nanoseconds of a step in each of PHASES, and the blocked part of each."""
        self.thread.step_times.add(phase_ns, blocked_ns)

    def _check_volume(self, records: Sequence[StepRecord]) -> None:
        self.volume_check.add(*records)
        self.thread.volume_ratio = self.volume_check.ratio()


class GpuReadings:
    """Reads the GPUs of the rank by NVML, on its own thread, because a broken GPU may block NVML.

    Args:
        setup: Names the GPUs.
        recorder: Gets the values.
        fail_open: Guards the thread.
    """

    def __init__(self, setup: Setup, recorder: Recorder, fail_open: FailOpen) -> None:
        self._gpus, self._recorder, self._fail_open = setup.gpus, recorder, fail_open
        self._interval_seconds = setup.settings.sampling.device_interval_seconds
        self._sampler: DeviceSampler | None = None
        self._is_closing = threading.Event()
        self._thread = fail_open.thread("devices", self._run)

    @property
    def readings(self) -> Readings:
        """The last readings, by device and name."""
        return {} if self._sampler is None else self._sampler.device_readings

    def start(self) -> None:
        """Start the thread, if there is a GPU."""
        if self._gpus:
            self._thread.start()

    def close(self) -> None:
        """End the thread, unless it is in a call of the driver that does not return."""
        self._is_closing.set()
        if self._thread.was_started:
            self._thread.join(GPU_SECONDS)

    def _run(self) -> None:
        gpus = [nvml_device_of(device, uuid) for device, uuid in self._gpus.items()]
        self._sampler = sampler = DeviceSampler(
            self._recorder,
            self._fail_open,
            [gpu for gpu in gpus if gpu is not None],
            self._interval_seconds,
        )
        read = self._fail_open.wrap("devices", sampler.read_devices)
        while not self._is_closing.is_set():
            read()
            self._is_closing.wait(GPU_SECONDS)
        sampler.close()


class Monitor:
    """Analyses what one rank sends. All methods run on the main thread.

    Args:
        setup: What is constant in the run.
        connection: To the training process.
        ring: The claim of the ring of the training process, for as long as it has steps to log.
    """

    def __init__(self, setup: Setup, connection: Connection, ring: RingClaim | None = None) -> None:
        self._setup, self._connection, self._ring = setup, connection, ring
        self._first_cpu_seconds = time.process_time()  # of imports, which no thread repeats
        settings, process = setup.settings, setup.process
        self._fail_open = fail_open = FailOpen()
        self._recorder = recorder = Recorder()
        self._groups, self._timer = ReceivedGroups(), ReceivedTimer()
        self._groups.update(setup.groups, are_first=True)
        self._engine: EngineState | None = EngineState(setup.ds_config)
        self._state: State | None = None
        self._state_at = time.time()
        self._handled_at = time.monotonic()  # the time of the last state
        self._is_closed = False
        self._lingering: threading.Thread | None = None
        self._training_process = psutil.Process(os.getppid())
        self._sent_peers = Peers()
        self._peers_due = 0.0
        self._sent_run: str | None = None
        self._wants_records = False
        self._sent_readings: Readings = {}
        self._gpus = GpuReadings(setup, recorder, fail_open)
        self._estimates: dict[int, tuple[threading.Event, list[Any]]] = {}
        self._numbers = itertools.count(1)
        self._job_store = JobStore(setup.store)
        found = fail_open.call("store", self._job_store.find)
        store = RankStore(process, setup.watch_index, found)
        targets = TargetDiscovery(store, process)
        self._folder = folder = RunFolder(settings, process, store, targets, has_ring=False)
        self._send_run()  # as soon as possible, for the ring of steps of the training process
        live_page = live_page_of(process.rank, recorder, settings, folder, fail_open)
        self._server = MetricsServer(
            recorder=recorder,
            rank=process.rank,
            local_rank=process.local_rank,
            settings=settings.serve,
            targets=folder.targets if process.rank == 0 else None,
            make_thread=fail_open.thread,
            serves_run=folder.serves_run,
            pages=None if live_page is None else live_page.pages,
            refusal=self._refusal,
        )
        served_at = self._server.start()
        if served_at is not None:
            targets.announce(served_at)
        url = None if live_page is None else page_url(served_at, settings.serve)
        connection.send(("serving", (served_at, url)))
        self._metrics_log = MetricsLog(recorder, settings, process, folder.run, served_at)
        context = WatchContext(
            engine=lambda: self._engine,
            identity=process,
            watch_index=setup.watch_index,
            settings=settings,
            call_recorder=cast(CallRecorder, SimpleNamespace(groups=self._groups)),
            phase_timer=cast(PhaseTimer, self._timer),
            run_id=lambda: folder.run_id,
            folder=lambda: folder.path,
            recorder=recorder,
            fail_open=fail_open,
            step_errors=StepErrors(),
        )
        recorder.set(training.RUN_ACTIVE, 1)
        recorder.start_counters(training.METRICS)
        recorder.start_counters((overhead.HOOK_FAILURES,), hook=("watch thread",))
        publish_thresholds(context)
        recorder.set_function(overhead.DEAD_THREADS, self._num_dead_threads)
        step_metrics = StepMetrics(
            recorder,
            setup.flops or FlopsCounter(None),
            setup.peak_flops,
            logs_loss=context.identity.rank == 0,
        )
        before_start = receive_calls(setup.calls_before_start, self._groups, joins_rank_sets=False)
        step_metrics.publish_calls_before_start(before_start)
        self._run_info = RunInfoPublisher(
            context,
            store,
            folder,
            served_at,
            info_of=lambda engine: setup.info,
            is_listening=lambda: self._server.is_listening,
        )
        self._memory = MemoryAnalysis(
            recorder,
            fail_open,
            settings.memory,
            baseline_bytes=setup.baseline_bytes,
            devices=list(setup.baseline_bytes),
            has_step_peaks=setup.devices_with_step_peaks.__contains__,
            rank=process.rank,
            folder=lambda: folder.path,
        )
        exchange_seconds = settings.cross_rank.interval_seconds
        self._intervals = SnapshotIntervals(recorder, exchange_seconds)
        self._sent_forecasts: object = self._memory.forecasts.forecasts
        self._forecasts_due = 0.0
        self._comparison = comparison = Comparison(
            context, setup, self._job_store, self._ask_estimate
        )
        thread = comparison.thread
        thread.expected_pause = lambda: None if self._state is None else self._state.pause
        thread.is_silent = self._is_silent
        listeners = [*comparison.listeners, self._send_records]
        if live_page is not None:
            live_page.figures = lambda: figures_by_name(thread.rank_figures)
            live_page.slow = lambda: slow_phases(thread.stragglers)
            listeners.append(fail_open.wrap("live page", live_page.on_steps))
        no_traces: Any = SimpleNamespace(makes_traces=False)
        self._analysis = StepAnalysis(
            step_metrics=step_metrics,
            sampler=cast(DeviceSampler, self),
            memory=self._memory,
            comparison=comparison,
            folder=folder,
            otel=no_traces,
            fail_open=fail_open,
            listeners=listeners,
            on_device=setup.on_device,
        )
        tasks = {
            "memory": self._memory.publish,
            "run folder": self._run_info.poll,
            "overhead": self._publish_overhead,
            "metrics log": self._metrics_log.poll,
            "cross_rank": thread.account_if_stuck,
            "replies": self._send_news,
        }
        self._tasks = [fail_open.wrap(name, task) for name, task in tasks.items()]
        self._handle = fail_open.wrap("message", self._handle_message, is_kept=True)
        comparison.thread.start()
        self._gpus.start()

    def run(self) -> None:
        """Monitor until the watch or the training process ends, and serve until the last scrape."""
        self._wait_for_run_id()
        self._send_news()
        for message in self._connection.receive(SILENT_SECONDS):
            if message is None:
                if not self._is_closed:
                    self._tick()
                continue
            name, value = message
            if name == "end":
                self._is_closed = True
                self._close()
            elif self._is_closed and name in ("second", "in flight"):
                pass  # its parts are closed
            elif name == "linger":
                interrupted, is_exit = value
                self._linger(interrupted=interrupted, is_exit=is_exit)
                if is_exit:
                    break
            elif name == "next scrape":  # the run has failed, and a fault of a GPU must be read
                self._server.wait_for_next_scrape()
                break
            else:
                self._handle(name, value)
        else:  # the training process has ended, or the end of the run was scraped
            self._join_lingering()
        self._server.close()
        self._join_lingering()  # it may withdraw the targets now
        if not self._is_closed:
            self._complete_after_kill()
        self._connection.close()

    def _linger(self, *, interrupted: bool, is_exit: bool) -> None:
        """Wait for the last scrape; while the script goes on, on a thread of its own.

        If the script ends meanwhile, the training process sends this message again.
        """

        def wait() -> None:
            self._server.wait_for_final_scrape(interrupted=interrupted, announces=is_exit)
            self._close_parts(self._folder.withdraw_targets)
            if not is_exit:
                self._connection.close()  # ends `run`

        if is_exit:
            wait()
        elif self._lingering is None:  # else the watch was closed twice
            thread = threading.Thread(target=wait, name="zerowatch-linger", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system allows no more threads
                wait()
            else:
                self._lingering = thread

    def _join_lingering(self) -> None:
        if self._lingering is not None:
            self._lingering.join()

    @property
    def device_readings(self) -> Readings:
        """The last readings of all devices, by device and name."""
        return {**self._sent_readings, **self._gpus.readings}

    def _refusal(self) -> str | None:
        """Return why scrapes are refused, as a rank that does not run would not answer them.

        Alerts recognize a rank that was stopped, or is stuck in code that holds the interpreter
        lock, by its missing answers.
        """
        if self._is_closed:
            return None
        if self._is_stopped():
            return "The training process of this rank is stopped."
        silent_seconds = self._handled_seconds()
        if silent_seconds < MAX_SILENT_SECONDS:
            return None
        return f"The training process of this rank has sent nothing for {silent_seconds:.0f} s."

    def _is_silent(self) -> bool:
        """Return whether the training process does not run. Other ranks then hear nothing of it.

        Else its last pause and its heartbeats would hide a hang from them. The same holds if the
        main thread handles nothing of what has arrived, such as while a disk does not respond.
        """
        return (
            self._is_stopped()
            or self._connection.silent_seconds >= MAX_SILENT_SECONDS
            or (self._state is not None and self._handled_seconds() >= MAX_SILENT_SECONDS)
        )

    def _handled_seconds(self) -> float:
        """Return the seconds since the main thread has handled a state."""
        return time.monotonic() - self._handled_at

    def _is_stopped(self) -> bool:
        with contextlib.suppress(psutil.Error):  # it has just ended
            return bool(self._training_process.status() == psutil.STATUS_STOPPED)
        return False

    def _wait_for_run_id(self) -> None:
        """Wait until rank 0 has shared the id, or this rank has chosen its own.

        The run folder keeps only some records until then, and a slow start may have left more.
        """
        deadline = time.monotonic() + RUN_ID_TIMEOUT_SECONDS + START_POLL_SECONDS
        while self._folder.run_id is None and time.monotonic() < deadline:
            time.sleep(START_POLL_SECONDS)
            self._fail_open.call("run folder", self._folder.poll)

    def _handle_message(self, name: str, value: Any) -> None:
        match name:
            case "second":
                groups, items, state = value
                self._groups.update(groups)
                self._take(items)
                if state is not None:
                    self._take_state(state)
                    self._tick()
            case "in flight":
                groups, rows = value
                self._groups.update(groups)
                receive_in_flight(rows, self._groups)
            case "ask":
                number, what = value
                self._connection.send(("answer", (number, self._answer(what))))
            case "estimated":
                number, estimate = value
                answered, answers = self._estimates[number]
                answers.append(estimate)
                answered.set()

    def _take(self, items: Sequence[bytes]) -> None:
        batch = None
        for item in items:
            kind, sent = pickle.loads(item)
            if kind == "calls":
                batch = receive_calls(sent, self._groups)
                self._analysis.add_calls(batch)
            else:  # the last batch is that of the step
                assert batch is not None
                self._analysis.add_step(receive_step(sent, batch))
        self._analysis.write_log()

    def _take_state(self, state: State) -> None:
        self._state = state
        self._state_at, self._handled_at = time.time(), time.monotonic()
        self._job_store.address = state.store or self._job_store.address
        self._timer.since_ns = state.since_ns
        for rank_set in self._groups.rank_sets():
            rank_set.issued = state.issued.get(rank_set.key, rank_set.issued)
        self._comparison.thread.announce_hang(state.hangs)
        self._sent_readings = state.device_readings
        self._memory.forecasts.add_batch_risks(state.batch_risks)
        if state.idle_readings is not None:
            self._memory.add_idle_readings(state.idle_readings)
        if state.has_engine and self._engine is not None:
            self._engine.update(state)
        else:  # garbage-collected before the end
            self._engine = None
        self._wants_records = state.wants_records
        with self._recorder.commit():
            for (name, labels), value in state.values:
                spec = BY_NAME[name]
                if spec.kind == "counter":
                    self._recorder.add(spec, value, *labels)
                else:
                    self._recorder.set(spec, value, *labels)
            for name, labels in state.removed:
                self._recorder.remove(BY_NAME[name], *labels)

    def _tick(self) -> None:
        """Publish what has arrived, and do the regular work."""
        self._analysis.publish()
        for task in self._tasks:
            task()

    def _answer(self, what: str) -> object:
        if what == "snapshot":
            return self._recorder.snapshot()
        if what == "memory":
            memory = self._memory
            return MemoryKnowledge(
                categories=memory.metrics.categories,
                forecasts=memory.forecasts.state(),
                growth_bytes_per_step={
                    device: memory.leaks.growth_bytes_per_step(device)
                    for device in self._setup.baseline_bytes
                },
            )
        if what in ("interval", "interval start"):
            intervals = self._intervals
            if what == "interval":
                found = intervals.end()
                return intervals.is_waiting, found
            intervals.start()
            return intervals.is_waiting, None
        if what == "report":
            self._comparison.thread.report_now()
        return True  # what was sent before the question has been handled

    def _ask_estimate(self, micro_batches: int) -> StepEstimate | None:
        """Ask the training process for an estimate of its steps. Called on a thread of its own."""
        number, answered, answers = next(self._numbers), threading.Event(), list[Any]()
        self._estimates[number] = answered, answers
        if self._connection.send(("estimate", (number, micro_batches))):
            answered.wait(ESTIMATE_SECONDS)
        del self._estimates[number]
        return answers[0] if answers else None

    def _send_records(self, records: Sequence[StepRecord]) -> None:
        if self._wants_records:
            self._connection.send(("records", list(records)))

    def _send_news(self) -> None:
        """Send what the training process must know, if it has changed."""
        self._send_run()
        forecasts = self._memory.forecasts
        is_due = time.monotonic() >= self._forecasts_due
        is_risky = max(forecasts.risks.values(), default=0.0) >= OOM_RISK_HIGH
        is_new = forecasts.forecasts is not self._sent_forecasts  # it is replaced as a whole
        if is_new and (is_due or is_risky):
            self._sent_forecasts = forecasts.forecasts
            self._forecasts_due = time.monotonic() + FORECAST_SECONDS
            self._connection.send(("forecasts", forecasts.state()))
        thread = self._comparison.thread
        peers = Peers(
            heartbeats=dict(thread.peers),
            divergence=thread.divergence,
            others_hang=thread.others_hang,
        )
        is_known = bool(peers.heartbeats) or peers.others_hang
        is_due = is_known and time.monotonic() >= self._peers_due
        if peers != self._sent_peers or is_due:
            self._sent_peers, self._peers_due = peers, time.monotonic() + PEERS_SECONDS
            self._connection.send(("peers", peers))

    def _send_run(self) -> None:
        run_id = self._folder.run_id
        if run_id is not None and run_id != self._sent_run:
            self._sent_run = run_id
            self._connection.send(("run", self._opened_run(run_id)))

    def _opened_run(self, run_id: str) -> OpenedRun:
        path, process = self._folder.path, self._setup.process
        if path is None:
            return OpenedRun(run_id=run_id)
        return OpenedRun(
            run_id=run_id,
            folder=str(path),
            log=str(path / f"rank-{process.rank}.jsonl"),
            identity=self._folder.identity(run_id),
            every_step=keeps_every_step(process.world_size, process.local_rank),
        )

    def _num_dead_threads(self) -> float:
        there = 0 if self._state is None else self._state.num_dead_threads
        return float(self._fail_open.num_dead_threads + there)

    def _publish_overhead(self) -> None:
        state = self._state
        if state is None:
            return
        # The server counts its own time.
        served = self._recorder.value(overhead.WATCH_SECONDS, "http_thread") or 0.0
        spent = time.process_time() - self._first_cpu_seconds - served
        num_unwritten = self._folder.dropped + self._metrics_log.dropped
        num_unwritten += state.dropped.get("run_log", 0)  # of what the script logs itself
        publish_overhead(
            self._recorder,
            updated_at=self._state_at,
            idle_seconds=self._timer.idle_seconds(),
            seconds={**state.seconds, "monitoring_process": spent},
            dropped={**state.dropped, "run_log": num_unwritten},
            failures=Counter(self._fail_open.failures) + Counter(state.failures),
        )

    def _close(self) -> None:
        self._analysis.write_log()
        self._tick()
        self._close_parts(
            self._comparison.thread.stop,
            self._memory.close,
            self._gpus.close,
            self._publish_overhead,
        )
        self._close_parts(self._metrics_log.close, self._folder.close, self._release_ring)
        self._connection.send(("ended", self._recorder.snapshot()))

    def _complete_after_kill(self) -> None:
        """Write what was received before the training process was killed, and its ring's steps."""
        self._close_parts(
            self._analysis.write_log,
            self._tick,
            self._comparison.thread.stop,
            self._gpus.close,
            self._metrics_log.close,
            self._folder.close,
            self._release_ring,
        )
        path = self._folder.path
        if path is not None:
            self._close_parts(lambda: recover(path))

    def _release_ring(self) -> None:
        if self._ring is not None:
            self._ring.release()

    def _close_parts(self, *parts: Callable[[], object]) -> None:
        for close in parts:
            self._fail_open.call("close", close)


def serve(connection: Connection, ring: int | None) -> None:
    """Monitor the rank at the other end of the connection until it ends.

    Args:
        connection: To the training process.
        ring: The descriptor of the ring of the training process, if it has one.
    """
    show_own_lines()
    claim = None if ring is None else RingClaim(ring)
    first = next(connection.receive(), None)
    if first is not None:
        Monitor(first[1], connection, claim).run()
