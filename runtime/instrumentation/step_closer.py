"""The end of a step on the training thread: copies what only it can see, and hands it over."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

from ...metrics.exporters.opentelemetry import current_trace_labels
from ..collectives.recorder import CallRecorder
from ..common.device_scalar import Number, number
from ..common.fail_open import FailOpen
from ..common.phase_timer import PhaseTimer
from ..memory.step_sample import StepMemorySample
from .raw_step import RawStep
from .step_counts import StepCounts

# Asking the groups costs more than the rest of a step's end.
COVERAGE_SECONDS = 1.0


class StepCollector:
    """Closes the steps of one engine, which it holds weakly.

    What is read of the engine is guarded each by itself: a number that cannot be had is None, and
    the steps go on. `profile` is told the number of each step once it is handed over by `give`.
    """

    def __init__(
        self,
        engine: Any,
        clock: PhaseTimer,
        calls: CallRecorder,
        fail_open: FailOpen,
        give: Callable[[RawStep], None],
        read_memory: Callable[[], StepMemorySample | None],
        profile: Callable[[int], None] | None = None,
    ) -> None:
        self._engine = weakref.ref(engine)
        self._clock = clock
        self._calls = calls
        self._give = give
        self._read_memory = fail_open.wrap("memory", read_memory)
        self._coverage_due = 0.0
        self._coverage = fail_open.wrap("coverage", calls.groups.drain_coverage)
        self._trace = fail_open.wrap("trace", current_trace_labels)
        self._gradient_norm = fail_open.wrap("gradient_norm", _gradient_norm)
        self._learning_rate = fail_open.wrap("learning_rate", _learning_rate)
        self._loss_scale = fail_open.wrap("loss_scale", _loss_scale)
        self._profile = None if profile is None else fail_open.wrap("profile", profile)
        self._scales_loss: bool = engine.fp16_enabled()

    def __call__(self, window: StepCounts) -> None:
        """Close the step whose window this is."""
        engine = self._engine()
        if engine is None:
            return
        closed = RawStep(
            step=engine.global_steps,
            ended_at=time.time(),
            phase_ns=self._clock.take(),
            intervals=self._clock.take_intervals(),
            window=window,
            coverage=self._take_coverage(),
            gradient_norm=self._gradient_norm(engine),
            learning_rate=self._learning_rate(engine),
            loss_scale=self._loss_scale(engine) if self._scales_loss else None,
            trace=self._trace(),
            memory=self._read_memory(),
            batch=self._calls.drain(),
        )
        self._give(closed)
        if self._profile is not None:
            self._profile(closed.step)

    def _take_coverage(self) -> float | None:
        now = time.monotonic()
        if now < self._coverage_due:
            return None
        self._coverage_due = now + COVERAGE_SECONDS
        return self._coverage()


def _gradient_norm(engine: Any) -> Number:
    return number(engine.get_global_grad_norm())


def _learning_rate(engine: Any) -> Number:
    return number(engine.optimizer.param_groups[0]["lr"])


def _loss_scale(engine: Any) -> Number:
    # Not engine.loss_scale(), which is the configured one: 0 where the scale is dynamic.
    return number(engine._get_optimizer_loss_scale())
