"""What sets this rank beside others: the other ranks, its plan, and the profiler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ...metrics.step_record import StepRecord
from ..common.accelerator import training_device_index
from ..common.rank_store import StoreClientFactory
from ..cross_rank.cross_rank_thread import CrossRankThread
from ..cross_rank.error_analyzer import CollectiveErrorAnalyzer
from ..cross_rank.hang.hang_watch import HangWatch
from ..cross_rank.hang.sources import watch_for_hangs
from ..estimator.volume_check import WireVolumeCheck
from ..instrumentation.profiled_steps import ProfiledSteps
from ..instrumentation.watch_context import WatchContext


class CrossRankMonitor:
    """Made on the training thread; runs from `start` until `stop`.

    Attributes:
        listeners: What gets the record of each step, on the watch thread.
        duties: What is to be done on the watch thread each second.
        rebind_engine: To be called with the new engine after a rebuild.
        inquest: Called with a collective that raised.
        keep_pace: Takes each step's nanoseconds by phase, and those of them that were blocked.
        step_ended: Called on the training thread with the number of each step; None if not needed.
    """

    def __init__(self, context: WatchContext) -> None:
        fail_open, recorder = context.fail_open, context.recorder
        self._context = context
        volume = WireVolumeCheck(
            context.engine(), recorder, fail_open, logs_differences=context.identity.rank == 0
        )
        self.rebind_engine = fail_open.wrap("volume", volume.rebind_engine)
        self._exchange = self._new_exchange(volume.ratio)
        self._hang = self._new_hang_watch()
        self._exchange.pause = lambda: self._hang.pause
        self._profile = self._new_profile()
        self.listeners: list[Callable[[StepRecord], object]] = [
            fail_open.wrap("volume", volume.add),
            fail_open.wrap("hang", self._hang.step_ended),
        ]
        if self._profile is not None:
            self.listeners.append(fail_open.wrap("profile", self._profile.compare))
        self.duties: Mapping[str, Callable[[], object]] = {"hang": self._hang.look}
        self.inquest = CollectiveErrorAnalyzer(
            context.identity.rank, recorder, self._exchange.report_now
        )
        # On CUDA the host runs ahead of the device, so that its phases do not show who is slow.
        on_cpu = training_device_index() is None
        self.keep_pace = self._exchange.pace.add if on_cpu else _ignore_pace
        self.step_ended = None if self._profile is None else self._profile.step_ended

    @property
    def cpu_seconds(self) -> float:
        """CPU time that the exchange's thread has used."""
        return self._exchange.cpu_seconds

    def start(self) -> None:
        """Begin to compare."""
        self._exchange.start()

    def forget_hooks(self) -> None:
        """In a forked child: let go of what ran in training, which is the parent's."""
        if self._profile is not None:
            self._profile.forget()

    def close_hooks(self) -> None:
        """End what runs in training. Safe to call twice."""
        if self._profile is not None:
            self._profile.close()

    def stop(self) -> None:
        """Compare what is left, and end. Safe to call twice."""
        self._exchange.stop()
        self._hang.close()

    def _new_exchange(self, volume_ratio: Callable[[], float | None]) -> CrossRankThread:
        context, identity, settings = self._context, self._context.identity, self._context.settings
        compares = settings.cross_rank.enabled and identity.world_size > 1
        clients = StoreClientFactory(identity.rank, identity.attempt, context.watch_index)
        return CrossRankThread(
            connect=clients.connect if compares else None,
            rank=identity.rank,
            host=identity.host,
            rank_sets=context.call_recorder.groups.rank_sets,
            recorder=context.recorder,
            fail_open=context.fail_open,
            seconds=settings.cross_rank.interval_seconds,
            volume_ratio=volume_ratio,
            idle_seconds=context.clock.idle_seconds,
            stuck_seconds=settings.hang.seconds / 2,
            moved=clients.moved,
        )

    def _new_hang_watch(self) -> HangWatch:
        context = self._context
        return watch_for_hangs(
            rank=context.identity.rank,
            settings=context.settings.hang,
            clock=context.clock,
            rank_sets=context.call_recorder.groups.rank_sets,
            exchange=self._exchange,
            folder=context.folder,
            recorder=context.recorder,
            fail_open=context.fail_open,
            training=self._is_training,
        )

    def _is_training(self) -> bool:
        engine = self._context.engine()
        return engine is None or engine.module.training

    def _new_profile(self) -> ProfiledSteps | None:
        every_steps = self._context.settings.profile.every_steps
        on_device = training_device_index() is not None
        recorder = self._context.recorder
        return ProfiledSteps(every_steps, recorder, on_device=on_device) if every_steps else None


def _ignore_pace(phase_ns: Sequence[int], blocked_ns: Sequence[int]) -> None:
    """Stand in where phases are not to be compared."""
