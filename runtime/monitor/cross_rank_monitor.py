"""What sets this rank beside others: the other ranks, its plan, and the profiler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from ...errors import DsConfigError
from ...metrics.step_record import StepRecord
from ..common.rank_store import StoreClientFactory
from ..cross_rank.cross_rank_thread import CrossRankThread
from ..cross_rank.error_analyzer import CollectiveErrorAnalyzer
from ..cross_rank.hang.hang_watch import HangWatch
from ..cross_rank.hang.sources import watch_for_hangs
from ..estimator.engine_plan import plan_of_engine
from ..estimator.plan import Plan
from ..estimator.volume_check import EngineVariant, WireVolumeCheck, engine_variant
from ..instrumentation.profiled_steps import ProfiledSteps
from ..instrumentation.watch_context import WatchContext
from .engine_info import cuda_device, is_data_parallel

logger = logging.getLogger(__name__)


class CrossRankMonitor:
    """Made on the training thread; runs from `start` until `stop`.

    Attributes:
        listeners: What gets the record of each step, on the watch thread.
        duties: What is to be done on the watch thread each second.
        begin_anew: To be called when the engine is another one.
        inquest: Called with a collective that raised.
        keep_pace: Takes each step's nanoseconds by phase, and those of them that were blocked.
        step_ended: Called on the training thread with the number of each step; None if not needed.
    """

    def __init__(self, context: WatchContext) -> None:
        fail_open, recorder = context.fail_open, context.recorder
        self._context = context
        speaks = context.identity.rank == 0
        volume = WireVolumeCheck(
            fail_open.wrap("estimate", self._plan), self._engine_variant, recorder, speaks=speaks
        )
        self.begin_anew = fail_open.wrap("volume", volume.begin_anew)
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
        self.keep_pace = self._exchange.pace.add if cuda_device() is None else _ignore_pace
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
        on_cuda = cuda_device() is not None
        recorder = self._context.recorder
        return ProfiledSteps(every_steps, recorder, on_cuda=on_cuda) if every_steps else None

    def _engine_variant(self) -> EngineVariant | None:
        engine = self._context.engine()
        return None if engine is None else engine_variant(engine)

    def _plan(self, micro_batches: int) -> Plan | None:
        """Plan a step of this engine; None where more than data parallelism communicates."""
        engine = self._context.engine()
        if engine is None or not is_data_parallel(engine):
            return None
        try:
            return plan_of_engine(engine, micro_batches)
        except DsConfigError as error:  # DeepSpeed takes it, as a newer one may
            logger.info("steps are not compared with a plan: %s", error)
            return None


def _ignore_pace(phase_ns: Sequence[int], blocked_ns: Sequence[int]) -> None:
    """Stand in where phases are not to be compared."""
