"""A run's windows: opened by all ranks, tried until they fit, committed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any

from ..common.host_group import HostGroup
from ..engine.live_settings.choose_modules import ModuleSelector
from ..memory.oom.parse_error import is_caused_by_oom
from .engine_holder import EngineHolder
from .metrics import TrainerMetrics
from .oom_recovery.abort import abort_window, can_abort
from .oom_recovery.collective_guard import PeerOutOfMemory
from .oom_recovery.micro_batch_planner import BatchShares
from .open_window import WindowAgreement, open_window
from .peak_history import PeakHistory
from .replay_setup import new_guard, new_replay
from .window.gradients import step_divided, weight_exponent
from .window.micro_batches import Loss, Window, evaluate_micro_batches, train_micro_batches
from .window.plan import sizes
from .window.result import WindowResult
from .window.rng import RngState
from .window.sums import Sums


class WindowRunner:
    """Runs one window at a time, on all ranks alike.

    Args:
        loss: The caller's.
        changes: Holds the engine.
        host_group: Of the run.
        figures: Where it is told.
        micro_batch_samples: What a micro-batch holds at most, to begin with.
        checkpointed: What activation checkpointing is laid on where memory does not suffice.

    Attributes:
        micro_batch_samples: As asked for now.
        steps, samples: Committed so far; samples over all ranks.
        exponent: Gradients are accumulated over samples times 2 to this.
        replay: What runs a window again.
        on_fatal: Called with length and samples of a micro-batch for which this rank's memory did
            not suffice, whatever was given up.
        passes_seconds: Wall time of the last window's forward and backward passes, without votes.
        asides: Returns what this rank tells the others as a window begins, besides.
        checkpointed: As given; None for what is checkpointed by default.
        opened: The last window, as it began; None where its batch could not be used.
        memory: What is known of this rank's.
    """

    def __init__(
        self,
        loss: Loss,
        changes: EngineHolder,
        host_group: HostGroup,
        figures: TrainerMetrics,
        *,
        micro_batch_samples: int,
        checkpointed: ModuleSelector | bool,
    ) -> None:
        self.micro_batch_samples = micro_batch_samples
        self.steps = self.samples = self.exponent = 0
        self.passes_seconds = 0.0
        self.on_fatal: list[Callable[[int, int], None]] = []
        self.checkpointed = None if isinstance(checkpointed, bool) else checkpointed
        self.asides: Callable[[], Sequence[float]] = tuple
        self.opened: WindowAgreement | None = None
        self._loss, self._changes = loss, changes
        self._host_group, self._figures = host_group, figures
        engine = changes.engine
        self.memory = PeakHistory(engine.watch, str(engine.device))
        self._guard = new_guard(host_group)
        self.replay = new_replay(
            lambda: changes.engine,
            host_group,
            self._guard,
            changes.escalations(self.checkpointed),
            self.memory.measured,
        )
        self.replay.on_window_abort.append(changes.abort_window)
        self.replay.on_error.append(figures.ran_out)

    def train(self, batch: Any) -> WindowResult:
        """Make one update; see `TrainingRun.train_batch`."""
        began = perf_counter()
        self.opened = None
        self.opened = opened = self._open(batch)
        window, share = opened.window, opened.share
        self._changes.begin_window(2.0**-self.exponent)
        rng = RngState.capture()
        try:
            attempt = partial(self._attempt, window)
            replayed = self.replay.run(share, attempt, asks_for_guard=opened.guarded)
            sums = self._usable(replayed.outcome)
        except BaseException as error:  # an interrupt too: the run may be saved after it
            self._abandon(share, error)
            rng.restore()
            raise
        skipped = self._update(share, sums.weight / window.divisor)
        result = WindowResult(
            step=self.steps + 1,
            loss=sums.mean_loss,
            samples=window.total_samples,
            weight=sums.weight,
            micro_batches=tuple(filter(None, sizes(window.num_samples, replayed.micro_batches))),
            replays=replayed.replays,
            skipped=skipped,
            seconds=perf_counter() - began,
        )
        self._commit(result)
        self._figures.tell(
            result,
            own_samples=window.num_samples,
            accumulation_steps=replayed.micro_batches,
            lost_seconds=replayed.lost_seconds,
            device=str(self._changes.engine.device),
        )
        return result

    def evaluate(self, batch: Any) -> float:
        """Return the mean loss of a batch; see `TrainingRun.evaluate`."""
        opened = open_window(self._host_group, batch, micro_batch_samples=self.micro_batch_samples)
        micro_batches = self.replay.plans.micro_batches(opened.share)
        cut = sizes(opened.window.num_samples, micro_batches)
        with ExitStack() as undo:  # after an interrupt too: training may go on
            undo.callback(self._leave_passes)
            sums = evaluate_micro_batches(self._changes.engine, self._loss, batch, cut)
            undo.pop_all()
        return sums.over_ranks(self._host_group).mean_loss

    def close(self) -> None:
        """Take the guard off the collectives. Safe to call twice."""
        self._guard.close()

    def _open(self, batch: Any) -> WindowAgreement:
        return open_window(
            self._host_group,
            batch,
            micro_batch_samples=self.micro_batch_samples,
            exponent=self.exponent,
            asks_for_guard=self.memory.is_low,
            asides=self.asides(),
        )

    def _attempt(self, window: Window, num_micro_batches: int) -> Sums:
        began = perf_counter() - self._guard.vote_seconds
        cut = sizes(window.num_samples, num_micro_batches)
        sums = train_micro_batches(self._changes.engine, self._loss, window, cut)
        self.passes_seconds = perf_counter() - self._guard.vote_seconds - began
        # Here, where running out of memory can still be undone.
        self._changes.reload_optimizer_states()
        return sums

    def _usable(self, own: Sums) -> Sums:
        """Return the sums of all ranks, if an update can be made by them."""
        sums, engine = own.over_ranks(self._host_group), self._changes.engine
        overflow_is_skipped = engine.fp16_enabled() and engine.dynamic_loss_scale()
        sums.check_finite(self.steps + 1, overflow_is_skipped=overflow_is_skipped)
        return sums

    def _abandon(self, share: BatchShares, error: BaseException) -> None:
        """Leave the run as it was before this window."""
        self._changes.abort_window()
        self._leave_passes()
        self._note(share, error)

    def _leave_passes(self) -> None:
        """Drop what passes that did not come to their end left in the engine."""
        if can_abort(self._changes.engine) is None:
            abort_window(self._changes.engine)

    def _note(self, share: BatchShares, error: BaseException) -> None:
        """Tell of an out-of-memory error that ends this run."""
        is_own = is_caused_by_oom(error)
        if is_own or isinstance(error, PeerOutOfMemory):
            self._figures.gave_up()
        if is_own:
            count = self.replay.plans.micro_batches(share)
            samples = share.largest(count)[self._host_group.rank]
            for note in self.on_fatal:
                note(share.length, samples)

    def _update(self, share: BatchShares, divisor: float) -> bool:
        """Make the update; return whether it was skipped, as fp16 gradients overflowed."""
        engine = self._changes.engine
        skipped_before: int = engine.skipped_steps
        try:
            self.replay.update(partial(step_divided, engine, divisor))
        except (RuntimeError, MemoryError) as error:
            self._note(share, error)
            raise
        return bool(engine.skipped_steps != skipped_before)

    def _commit(self, result: WindowResult) -> None:
        self.steps += 1
        self.samples += result.samples
        self._changes.engine.global_samples = self.samples
        self._changes.commit_window(skipped=result.skipped)
        if result.weight != result.samples:
            self.exponent = weight_exponent(result.weight, result.samples)
