"""The watch on one engine: puts the rooms together, and takes everything off again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed.comm.comm as deepspeed_comm

from ...metrics.catalog import training
from ...metrics.exporters.server import MetricsServer
from ...metrics.recorder import Recorder
from ...metrics.settings import Settings
from ...metrics.snapshot import Snapshot
from ...metrics.step_record import StepRecord
from ..collectives.instrument import CollectiveInstrumentation
from ..collectives.roles import p2p_role, role_of
from ..common.accelerator import training_device_index
from ..common.fail_open import FailOpen
from ..common.phase_timer import PhaseTimer
from ..common.process_info import this_process
from ..common.rank_store import RankStore, TargetDiscovery
from ..devices.choose import device_probes, hardware_ids
from ..devices.memory.choose import memory_probes
from ..instrumentation.flops import flops_counter, publish_peak
from ..instrumentation.hook_set import EngineInstrumentation
from ..instrumentation.watch_context import WatchContext
from .advisor import Advisor
from .cross_rank_monitor import CrossRankMonitor
from .device_sampler import DeviceSampler
from .engine_info import warn_of_comms_logger
from .engine_ref import EngineRef
from .memory_monitor import MemoryMonitor
from .otel import OtelExporter
from .overhead_metrics import own_costs
from .run_folder import RunFolder
from .run_info import RunInfoPublisher
from .step_metrics import StepMetrics
from .watch_thread import WatchThread


class Watch:
    """Watches one engine from construction until `close`.

    Args:
        engine: A DeepSpeed engine.
        collectives: The instrumentation of this process's collectives, open or not.
        fail_open: Guards whatever runs inside training.
        settings: The settings of this run.
        watch_index: How many watches this process has had; the same on all ranks.

    Attributes:
        address: "host:port" at which this rank serves its metrics; None where it does not.
        advisor: Says what would make the run faster, until a tuner takes its place.
        fail_open: Wraps whatever runs inside training.
        recorder: Where all values are.
        settings: Of this run.
    """

    def __init__(
        self,
        engine: Any,
        collectives: CollectiveInstrumentation,
        fail_open: FailOpen,
        settings: Settings,
        watch_index: int,
    ) -> None:
        self._engine = EngineRef(engine)
        self.settings = settings
        self._watch_index = watch_index
        self.fail_open = fail_open
        self._collectives = collectives
        self.recorder = Recorder()
        self._identity = this_process()
        self._clock = PhaseTimer()
        self._listeners: list[Callable[[StepRecord], object]] = []
        self._closed = False
        with ExitStack() as undo:  # what is open already is closed if the rest cannot be
            self._open_server(undo)
            self._open_rooms(engine, undo)
            self._open_hooks(engine, undo)
            self._thread.start()
            self._comparison.start()
            undo.pop_all()

    @property
    def run_id(self) -> str | None:
        """The run's name; on ranks other than 0 None for a moment, until rank 0 has told it."""
        return self._folder.run_id

    @property
    def run_folder(self) -> Path | None:
        """The folder with the run's logs; None until the run has a name, or if none is written."""
        return self._folder.path

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return not self._closed

    def watches(self, engine: Any) -> bool:
        """Whether this is the engine that is watched."""
        return self._engine() is engine

    def subscribe(self, listener: Callable[[StepRecord], None]) -> None:
        """Call `listener` with the record of each step, on the watch thread, within a second.

        A listener that raises is dropped, as any hook.
        """
        self._listeners.append(self.fail_open.wrap("listener", listener))

    def rebind_engine(self, engine: Any) -> None:
        """Watch another engine of the same model and run from now on, between two windows.

        Counters, run, server and all threads stay. All ranks move at the same time. A closed watch
        stays closed.

        Args:
            engine: What stands in the place of the engine so far, as after a rebuild.
        """
        engine.watch = self
        self._engine.point_at(engine)
        if self._closed:
            return
        self._engine_side.rebind_engine(engine)
        self._memory.rebind_engine(engine)
        self._comparison.rebind_engine(engine)
        self._introduction.begin_anew()

    def discard_window(self) -> None:
        """Count the micro-batches since the last step no more: they are run again, or dropped."""
        self._engine_side.discard_window()

    def suspended(self) -> AbstractContextManager[None]:
        """Return a context whose time is counted as that of a checkpoint, as a rebuild's."""
        return self._engine_side.suspended()

    def snapshot(self) -> Snapshot:
        """Return all values as they stand."""
        return self.recorder.snapshot()

    def close(self, *, failed: bool = False, at_exit: bool = False) -> None:
        """Take every hook off, write what has arrived, and stop serving once the end was read.

        Safe to call twice. Returns before the last scrape, except at exit.

        Args:
            failed: Whether the run ends by an exception; then nobody waits for a scrape.
            at_exit: Whether the process ends now; then the last scrape is waited for here.
        """
        if not self._closed:
            self._closed = True
            if failed:
                self.advisor.disable()
                self._ended_by(sys.exc_info()[1] or getattr(sys, "last_value", None))
            self._close_hooks()
            self._thread.enqueue(self._collectives.call_recorder.drain())
            self._thread.stop()
            self._comparison.stop()
            self._memory.close()
            self.recorder.set(training.RUN_ACTIVE, 0)
            self._folder.close()
            self._telemetry.close()
        if failed:
            self._server.close()
        elif at_exit:
            self._serve_until_read()
        else:
            threading.Thread(
                target=self._serve_until_read, name="zerowatch-linger", daemon=True
            ).start()

    def close_after_fork(self) -> None:
        """In a forked child: become inert and close the sockets, without touching any thread."""
        self._closed = True
        self._server.close()
        self._comparison.forget_hooks()
        self._telemetry.close_after_fork()
        self._close_hooks()

    def _open_server(self, undo: ExitStack) -> None:
        board = RankStore(self._identity, self._watch_index)
        addresses = TargetDiscovery(board, self._identity)
        self._folder = RunFolder(self.settings, self._identity, board, addresses)
        self._server = MetricsServer(
            recorder=self.recorder,
            rank=self._identity.rank,
            local_rank=self._identity.local_rank,
            settings=self.settings.serve,
            targets=self._folder.targets if self._identity.rank == 0 else None,
        )
        undo.callback(self._server.close)
        self.address = self._server.start()
        if self.address is not None:
            addresses.announce(self.address)

    def _open_rooms(self, engine: Any, undo: ExitStack) -> None:
        settings, device = self.settings, training_device_index()
        self.recorder.set(training.RUN_ACTIVE, 1)
        flops = flops_counter(engine.module, settings.flops.method)
        flops_of = self.fail_open.wrap("flops", flops)
        peak = publish_peak(settings.flops, self.recorder, device_index=device)
        self._publisher = StepMetrics(self.recorder, flops_of, peak)
        context = self._context = self._surroundings()
        self._introduction = RunInfoPublisher(context, self._folder, self.address)
        probes = memory_probes(device_index=device, reset_peak=settings.memory.reset_peak_counters)
        for probe in probes:
            undo.callback(probe.close)
        self._memory = MemoryMonitor(context, engine, probes)
        undo.callback(self._memory.close)
        self._ended_by = self.fail_open.wrap("oom report", self._memory.on_run_error)
        self._comparison = CrossRankMonitor(context)
        self._listeners.extend(self._comparison.listeners)
        self._telemetry = OtelExporter(context, partial(hardware_ids, device_index=device))
        undo.callback(self._telemetry.close)
        self.advisor = Advisor(context, self._telemetry.tell)
        self._thread = self._new_thread(device)
        self._costs = own_costs(
            context,
            self._collectives,
            hooks_ns=lambda: self._engine_side.cost_ns + self._memory.cost_ns,
            thread=self._thread,
            comparison=self._comparison,
            telemetry=self._telemetry,
            folder=self._folder,
        )

    def _new_thread(self, device: int | None) -> WatchThread:
        sampler = DeviceSampler(
            self.recorder,
            self.fail_open,
            device_probes(device_index=device),
            self.settings.sampling.device_seconds,
        )
        return WatchThread(
            publisher=self._publisher,
            sampler=sampler,
            take_memory=self._memory.add_step,
            events=self._collectives.call_recorder.events,
            fail_open=self.fail_open,
            append=self._folder.append,
            keep_pace=self._comparison.add_step_times,
            listeners=self._listeners,
            trace=self._telemetry.trace if self._telemetry.makes_traces else None,
            duties={
                **self._comparison.duties,
                "memory": self._memory.publish,
                "advisor": self.advisor.look,
                "run folder": self._introduction.look,
                "costs": lambda: self._costs.publish(),
            },
            on_device=device is not None,
        )

    def _surroundings(self) -> WatchContext:
        return WatchContext(
            engine=self._engine,
            identity=self._identity,
            watch_index=self._watch_index,
            settings=self.settings,
            call_recorder=self._collectives.call_recorder,
            clock=self._clock,
            run_id=lambda: self.run_id,
            folder=lambda: self.run_folder,
            recorder=self.recorder,
            fail_open=self.fail_open,
        )

    def _open_hooks(self, engine: Any, undo: ExitStack) -> None:
        warn_of_comms_logger()
        calls = self._collectives.call_recorder
        self._collectives.open()
        undo.callback(self._collectives.close)
        self._collectives.open_backend(deepspeed_comm.cdb)
        calls.groups.set_roles(role_of, p2p_role)
        self._publisher.publish_earlier(calls.drain())
        calls.groups.drain_coverage()
        calls.connect(self._clock, self._thread.enqueue, self._comparison.on_collective_error)
        undo.callback(self._comparison.close_hooks)
        self._engine_side = EngineInstrumentation(
            self._context,
            engine,
            self._memory.hooks,
            self._thread.enqueue,
            self._comparison.profiler,
        )
        undo.callback(self._engine_side.restore)

    def _close_hooks(self) -> None:
        self._engine_side.restore()
        self._memory.close_hooks()
        self._comparison.close_hooks()
        self._collectives.close()

    def _serve_until_read(self) -> None:
        self._server.wait_for_final_scrape()
        self._server.close()
