"""Runs accumulation windows, each of which makes one update.

All ranks open a window, replay it until it fits in memory, and commit it once. This module lies
outside the packages `oom_recovery` and `window`, because it imports both and `oom_recovery` imports
`window`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any

from deepspeed.comm import comm as deepspeed_comm

from ...errors import PeerOutOfMemoryError
from ..common import accelerator
from ..common.host_group import HostGroup
from ..engine.live_settings.activation_checkpointing import ModuleSelector
from ..memory.oom.oom_error import is_caused_by_oom
from .engine_holder import EngineHolder
from .oom_recovery.abort_window import abort_unsupported_reason, abort_window
from .oom_recovery.collective_guard import CollectiveGuard
from .oom_recovery.escalation import EscalationPolicy
from .oom_recovery.micro_batch_planner import MicroBatchPlanner, PeakHistory
from .oom_recovery.replay import OomReplay
from .run_end import RunEnd
from .run_metrics import RunMetrics
from .window.micro_batches import (
    Loss,
    LossSums,
    Window,
    divide_and_step,
    evaluate_micro_batches,
    split_sizes,
    train_micro_batches,
    weight_exponent,
)
from .window.rng import RngState
from .window.step_result import StepResult
from .window.window_agreement import (
    LocalBatches,
    TunerStatusSource,
    WindowAgreement,
    no_tuner_status,
    open_window,
)


class WindowRunner:
    """Runs one window at a time; all ranks make the same calls.

    Args:
        loss: The caller's loss function.
        engine_holder: Holder of the engine.
        host_group: Group of all ranks, in which they agree on each window.
        metrics: Recorder of windows, replays and lost time.
        run_end: Ends the run if the ranks cannot leave a window together.
        micro_batch_samples: Initial maximum size of a micro-batch, in samples.
        activation_checkpointing: Modules whose activations are recomputed if memory runs out.

    Attributes:
        micro_batch_samples: Requested maximum size of a micro-batch, in samples.
        steps: Windows committed so far.
        samples: Samples committed so far, over all ranks.
        exponent: The k for which 2**k is closest to the mean weight of a sample in the last window
            with weights; 0 before the first such window. See `weight_exponent`.
        replay: Replay of windows in which memory runs out.
        on_fatal_oom: Functions to call with the length and the samples of a micro-batch that does
            not fit in this rank's memory after all memory savings.
        passes_seconds: Wall time of the last window's forward and backward passes, including votes.
        tuner_status_source: Function that returns the status of this rank's tuner at the start of
            each window, or None in a run without a tuner.
        activation_checkpointing: Modules whose activations are recomputed if memory runs out; None
            for the default modules.
        opened: What the ranks agreed on for the last window; None if its batch could not be used.
        peak_history: This rank's memory peaks.
    """

    def __init__(
        self,
        loss: Loss,
        engine_holder: EngineHolder,
        host_group: HostGroup,
        metrics: RunMetrics,
        run_end: RunEnd,
        *,
        micro_batch_samples: int,
        activation_checkpointing: ModuleSelector | bool,
    ) -> None:
        self.micro_batch_samples = micro_batch_samples
        self.steps = self.samples = self.exponent = 0
        self.passes_seconds = 0.0
        self.on_fatal_oom: list[Callable[[int, int], None]] = []
        self.activation_checkpointing = (
            None if isinstance(activation_checkpointing, bool) else activation_checkpointing
        )
        self.tuner_status_source: TunerStatusSource = no_tuner_status
        self.opened: WindowAgreement | None = None
        self._loss, self._engine_holder = loss, engine_holder
        self._host_group, self._metrics, self._run_end = host_group, metrics, run_end
        engine = engine_holder.engine
        self.peak_history = PeakHistory(engine.watch, str(engine.device))
        self._guard = CollectiveGuard(host_group)
        self._guard.open(deepspeed_comm.cdb)  # outside the instrumentation of collectives
        self.replay = OomReplay(
            engine_source=engine_holder,
            host_group=host_group,
            guard=self._guard,
            planner=MicroBatchPlanner(),
            escalation=EscalationPolicy(
                engine_holder.memory_savings(self.activation_checkpointing)
            ),
            memory=self.peak_history,
            run_end=run_end,
        )
        self._memory_use = _MemoryUseTracker()
        self.replay.on_window_abort.append(engine_holder.abort_window)
        self.replay.on_error.append(metrics.count_oom)

    def train(self, batch: Any) -> StepResult:
        """Make one update; see `TrainingRun.train_batch`."""
        began = perf_counter()
        self.opened = None
        self.opened = opened = self._open(batch)
        window, local_batches = opened.window, opened.local_batches
        self._record_memory_use(local_batches)
        self._engine_holder.begin_window(2.0**-self.exponent)
        rng = RngState.capture()
        try:
            attempt = partial(self._attempt, window)
            replayed = self.replay.run_window(
                local_batches,
                attempt,
                guard_requested=opened.guard_requested,
                votes_requested=opened.records_missing,
            )
            sums = self._sums_of_all_ranks(replayed.outcome)
        except BaseException as error:  # BaseException: a script may save after Ctrl-C
            self._abort(local_batches, error)
            rng.restore()
            raise
        with self._run_end.updating("engine.step()"):
            skipped = self._update(local_batches, sums.weight / window.divisor)
            sizes = split_sizes(window.num_samples, replayed.micro_batches)
            result = StepResult(
                step=self.steps + 1,
                loss=sums.mean_loss,
                samples=window.total_samples,
                weight=sums.weight,
                micro_batches=tuple(filter(None, sizes)),
                replays=replayed.replays,
                skipped=skipped,
                seconds=perf_counter() - began,
            )
            self._commit(result)
        if replayed.replays:  # later micro-batches or memory savings differ
            self._memory_use.num_replays += replayed.replays
            self._restart_forecasts(local_batches)
        self._metrics.publish_window(
            result,
            own_samples=window.num_samples,
            accumulation_steps=replayed.micro_batches,
            lost_seconds=replayed.lost_seconds,
            device=str(self._engine_holder.engine.device),
        )
        return result

    def evaluate(self, batch: Any) -> float:
        """Return the mean loss of a batch; see `TrainingRun.evaluate`."""
        opened = open_window(self._host_group, batch, micro_batch_samples=self.micro_batch_samples)
        micro_batches = self.replay.planner.micro_batches(opened.local_batches)
        sizes = split_sizes(opened.window.num_samples, micro_batches)
        with ExitStack() as undo:  # runs after Ctrl-C too: training may continue
            undo.callback(self._discard_passes)  # if it cannot: an evaluation has no gradients
            undo.callback(RngState.capture().restore)
            engine, loss = self._engine_holder.engine, self._loss
            sums = self.replay.run_evaluation(
                partial(evaluate_micro_batches, engine, loss, batch, sizes)
            )
            undo.pop_all()
        return sums.over_ranks(self._host_group).mean_loss

    def close(self) -> None:
        """Remove the guard from the collectives. Safe to call twice."""
        self._guard.close()

    def _open(self, batch: Any) -> WindowAgreement:
        holder, records = self._engine_holder, 0
        if holder.compressor is None:
            records = self._guard.prepare_records(holder.engine, holder.num_changes)
        else:
            self._guard.recorder.pause()
        opened = open_window(
            self._host_group,
            batch,
            micro_batch_samples=self.micro_batch_samples,
            exponent=self.exponent,
            requests_guard=self.peak_history.is_low,
            records=records,
            tuner_status=self.tuner_status_source(),
        )
        if not opened.records_agree:
            self._guard.recorder.forbid()
        return opened

    def _record_memory_use(self, local_batches: LocalBatches) -> None:
        """Restart the memory forecast if this window uses memory differently than the last one."""
        self._memory_use.num_windows += 1
        self._restart_forecasts(local_batches)
        self.peak_history.on_window_start(
            step=self._engine_holder.engine.global_steps + 1,
            configuration=self.replay.planner.configuration,
        )

    def _restart_forecasts(self, local_batches: LocalBatches) -> None:
        """Let the memory forecast use only readings of the present use of memory, if it is new."""
        engine = self._engine_holder.engine
        if self._memory_use.has_changed(self.replay.planner.configuration, local_batches):
            engine.watch.restart_forecasts(
                after_step=engine.global_steps, use=self._memory_use.present
            )

    def _attempt(self, window: Window, num_micro_batches: int) -> LossSums:
        began = perf_counter()
        sizes = split_sizes(window.num_samples, num_micro_batches)
        sums = train_micro_batches(self._engine_holder.engine, self._loss, window, sizes)
        self.passes_seconds = perf_counter() - began
        # Reload before the update, because an out-of-memory error in the update cannot be undone.
        self._engine_holder.reload_optimizer_states()
        return sums

    def _sums_of_all_ranks(self, own: LossSums) -> LossSums:
        """Return the sums of all ranks; raise an error if no update can be made from them."""
        sums, engine = own.over_ranks(self._host_group), self._engine_holder.engine
        overflow_is_skipped = engine.fp16_enabled() and engine.dynamic_loss_scale()
        sums.check_finite(
            self.steps + 1,
            overflow_is_skipped=overflow_is_skipped,
            ends_run=lambda: abort_unsupported_reason(engine) is not None,
        )
        return sums

    def _abort(self, local_batches: LocalBatches, error: BaseException) -> None:
        """Restore the state before this window, and record the error if it is out of memory.

        If a kernel has failed, nothing can be restored. The script then gets its own error. If the
        gradients of the window cannot be discarded, the run ends.
        """
        if not accelerator.has_failed():
            self._engine_holder.abort_window()
        reason = self._discard_passes()
        if reason is not None:
            self._run_end.end_with_gradients(error, reason)
        self._guard.recorder.clear()
        self._record_fatal_oom(local_batches, error)

    def _discard_passes(self) -> str | None:
        """Remove the gradients and other state of unfinished passes from the engine.

        A run that has ended keeps them: its collectives in flight may wait for other ranks.

        Returns:
            Why this engine keeps them although the run has not ended; None if it does not.
        """
        if accelerator.has_failed() or self._run_end.has_ended:
            return None
        reason = abort_unsupported_reason(self._engine_holder.engine)
        if reason is None:
            abort_window(self._engine_holder.engine)
        return reason

    def _record_fatal_oom(self, local_batches: LocalBatches, error: BaseException) -> None:
        """Record the error if it is an out-of-memory error, which ends the run."""
        is_own = is_caused_by_oom(error)
        if is_own or isinstance(error, PeerOutOfMemoryError):
            self._metrics.count_failed_window()
        if is_own:
            count = self.replay.planner.micro_batches(local_batches)
            samples = local_batches.largest(count)[self._host_group.rank]
            for record in self.on_fatal_oom:
                record(local_batches.length, samples)

    def _update(self, local_batches: LocalBatches, divisor: float) -> bool:
        """Make the update; return whether it was skipped because fp16 gradients overflowed."""
        engine = self._engine_holder.engine
        skipped_before: int = engine.skipped_steps
        try:
            self.replay.update(partial(divide_and_step, engine, divisor))
        except (RuntimeError, MemoryError) as error:
            self._record_fatal_oom(local_batches, error)
            raise
        return bool(engine.skipped_steps != skipped_before)

    def _commit(self, result: StepResult) -> None:
        self.steps += 1
        self.samples += result.samples
        self._engine_holder.engine.global_samples = self.samples
        self._engine_holder.commit_window(skipped=result.skipped)
        if result.weight != result.samples:
            self.exponent = weight_exponent(result.weight, result.samples)


class _MemoryUseTracker:
    """Finds windows that use memory differently than the windows before.

    Attributes:
        num_replays: Attempts so far that ran out of memory. After each, the micro-batches or the
            memory savings differ.
        num_windows: Windows with the present use of memory.
        present: Identifies the present use; None before the first window.
    """

    # A script that chooses the micro-batches of each batch changes them again after at most so many
    # windows, so often. They are then one use. The tuner's changes last longer.
    SHORT_WINDOWS = 2
    MAX_SHORT = 8

    def __init__(self) -> None:
        self.num_replays = self.num_windows = 0
        self.present: Hashable = None
        self._num_short = 0  # consecutive uses of few windows

    def has_changed(self, configuration: int, local_batches: LocalBatches) -> bool:
        """Return whether the present use differs from that of the last call, if there was one.

        Args:
            configuration: Number of the planner's configuration.
            local_batches: Of the present window; the requested micro-batches count.
        """
        varies = self._num_short >= self.MAX_SHORT
        micro_batches = None if varies else tuple(local_batches.micro_batch_samples)
        present = (configuration, self.num_replays, micro_batches)
        if present == self.present:
            return False
        if not varies:
            is_short = self.num_windows <= self.SHORT_WINDOWS
            self._num_short = self._num_short + 1 if is_short else 0
        self.present, self.num_windows = present, 0
        return True
