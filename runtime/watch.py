"""The watch on one engine: puts the rooms together, and takes everything off again."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed.comm.comm as deepspeed_comm

from ..metrics.catalog import training
from ..metrics.exporters.server import MetricsServer
from ..metrics.recorder import Recorder
from ..metrics.settings import Settings
from ..metrics.snapshot import Snapshot
from ..metrics.step_record import StepRecord
from .collectives.roles import role_of, role_of_pairs
from .collectives.tap import CommTap
from .comparison import Comparison
from .data_hooks import DataHooks
from .devices.choose import device_probes, hardware_ids
from .engine_hooks import EngineHooks
from .facts import cuda_device, run_facts, warn_of_comms_logger
from .flops_counter import flops_counter, publish_peak
from .hooks import Hooks
from .identity import Addresses, NoticeBoard, this_process
from .memory.choose import memory_probes
from .memory_watch import MemoryWatch
from .own_costs import own_costs
from .phase_clock import PhaseClock
from .publisher import Publisher
from .run_folder import RunFolder
from .sampler import Sampler
from .step_closer import StepCloser
from .surroundings import Surroundings
from .telemetry import Telemetry
from .watch_thread import WatchThread

logger = logging.getLogger(__name__)


class Watch:
    """Watches one engine from construction until `close`.

    Args:
        engine: A DeepSpeed engine.
        tap: The process's tap, open or not.
        hooks: Guards whatever runs inside training.
        settings: The settings of this run.
        epoch: How many watches this process has had; the same on all ranks.

    Attributes:
        address: "host:port" at which this rank serves its metrics; None where it does not.
    """

    def __init__(
        self, engine: Any, tap: CommTap, hooks: Hooks, settings: Settings, epoch: int
    ) -> None:
        self._engine = weakref.ref(engine)
        self._settings = settings
        self._epoch = epoch
        self._hooks = hooks
        self._tap = tap
        self._recorder = Recorder()
        self._identity = this_process()
        self._clock = PhaseClock()
        self._listeners: list[Callable[[StepRecord], object]] = []
        self._closed = False
        self._informed = False
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
        self._listeners.append(self._hooks.guard("listener", listener))

    def snapshot(self) -> Snapshot:
        """Return all values as they stand."""
        return self._recorder.snapshot()

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
                self._ended_by(sys.exc_info()[1] or getattr(sys, "last_value", None))
            self._close_hooks()
            self._thread.give(self._tap.notes.take())
            self._thread.stop()
            self._comparison.stop()
            self._memory.close()
            self._recorder.set(training.RUN_ACTIVE, 0)
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

    def abandon(self) -> None:
        """In a forked child: become inert and close the sockets, without touching any thread."""
        self._closed = True
        self._server.close()
        self._comparison.forget_hooks()
        self._telemetry.abandon()
        self._close_hooks()

    def _open_server(self, undo: ExitStack) -> None:
        settings = self._settings
        board = NoticeBoard(self._identity, self._epoch)
        addresses = Addresses(board, self._identity)
        self._folder = RunFolder(settings, self._identity, board, addresses)
        self._server = MetricsServer(
            recorder=self._recorder,
            rank=self._identity.rank,
            local_rank=self._identity.local_rank,
            settings=settings.serve,
            targets=self._folder.targets if self._identity.rank == 0 else None,
        )
        undo.callback(self._server.close)
        self.address = self._server.start()
        if self.address is not None:
            addresses.announce(self.address)

    def _open_rooms(self, engine: Any, undo: ExitStack) -> None:
        settings, device = self._settings, cuda_device()
        self._recorder.set(training.RUN_ACTIVE, 1)
        self._flops = flops_counter(engine.module, settings.flops.method, self._hooks)
        undo.callback(self._flops.close)
        flops_of = self._hooks.guard("flops", self._flops)
        peak = publish_peak(settings.flops, self._recorder, cuda_device=device)
        self._publisher = Publisher(self._recorder, flops_of, peak)
        around = self._surroundings()
        probes = memory_probes(cuda_device=device, reset_peak=settings.sampling.reset_peak)
        for probe in probes:
            undo.callback(probe.close)
        self._memory = MemoryWatch(around, engine, probes)
        undo.callback(self._memory.close)
        self._ended_by = self._hooks.guard("post-mortem", self._memory.ended_by)
        self._comparison = Comparison(around)
        self._listeners.extend(self._comparison.listeners)
        self._telemetry = Telemetry(around, partial(hardware_ids, cuda_device=device))
        undo.callback(self._telemetry.close)
        self._thread = self._new_thread(device)
        self._costs = own_costs(
            around,
            self._tap,
            hooks_ns=lambda: self._engine_hooks.cost_ns + self._memory.cost_ns,
            thread=self._thread,
            comparison=self._comparison,
            telemetry=self._telemetry,
            folder=self._folder,
        )

    def _new_thread(self, device: int | None) -> WatchThread:
        sampler = Sampler(
            self._recorder,
            self._hooks,
            device_probes(cuda_device=device),
            self._settings.sampling.device_seconds,
        )
        return WatchThread(
            publisher=self._publisher,
            sampler=sampler,
            take_memory=self._memory.take,
            events=self._tap.notes.events,
            hooks=self._hooks,
            append=self._folder.append,
            keep_pace=self._comparison.keep_pace,
            listeners=self._listeners,
            trace=self._telemetry.trace if self._telemetry.makes_traces else None,
            duties={
                **self._comparison.duties,
                "memory": self._memory.publish,
                "run folder": self._look_around,
                "costs": lambda: self._costs.publish(),
            },
            on_cuda=device is not None,
        )

    def _surroundings(self) -> Surroundings:
        return Surroundings(
            engine=self._engine,
            identity=self._identity,
            epoch=self._epoch,
            settings=self._settings,
            notes=self._tap.notes,
            clock=self._clock,
            run_id=lambda: self.run_id,
            folder=lambda: self.run_folder,
            recorder=self._recorder,
            hooks=self._hooks,
        )

    def _open_hooks(self, engine: Any, undo: ExitStack) -> None:
        warn_of_comms_logger()
        notes, hooks = self._tap.notes, self._hooks
        self._tap.open()
        undo.callback(self._tap.close)
        self._tap.open_backend(deepspeed_comm.cdb)
        notes.groups.name_roles(role_of, role_of_pairs)
        self._publisher.publish_earlier(notes.take())
        notes.groups.take_coverage()
        notes.connect(self._clock, self._thread.give, self._comparison.inquest)
        memory, profile = self._memory.hooks, self._comparison.step_ended
        close_step = StepCloser(
            engine, self._clock, notes, hooks, self._thread.give, memory.step_ended, profile
        )
        undo.callback(self._comparison.close_hooks)
        self._engine_hooks = EngineHooks(engine, self._clock, hooks, memory, close_step)
        undo.callback(self._engine_hooks.restore)
        self._data_hooks = DataHooks(self._clock, hooks, lambda: self._engine_hooks.training)

    def _close_hooks(self) -> None:
        self._engine_hooks.restore()
        self._memory.close_hooks()
        self._comparison.close_hooks()
        self._data_hooks.restore()
        self._tap.close()
        self._flops.close()

    def _look_around(self) -> None:
        """Learn the run's name and, on rank 0, where the other ranks serve."""
        self._folder.look_around()
        engine, run_id = self._engine(), self.run_id
        if engine is None:  # collected without a close
            self._recorder.set(training.RUN_ACTIVE, 0)
        if not self._informed and engine is not None and run_id is not None:
            self._informed = True
            self._announce()
            facts = run_facts(engine, run_id, self._identity.world_size)
            self._recorder.inform(training.RUN_INFO, *facts)

    def _announce(self) -> None:
        if self._identity.rank == 0:
            served = f"http://{self.address}/metrics" if self.address else "not served"
            logger.info(
                "watching %d rank(s); metrics %s; run log %s",
                self._identity.world_size,
                served,
                self.run_folder or "not written",
            )

    def _serve_until_read(self) -> None:
        self._server.linger()
        self._server.close()
