"""Builds a watch whose measurements another process analyses (`process.separate`)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ...metrics.catalog import training
from ...metrics.exporters.otlp_options import otlp_options
from ...metrics.settings import Settings
from ...metrics.step_record import StepRecord
from ..collectives.instrument import CollectiveInstrumentation
from ..common.ds_config import ds_config_of
from ..common.exit_calls import ExitCalls
from ..common.fail_open import FailOpen
from ..common.gil_pauses import SHORT_WORK_SECONDS, let_training_run
from ..common.hidden_secrets import without_secrets
from ..common.phase_timer import PhaseTimer
from ..common.process_info import this_process
from ..common.rank_store import make_room_for_clients
from ..common.step_errors import StepErrors
from ..common.torch_engine import TorchEngine
from ..cross_rank.comparison_thread import ComparisonThread
from ..cross_rank.error_analyzer import CollectiveErrorAnalyzer
from ..cross_rank.hang.hang_monitor import HangMonitor
from ..devices.device_probes import DeviceProbe, device_probes
from ..devices.memory_probes import memory_probes
from ..devices.nvml_probe import NvmlDevice
from ..instrumentation.engine_instrumentation import EngineInstrumentation
from ..instrumentation.flops import flops_counter, publish_peak
from ..instrumentation.watch_context import WatchContext
from ..monitor.advisor import Advisor
from ..monitor.build_watch import add_outputs, device_of, open_collectives, time_device_phases
from ..monitor.comparison_monitor import (
    ComparisonMonitor,
    each_rank_has_own_data,
    hang_context,
)
from ..monitor.device_sampler import DeviceSampler
from ..monitor.memory_monitor import MemoryMonitor
from ..monitor.overhead_metrics import CollectiveCosts
from ..monitor.run_folder import RunFolder
from ..monitor.run_info import engine_info, warn_of_comms_logger
from ..monitor.step_analysis import Listener, StepAnalysis
from ..monitor.step_ring import StepRing
from ..monitor.subscriptions import Subscriptions, for_each
from ..monitor.watch import EngineRef, Watch
from ..monitor.watch_sinks import WatchSinks
from ..monitor.watch_thread import WatchThread
from .forwarding import (
    EngineChanges,
    ForwardedComparison,
    ForwardedMemory,
    ForwardedRecorder,
    ForwardedRunFolder,
    ForwardedServer,
    ForwardedSubscriptions,
    Forwarder,
    MonitoringProcess,
    NoPart,
    RemoteIntervals,
)
from .messages import Setup, State, StoreAddress
from .wire import GroupSender, send_calls


def why_not_separate(engine: Any, settings: Settings) -> str | None:
    """Return why this watch must remain in the training process, or None."""
    if isinstance(engine, TorchEngine):
        return "the script trains without DeepSpeed"
    if settings.profile.every_steps:
        return "profile.every_steps is set"
    if settings.memory.trace_leaks:
        return "memory.trace_leaks is set"
    if otlp_options(settings.otel, os.environ).endpoints:
        return "OTLP is configured"
    if this_process().world_size > 1 and StoreAddress.of_job() is None:
        return "the ranks share no store that another process can reach"
    return None


class HangDetection(ForwardedComparison):
    """Detects hangs in the training process, whose stacks only it can read."""

    def __init__(self, context: WatchContext, process: MonitoringProcess) -> None:
        super().__init__(process)
        thread, fail_open = cast(ComparisonThread, self), context.fail_open
        self.monitor = HangMonitor(
            context=hang_context(context, thread),
            settings=context.settings.hang,
            phase_timer=context.phase_timer,
            recorder=context.recorder,
            fail_open=fail_open,
            is_ready=lambda: process.knows_peers,  # else a report would lack them
        )
        self.analyze_error = CollectiveErrorAnalyzer(
            context.identity.rank, context.recorder, thread
        ).analyze

    def start(self) -> None:
        """Start the thread that looks for hangs while the watch thread does not."""
        self.monitor.start()

    def close_hooks(self) -> None:
        """Look for hangs no more."""
        self.monitor.stop_checks()

    def stop(self) -> None:
        """End the detection."""
        self.monitor.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """The parts of the training process whose state is sent."""

    context: WatchContext
    recorder: ForwardedRecorder
    changes: EngineChanges
    memory: MemoryMonitor
    memory_analysis: ForwardedMemory
    hangs: HangDetection
    sampler: DeviceSampler
    collectives: CollectiveCosts
    instrumentation: EngineInstrumentation
    thread: WatchThread
    forwarder: Forwarder
    subscriptions: Subscriptions
    sinks: WatchSinks

    def state(self) -> State:
        """Return the state as it is now. Called on the watch thread each second, and at the end."""
        context, thread = self.context, self.thread
        calls, phase_timer, fail_open = (
            context.call_recorder,
            context.phase_timer,
            context.fail_open,
        )
        cost_seconds, num_lost, num_in_capture = self.collectives.figures()
        self.changes.look()
        let_training_run()
        values, removed = self.recorder.changes()
        let_training_run()
        engine = context.engine()
        return State(
            values=values,
            removed=removed,
            store=StoreAddress.of_job(),
            since_ns=phase_timer.activity_ns,
            issued={each.key: each.issued for each in calls.groups.rank_sets()},
            pause=self.hangs.monitor.expected_pause(),
            hangs=self.hangs.hangs,
            device_readings=self.sampler.device_readings,
            idle_readings=self.memory_analysis.take_idle_readings(),
            has_engine=engine is not None,
            variant=self.changes.count,
            is_patched=self.changes.is_patched,
            step=0 if engine is None else engine.global_steps,
            seconds={
                "hooks": (self.instrumentation.cost_ns + self.memory.cost_ns) / 1e9,
                "collectives": cost_seconds,
                "watch_thread": thread.cpu_seconds,
            },
            dropped={
                "collectives": num_lost + thread.dropped_calls,
                "graph_capture": num_in_capture,
                "steps": thread.dropped_steps + self.forwarder.num_lost,
                "timing": thread.untimed_calls,
                "run_log": self.sinks.dropped_lines,
                **(
                    {"listeners": self.subscriptions.dropped}
                    if self.subscriptions.has_listeners
                    else {}
                ),
                **({"sinks": self.sinks.dropped} if self.sinks.has_sinks else {}),
            },
            failures=dict(fail_open.failures),
            num_dead_threads=fail_open.num_dead_threads,
            wants_records=self.forwarder.wants_records(),
            batch_risks=self.memory_analysis.forecasts.take_batch_risks(),
        )


def build_separate_watch(
    engine: Any,
    collectives: CollectiveInstrumentation,
    fail_open: FailOpen,
    settings: Settings,
    watch_index: int,
    on_sink_open: Callable[[], object] = lambda: None,
) -> Watch:
    """Build the watch of an engine, and start the process that analyses its measurements.

    The arguments are those of `build_watch`. If a part fails, those built before it are closed.
    """
    identity = this_process()
    device = device_of(engine)
    calls, phase_timer, engine_ref = collectives.call_recorder, PhaseTimer(), EngineRef(engine)
    calls.groups.forget_destroyed()
    with ExitStack() as undo:
        changes = EngineChanges(engine_ref)
        is_logged = settings.run_log.enabled
        ring = StepRing.create() if is_logged else None
        if ring is not None:
            undo.callback(ring.close)
        process = MonitoringProcess(
            identity.rank, fail_open, changes.estimate, None if ring is None else ring.descriptor
        )
        undo.callback(process.close)
        recorder = ForwardedRecorder(process)
        folder = ForwardedRunFolder(process, rank=identity.rank, is_logged=is_logged, ring=ring)
        device_phases = time_device_phases(device, calls, phase_timer, fail_open)
        context = WatchContext(
            engine=engine_ref,
            identity=identity,
            watch_index=watch_index,
            settings=settings,
            call_recorder=calls,
            phase_timer=phase_timer,
            device_phases=device_phases,
            device_index=device,
            run_id=lambda: folder.run_id,
            folder=lambda: folder.path,
            recorder=recorder,
            fail_open=fail_open,
            step_errors=StepErrors(),
        )
        recorder.set(training.RUN_ACTIVE, 1)
        peak_flops = publish_peak(settings.flops, recorder, device_index=device)
        probes = memory_probes(device_index=device, reset_peak=settings.memory.reset_peak_counters)
        for probe in probes:
            undo.callback(probe.close)
        memory = MemoryMonitor(context, engine, probes, ForwardedMemory)
        undo.callback(memory.close)
        memory_analysis = cast(ForwardedMemory, memory.analysis)
        hangs = HangDetection(context, process)
        advisor = Advisor(context, lambda span: None, RemoteIntervals(process))
        subscriptions = ForwardedSubscriptions(fail_open, process)
        undo.callback(subscriptions.close)
        sinks = WatchSinks(_with_waiting_folder(context, folder), on_sink_open)
        undo.callback(sinks.close)
        if identity.rank == 0:
            add_outputs(context, subscriptions, sinks)
        listeners: list[Listener] = [*map(for_each, (subscriptions.enqueue, sinks.enqueue))]
        process.on_records = lambda records: _call_all(listeners, records)
        num_own = len(listeners)
        device_readers, gpus = _split(
            fail_open.call("devices", device_probes, device_index=device) or []
        )
        sampler = DeviceSampler(
            recorder, fail_open, device_readers, settings.sampling.device_interval_seconds
        )
        groups = GroupSender()
        on_step = fail_open.wrap("hang", hangs.monitor.add_step)
        forwarder = Forwarder(process, fail_open, groups, calls.groups, on_step)
        forwarder.risks = lambda: memory_analysis.forecasts.risks
        hangs.report_now = forwarder.report_now
        process.on_forecasts = memory_analysis.forecasts.restore
        forwarder.wants_records = lambda: (
            subscriptions.has_listeners or sinks.has_sinks or len(listeners) > num_own
        )
        thread = WatchThread(
            analysis=cast(StepAnalysis, forwarder),
            sampler=sampler,
            folder=cast(RunFolder, folder),
            calls=calls,
            fail_open=fail_open,
            device_phases=device_phases,
            device_index=device,
            work_seconds=SHORT_WORK_SECONDS,
        )
        undo.callback(thread.stop)
        memory.catch_up = lambda seconds: memory_analysis.catch_up(process, thread, seconds)

        # The hooks in training, which pass their measurements to the watch thread.
        warn_of_comms_logger()
        open_collectives(collectives, engine, undo)
        before_start = calls.drain()
        before_start.discard()
        calls.groups.drain_coverage()
        calls_before_start = send_calls(before_start, groups)
        make_room_for_clients(identity)
        process.start(
            Setup(
                settings=settings,
                process=identity,
                watch_index=watch_index,
                store=StoreAddress.of_job(),
                on_device=device_phases is not None,
                flops=fail_open.call("flops", flops_counter, engine, settings.flops.method),
                peak_flops=peak_flops,
                baseline_bytes=memory_analysis.baseline_bytes,
                devices_with_step_peaks=frozenset(
                    probe.device for probe in probes if probe.own_peaks
                ),
                gpus=gpus,
                info=engine_info(engine, identity.world_size),
                ds_config=fail_open.call("ds config", _plain_config, engine) or {},
                each_rank_has_own_data=each_rank_has_own_data(engine),
                groups=groups.changes(calls.groups),
                calls_before_start=calls_before_start,
            )
        )
        calls.connect(phase_timer, thread.enqueue, hangs.analyze_error)
        instrumentation = EngineInstrumentation(context, engine, memory.hooks, thread.enqueue, None)
        undo.callback(instrumentation.restore)
        exit_calls = ExitCalls(lambda: thread.num_steps, fail_open)
        undo.callback(exit_calls.close)
        parts = _Parts(
            context=context,
            recorder=recorder,
            changes=changes,
            memory=memory,
            memory_analysis=memory_analysis,
            hangs=hangs,
            sampler=sampler,
            collectives=CollectiveCosts(context, collectives),
            instrumentation=instrumentation,
            thread=thread,
            forwarder=forwarder,
            subscriptions=subscriptions,
            sinks=sinks,
        )
        nothing: Any = NoPart()
        server: Any = ForwardedServer(process, settings.serve.linger_seconds)
        overhead: Any = nothing
        overhead.publish = forwarder.publish
        forwarder.state = fail_open.wrap("state", parts.state, is_kept=True)
        subscriptions.is_wanted = forwarder.wants_records
        watch = Watch(
            engine=engine_ref,
            settings=settings,
            recorder=recorder,
            fail_open=fail_open,
            server=server,
            served_at=process,
            folder=cast(RunFolder, folder),
            metrics_log=nothing,
            run_info=nothing,
            listeners=listeners,
            subscriptions=subscriptions,
            sinks=sinks,
            overhead=overhead,
            collectives=collectives,
            instrumentation=instrumentation,
            memory=memory,
            comparison=cast(ComparisonMonitor, hangs),
            otel=nothing,
            advisor=advisor,
            thread=thread,
            exit_calls=exit_calls,
        )
        thread.start(
            {
                "hang": hangs.monitor.check,
                "memory": memory.publish,
                "advisor": advisor.poll,
            }
        )
        hangs.start()
        undo.pop_all()
    return watch


def _with_waiting_folder(context: WatchContext, folder: ForwardedRunFolder) -> WatchContext:
    """Return the context of a thread that may wait until the run is known."""

    def run_id() -> str | None:
        folder.wait()
        return folder.run_id

    def path() -> Path | None:
        folder.wait()
        return folder.path

    return replace(context, run_id=run_id, folder=path)


def _split(probes: Sequence[DeviceProbe]) -> tuple[list[DeviceProbe], dict[str, str]]:
    """Return the probes that remain here, and the UUIDs of GPUs that the other process reads.

    The use of the CPU is that of this process. A GPU is read by NVML, some thirty calls of its
    driver, from any process. XIDs until the other process has started are not counted.
    """
    here: list[DeviceProbe] = []
    gpus: dict[str, str] = {}
    for probe in probes:
        uuid = probe.uuid if isinstance(probe, NvmlDevice) else None
        if uuid is None:
            here.append(probe)
        else:
            gpus[probe.device] = uuid
            probe.close()
    return here, gpus


def _call_all(listeners: Sequence[Listener], records: Sequence[StepRecord]) -> None:
    for listener in listeners:
        listener(records)


def _plain_config(engine: Any) -> Mapping[str, Any]:
    """Return the ds config of an engine without secrets, and without objects of scripts."""
    text = json.dumps(without_secrets(ds_config_of(engine)), default=str)
    plain: Mapping[str, Any] = json.loads(text)
    return plain
