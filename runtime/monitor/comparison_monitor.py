"""Compares this rank's measurements with other ranks, the volume estimate and the profiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from ...metrics.step_record import StepRecord
from ..collectives.groups import CollectiveCall
from ..common.accelerator import training_device_index
from ..common.rank_store import StoreClientFactory
from ..common.torch_engine import TorchEngine
from ..cross_rank.comparison_thread import ComparisonThread, figures_by_name, slow_phases
from ..cross_rank.error_analyzer import CollectiveErrorAnalyzer
from ..cross_rank.hang.hang_context import HangContext
from ..cross_rank.hang.hang_monitor import HangMonitor
from ..estimator.engine_estimate import is_data_parallel
from ..estimator.volume_check import WireVolumeCheck
from ..instrumentation.profiled_steps import ProfiledSteps
from ..instrumentation.trace_files import TraceFiles
from ..instrumentation.watch_context import WatchContext
from .subscriptions import for_each


class ComparisonMonitor:
    """Runs the comparison with other ranks, hang detection and the profiler of one watch.

    Constructed on the training thread.

    Attributes:
        listeners: Functions called with the records of some steps, on the watch thread.
        periodic_tasks: Functions called on the watch thread each second.
        profiler: Profiles some steps. None if profiling is off.
    """

    def __init__(self, context: WatchContext) -> None:
        fail_open, recorder = context.fail_open, context.recorder
        self._context = context
        self._volume_check = WireVolumeCheck(
            context.engine(), recorder, fail_open, logs_differences=context.identity.rank == 0
        )
        self._rebind_volume_check = fail_open.wrap("volume", self._volume_check.rebind_engine)
        self._thread = new_comparison_thread(
            context,
            StoreClientFactory(
                context.identity.rank, context.identity.attempt, context.watch_index
            ),
        )
        self._hang_monitor = self._new_hang_monitor()
        self._thread.expected_pause = self._hang_monitor.expected_pause
        self._thread.counts_unseen = isinstance(context.engine(), TorchEngine)
        self.profiler = self._new_profiler()
        if each_rank_has_own_data(context.engine()):
            self._thread.compare_losses()
        self.listeners: list[Callable[[Sequence[StepRecord]], object]] = [
            for_each(fail_open.wrap("same losses", self._thread.on_step)),
            fail_open.wrap("volume", self._check_volume),
            for_each(fail_open.wrap("hang", self._hang_monitor.on_step_end)),
        ]
        if self.profiler is not None:
            self.listeners.append(for_each(fail_open.wrap("profile", self.profiler.compare)))
        self.periodic_tasks: Mapping[str, Callable[[], object]] = {
            "hang": self._hang_monitor.check,
            "cross_rank": self._thread.account_if_stuck,
        }
        self._analyzer = CollectiveErrorAnalyzer(context.identity.rank, recorder, self._thread)

    @property
    def cpu_seconds(self) -> float:
        """CPU time that the comparison thread has used, in seconds."""
        return self._thread.cpu_seconds

    def start(self) -> None:
        """Start the comparison thread, and the thread that looks for hangs if need be."""
        self._thread.start()
        self._hang_monitor.start()

    def rebind_engine(self, engine: Any) -> None:
        """Continue with the new engine after a rebuild."""
        self._rebind_volume_check(engine)

    def on_collective_error(self, failed: CollectiveCall) -> None:
        """Log the likely cause of the first collective that raised."""
        self._analyzer.analyze(failed)

    def add_step_times(self, phase_ns: Sequence[int], blocked_ns: Sequence[int]) -> None:
        """Add the nanoseconds of a step in each of PHASES, and the blocked part of each."""
        self._thread.step_times.add(phase_ns, blocked_ns)

    def rank_figures(self) -> dict[int, dict[str, float]]:
        """Return the known figures of each rank (`across_ranks.STATISTICS`), on rank 0."""
        return figures_by_name(self._thread.rank_figures)

    def slow_phases(self) -> dict[int, dict[str, float]]:
        """Return by rank the phases in which it is slow now, with its score."""
        return slow_phases(self._thread.stragglers)

    def forget_hooks(self) -> None:
        """Drop the profiler in a forked child, because it belongs to the parent process."""
        if self.profiler is not None:
            self.profiler.close_after_fork()

    def close_hooks(self) -> None:
        """Close the profiler, and look for hangs no more. Safe to call twice."""
        self._hang_monitor.stop_checks()
        if self.profiler is not None:
            self.profiler.close()

    def stop(self) -> None:
        """Send a last report to the other ranks, and end the thread. Safe to call twice."""
        self._thread.stop()
        self._hang_monitor.close()

    def _check_volume(self, records: Sequence[StepRecord]) -> None:
        self._volume_check.add(*records)
        self._thread.volume_ratio = self._volume_check.ratio()

    def _new_hang_monitor(self) -> HangMonitor:
        context = self._context
        return HangMonitor(
            context=hang_context(context, self._thread),
            settings=context.settings.hang,
            phase_timer=context.phase_timer,
            recorder=context.recorder,
            fail_open=context.fail_open,
            on_hang=context.fail_open.wrap(
                "traces", partial(context.step_errors.add, "hang", "zerowatch.Hang")
            ),
        )

    def _new_profiler(self) -> ProfiledSteps | None:
        context, settings = self._context, self._context.settings.profile
        if not settings.every_steps:
            return None
        return ProfiledSteps(
            settings.every_steps,
            context.recorder,
            on_device=training_device_index() is not None,
            traces=TraceFiles(context.folder, context.identity.rank, settings.max_traces),
        )


def new_comparison_thread(
    context: WatchContext, clients: StoreClientFactory | None
) -> ComparisonThread:
    """Return the comparison of a watch with other ranks. Without clients it compares nothing."""
    identity, settings = context.identity, context.settings
    compares = settings.cross_rank.enabled and identity.world_size > 1
    return ComparisonThread(
        clients=clients if compares else None,
        rank=identity.rank,
        world_size=identity.world_size,
        host=identity.host,
        groups=context.call_recorder.groups,
        phase_timer=context.phase_timer,
        recorder=context.recorder,
        fail_open=context.fail_open,
        interval_seconds=settings.cross_rank.interval_seconds,
        stuck_seconds=settings.hang.timeout_seconds / 2,
    )


def hang_context(context: WatchContext, thread: ComparisonThread) -> HangContext:
    """Return what hang detection needs of a watch, and of the comparison with other ranks."""

    def is_training() -> bool:
        engine = context.engine()
        try:
            return engine is None or engine.module.training
        except ReferenceError:  # the script has just released the model
            return True

    return HangContext(
        rank=context.identity.rank,
        groups=context.call_recorder.groups,
        thread=thread,
        fail_open=context.fail_open,
        folder=context.folder,
        is_training=is_training,
        device_index=context.device_index,
    )


def each_rank_has_own_data(engine: Any) -> bool:
    """Whether each rank of the job should train on its own samples: data parallelism alone.

    The stages of a pipeline and the slices of a model share their samples.
    """
    if not isinstance(engine, TorchEngine):
        return is_data_parallel(engine)
    found = list(engine.group_roles())
    roles = {role for _, role in found}
    return roles == {"dp"} and all(group.size() == dist.get_world_size() for group, _ in found)
