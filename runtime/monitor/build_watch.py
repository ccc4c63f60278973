"""Builds the watch of an engine: creates its parts, connects them, and starts its threads."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from ...metrics.catalog import training
from ...metrics.exporters.server import MetricsServer
from ...metrics.recorder import Recorder
from ...metrics.settings import Settings
from ..collectives.call_recorder import CallRecorder
from ..collectives.group_roles import set_roles
from ..collectives.instrument import CollectiveInstrumentation
from ..collectives.unseen_calls import FlightRecorder
from ..common import accelerator
from ..common.accelerator import training_device_index
from ..common.exit_calls import ExitCalls
from ..common.fail_open import FailOpen
from ..common.gil_pauses import let_training_run
from ..common.phase_timer import PhaseTimer
from ..common.process_info import this_process
from ..common.rank_store import RankStore, TargetDiscovery
from ..common.step_errors import StepErrors
from ..common.torch_engine import TorchEngine
from ..devices.device_probes import device_probes, hardware_ids
from ..devices.memory_probes import memory_probes
from ..instrumentation.device_phases import DevicePhases
from ..instrumentation.engine_instrumentation import EngineInstrumentation
from ..instrumentation.flops import flops_counter, publish_peak
from ..instrumentation.watch_context import WatchContext
from ..live_page.live_page import LivePage, page_url
from ..sinks.configured_sinks import configured_sinks
from .advisor import Advisor
from .comparison_monitor import ComparisonMonitor
from .device_sampler import DeviceSampler
from .memory_monitor import MemoryMonitor
from .metrics_log import MetricsLog
from .otel_exporter import OtelExporter
from .overhead_metrics import OverheadMetrics
from .run_folder import RunFolder
from .run_info import RunInfoPublisher, publish_thresholds, warn_of_comms_logger
from .step_analysis import StepAnalysis
from .step_metrics import StepMetrics
from .subscriptions import Subscriptions, for_each
from .watch import EngineRef, ServedAt, Watch
from .watch_sinks import WatchSinks
from .watch_thread import WatchThread

logger = logging.getLogger(__name__)


def build_watch(
    engine: Any,
    collectives: CollectiveInstrumentation,
    fail_open: FailOpen,
    settings: Settings,
    watch_index: int,
    on_sink_open: Callable[[], object] = lambda: None,
) -> Watch:
    """Build and start the watch of an engine. If a part fails, close the parts built before it.

    Args:
        engine: A DeepSpeed engine, or a `TorchEngine`.
        collectives: The instrumentation of this process's collectives. It may be open already.
        fail_open: Wraps the functions that run inside training.
        settings: The settings of this run.
        watch_index: Number of watches that this process had before. Equal on all ranks.
        on_sink_open: Called on the thread of the sinks each time one has opened.
    """
    process, recorder = this_process(), Recorder()
    device = device_of(engine)
    calls, phase_timer, engine_ref = collectives.call_recorder, PhaseTimer(), EngineRef(engine)
    calls.groups.forget_destroyed()
    with ExitStack() as undo:
        # The server starts first, to answer scrapes from now on.
        store = RankStore(process, watch_index)
        targets = TargetDiscovery(store, process)
        folder = RunFolder(settings, process, store, targets)
        undo.callback(folder.close)
        live_page = live_page_of(process.rank, recorder, settings, folder, fail_open)
        server = MetricsServer(
            recorder=recorder,
            rank=process.rank,
            local_rank=process.local_rank,
            settings=settings.serve,
            targets=folder.targets if process.rank == 0 else None,
            make_thread=fail_open.thread,
            is_watch_dead=partial(fail_open.has_died, "watch"),
            serves_run=folder.serves_run,
            pages=None if live_page is None else live_page.pages,
            let_training_run=let_training_run,
        )
        undo.callback(server.close)
        address = server.start()
        if address is not None:
            targets.announce(address)
        metrics_log = MetricsLog(recorder, settings, process, folder.run, address)
        undo.callback(metrics_log.close)

        # The monitors.
        device_phases = time_device_phases(device, calls, phase_timer, fail_open)
        context = WatchContext(
            engine=engine_ref,
            identity=process,
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
        recorder.start_counters(training.METRICS)
        publish_thresholds(context)
        flops = fail_open.wrap("flops", flops_counter(engine, settings.flops.method))
        peak_flops = publish_peak(settings.flops, recorder, device_index=device)
        step_metrics = StepMetrics(
            recorder, flops, peak_flops, logs_loss=context.identity.rank == 0
        )
        run_info = RunInfoPublisher(
            context, store, folder, address, is_listening=lambda: server.is_listening
        )
        probes = memory_probes(device_index=device, reset_peak=settings.memory.reset_peak_counters)
        for probe in probes:
            undo.callback(probe.close)
        memory = MemoryMonitor(context, engine, probes)
        undo.callback(memory.close)
        comparison = ComparisonMonitor(context)
        otel = OtelExporter(
            context, partial(hardware_ids, device_index=device), lambda: store.token
        )
        undo.callback(otel.close)
        advisor = Advisor(context, otel.send)
        subscriptions = Subscriptions(fail_open)
        undo.callback(subscriptions.close)
        sinks = WatchSinks(context, on_sink_open)
        undo.callback(sinks.close)
        if process.rank == 0:
            add_outputs(context, subscriptions, sinks)
        listeners = [*comparison.listeners, *map(for_each, (subscriptions.enqueue, sinks.enqueue))]
        if live_page is not None:
            live_page.figures, live_page.slow = comparison.rank_figures, comparison.slow_phases
            listeners.append(fail_open.wrap("live page", live_page.on_steps))
        undo.callback(folder.close)
        sampler = DeviceSampler(
            recorder,
            fail_open,
            fail_open.call("devices", device_probes, device_index=device) or [],
            settings.sampling.device_interval_seconds,
        )
        analysis = StepAnalysis(
            step_metrics=step_metrics,
            sampler=sampler,
            memory=memory.analysis,
            comparison=comparison,
            folder=folder,
            otel=otel,
            fail_open=fail_open,
            listeners=listeners,
            on_device=device_phases is not None,
        )
        thread = WatchThread(
            analysis=analysis,
            sampler=sampler,
            folder=folder,
            calls=calls,
            fail_open=fail_open,
            device_phases=device_phases,
            device_index=device,
            flight_recorder=FlightRecorder() if isinstance(engine, TorchEngine) else None,
        )
        undo.callback(thread.stop)
        memory.catch_up = thread.catch_up

        # The hooks in training, which pass their measurements to the watch thread.
        warn_of_comms_logger()
        open_collectives(collectives, engine, undo)
        step_metrics.publish_calls_before_start(calls.drain())
        calls.groups.drain_coverage()
        calls.connect(phase_timer, thread.enqueue, comparison.on_collective_error)
        undo.callback(comparison.close_hooks)
        instrumentation = EngineInstrumentation(
            context, engine, memory.hooks, thread.enqueue, comparison.profiler
        )
        undo.callback(instrumentation.restore)

        exit_calls = ExitCalls(lambda: thread.num_steps, fail_open)
        undo.callback(exit_calls.close)
        overhead = OverheadMetrics(
            context,
            collectives=collectives,
            instrumentation=instrumentation,
            memory=memory,
            thread=thread,
            comparison=comparison,
            otel=otel,
            folder=folder,
            metrics_log=metrics_log,
            subscriptions=subscriptions,
            sinks=sinks,
        )
        watch = Watch(
            engine=engine_ref,
            settings=settings,
            recorder=recorder,
            fail_open=fail_open,
            server=server,
            served_at=ServedAt(
                address, None if live_page is None else page_url(address, settings.serve)
            ),
            folder=folder,
            metrics_log=metrics_log,
            run_info=run_info,
            listeners=listeners,
            subscriptions=subscriptions,
            sinks=sinks,
            overhead=overhead,
            collectives=collectives,
            instrumentation=instrumentation,
            memory=memory,
            comparison=comparison,
            otel=otel,
            advisor=advisor,
            thread=thread,
            exit_calls=exit_calls,
        )
        thread.start(
            {
                **comparison.periodic_tasks,
                "memory": memory.publish,
                "advisor": advisor.poll,
                "run folder": run_info.poll,
                "overhead": overhead.publish,
                "metrics log": metrics_log.poll,
            }
        )
        comparison.start()
        undo.pop_all()
    return watch


def device_of(engine: Any) -> int | None:
    """Return the index of the device that an engine trains on, or None on CPU."""
    return training_device_index(engine.module if isinstance(engine, TorchEngine) else None)


def time_device_phases(
    device: int | None, calls: CallRecorder, phase_timer: PhaseTimer, fail_open: FailOpen
) -> DevicePhases | None:
    """Let the phases be timed on the accelerator, too. Return None on CPU.

    They are not if the model is on another device than the current one: to record events on the
    current device would create a context there.
    """
    if device is None:
        return None
    if device != (used := accelerator.current.current_device()):
        kind = accelerator.current.kind
        logger.warning(
            "the model is on %s:%d, but the current device of its process is %s:%d. The loss and "
            "the times of collectives are unknown, and phases are times of the host. Call "
            "torch.%s.set_device(local_rank) before the watch starts.",
            *(kind, device, kind, used, kind),
        )
        return None
    phases = DevicePhases(calls.events)
    phase_timer.on_interval_end = fail_open.wrap("device phases", phases.mark, is_kept=True)
    return phases


def open_collectives(collectives: CollectiveInstrumentation, engine: Any, undo: ExitStack) -> None:
    """Instrument all collectives of an engine, and find the roles of its groups."""
    collectives.open()
    undo.callback(collectives.close)
    if isinstance(engine, TorchEngine):
        collectives.open_functional()
    deepspeed_comm = sys.modules.get("deepspeed.comm.comm")
    if deepspeed_comm is not None:  # it is imported by a script that has an engine
        collectives.open_backend(deepspeed_comm.cdb)
    set_roles(collectives.call_recorder.groups, engine)


def add_outputs(context: WatchContext, subscriptions: Subscriptions, sinks: WatchSinks) -> None:
    """Add the progress on stderr and the configured sinks, on rank 0."""
    settings, fail_open = context.settings, context.fail_open
    if settings.console in ("bar", "lines"):
        _print_progress(subscriptions, context.recorder, settings)
    configured = fail_open.call(
        "sinks", lambda: list(configured_sinks(settings.sinks, context.engine))
    )
    for name, sink in configured or ():
        sinks.add(sink, name)


def _print_progress(subscriptions: Subscriptions, recorder: Recorder, settings: Settings) -> None:
    from .progress import Progress  # it imports rich

    if sys.stderr is None or sys.stderr.closed:  # as of a daemon
        return
    progress = Progress(
        sys.stderr,
        is_bar=settings.console == "bar",
        total_steps=settings.tuner.total_steps,
        recorder=recorder,
    )
    subscriptions.add_kept("progress", progress.on_step, progress.on_end)


def live_page_of(
    rank: int, recorder: Recorder, settings: Settings, folder: RunFolder, fail_open: FailOpen
) -> LivePage | None:
    """Return the live page of the run, on rank 0; None if it is off."""
    if rank != 0 or not (settings.serve.enabled and settings.serve.live_page):
        return None
    return LivePage(
        recorder=recorder,
        thresholds=settings.alerts.thresholds,
        run_id=lambda: folder.run_id,
        folder=lambda: folder.path,
        targets=folder.targets,
        read=partial(fail_open.wrap, "live page", is_kept=True),
    )
