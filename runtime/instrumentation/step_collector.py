"""Reads the engine at the end of a step on the training thread, and enqueues the raw step."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from ...metrics.exporters.trace_context import OPENTELEMETRY, current_trace_labels
from ..collectives.unseen_calls import UnseenCalls
from ..common import accelerator
from ..common.device_scalar import ScalarOrPending, host_value, scalar
from ..common.hot_path import StepCollectorFields, constructor
from .memory_hooks import MemoryHooks
from .profiled_steps import ProfiledSteps
from .raw_step import RawStep, StepCounts
from .watch_context import WatchContext

logger = logging.getLogger(__name__)

# Interval between two readings of the coverage of collectives. The reading costs more than the rest
# of the work at the end of a step, because it reads the sequence numbers of all groups.
COVERAGE_SECONDS = 1.0
_new_step = constructor(RawStep)


class StepCollector(StepCollectorFields):
    """Creates the raw steps of one engine. Keeps no reference to the engine.

    Each reading of the engine fails open separately. If a reading fails, its value is None.
    """

    def __init__(
        self,
        context: WatchContext,
        engine: Any,
        memory: MemoryHooks,
        enqueue: Callable[[RawStep], None],
        profiler: ProfiledSteps | None,
        take_unseen: Callable[[], tuple[UnseenCalls | None, float | None]] | None = None,
    ) -> None:
        """Create a collector.

        Args:
            context: The watch.
            engine: A DeepSpeed engine.
            memory: Reads memory at the end of a step.
            enqueue: Called with each step.
            profiler: Profiles some steps. None if profiling is off.
            take_unseen: Returns the calls of a step that no wrapper has seen, and the coverage
                without them. By default the coverage is read once a second.
        """
        wrap = context.fail_open.wrap
        self._new_step, self._read_value, self._modules = _new_step, host_value, sys.modules
        self._phase_timer = context.phase_timer
        self._device_phases = context.device_phases
        self._calls = context.call_recorder
        interval = context.settings.sampling.exact_collectives_steps
        self._calls.sample_interval = 0 if _waits_would_block_compute() else interval
        self._calls.is_sampled = self._calls.sample_interval > 0  # a short run has exact times too
        self._training_thread = self._phase_timer.training_thread
        self._enqueue = enqueue
        self._memory = memory
        self._read_memory = wrap("memory", memory.on_step_end)
        self._coverage_due = 0.0
        self._coverage = wrap("coverage", self._calls.groups.drain_coverage)
        self._issues_unseen_collectives = wrap("coverage", _is_deepcompile_active)
        self._is_unseen_logged = False
        self._take_unseen = None if take_unseen is None else wrap("coverage", take_unseen)
        self._trace = wrap("trace", current_trace_labels)
        self._gradient_norm = wrap("gradient_norm", _gradient_norm)
        self._learning_rate = wrap("learning_rate", _learning_rate)
        self._loss_scale = wrap("loss_scale", _loss_scale)
        self._profile = None if profiler is None else wrap("profile", profiler.on_step_end)
        self._scales_loss = bool(engine.fp16_enabled())

    def _collect(self, engine: Any, counts: StepCounts) -> None:
        device_phases, timer, now = self._device_phases, self._phase_timer, time.monotonic()
        unseen, coverage = None, None
        if self._take_unseen is not None:
            unseen, coverage = self._take_unseen() or (None, None)
        elif now >= self._coverage_due:
            coverage = self._read_coverage(engine)
        if self._training_thread != timer.training_thread:
            self._training_thread = timer.training_thread
            self._calls.follow_thread()
        is_memory_due = now >= self._memory.reading_due or timer.on_change is not None
        step = _new_step(
            step=engine.global_steps,
            ended_at=time.time(),
            phase_ns=timer.drain(),
            intervals=timer.drain_intervals() if timer.records_intervals else (),
            counts=counts,
            coverage=coverage,
            unseen=unseen,
            gradient_norm=self._gradient_norm(engine),
            learning_rate=self._learning_rate(engine),
            loss_scale=self._loss_scale(engine) if self._scales_loss else None,
            trace=self._trace() if OPENTELEMETRY in self._modules else None,
            memory=self._read_memory() if is_memory_due else None,
            batch=self._calls.drain(),
            device_phases=None if device_phases is None else device_phases.end_step(),
        )
        if device_phases is not None:  # only the ends of calls on a device are sampled
            self._calls.begin_step(step.step + 1)
        self._enqueue(step)
        if self._profile is not None:
            self._profile(step.step)

    def _read_coverage(self, engine: Any) -> float | None:
        self._coverage_due = time.monotonic() + COVERAGE_SECONDS
        coverage = self._coverage()
        if not self._issues_unseen_collectives(engine):
            return coverage
        if not self._is_unseen_logged:
            self._is_unseen_logged = True
            logger.warning(
                "DeepCompile issues the collectives of this engine in compiled code, where "
                "zerowatch does not see them: comm_coverage_ratio is 0, and the metrics of "
                "communication cover only the other collectives."
            )
        return 0.0


@cache
def _waits_would_block_compute() -> bool:
    """Return whether the wait of a private stream would hold kernels behind it; log it once."""
    has_one_queue = accelerator.current.has_one_queue()
    if has_one_queue:
        logger.info(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1, so no step has exact ends of asynchronous "
            "collectives: a stream that waits for them would hold the kernels of training. Their "
            "waits and bandwidths are unknown."
        )
    return has_one_queue


def _is_deepcompile_active(engine: Any) -> bool:
    """Return whether DeepCompile issues collectives: in C++, on communicators of its own."""
    is_active = getattr(engine, "is_deepcompile_active", None)  # DeepSpeed 0.17 lacks it
    return is_active is not None and bool(is_active())


def _gradient_norm(engine: Any) -> ScalarOrPending:
    return scalar(engine.get_global_grad_norm())


def _learning_rate(engine: Any) -> ScalarOrPending:
    rate = engine.optimizer.param_groups[0]["lr"]
    return rate if type(rate) is float else scalar(rate)


def _loss_scale(engine: Any) -> ScalarOrPending:
    # engine.loss_scale() would return the configured scale, which is 0 if the scale is dynamic.
    return scalar(engine._get_optimizer_loss_scale())
