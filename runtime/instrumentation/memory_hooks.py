"""Chooses the moments of a step at which the training thread reads the memory in use.

Every few seconds, one step is sampled in detail. The hooks then read memory at each change of phase
and sum the engine's tensors three times. In other steps, the hooks read memory at most once, at the
end of the step. In addition, they read it at the start and at the end of each measured call of
`generate`, so that its peak is not counted for training.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ...metrics.catalog.labels import PHASES
from ..common.fail_open import FailOpen
from ..common.hot_path import MemoryHookFields
from ..common.phase_timer import CHECKPOINT, EVAL, GENERATE, PASSES, PhaseTimer
from ..devices.libc_memory import free_heap_bytes
from ..memory.categories import EngineBytes, elementwise_max
from ..memory.engine_memory import bytes_by_category
from ..memory.forecast.forecast_service import MemoryForecasts
from ..memory.forecast.peak_readings import Shape
from ..memory.memory_reader import MemoryReader
from ..memory.step_sample import DetailedSample, StepMemorySample, largest_shapes
from .batch_shape import BatchShape

T = TypeVar("T")

# Minimum time between two readings; the second one while memory is very far from all limits. The
# kernel and the allocator keep the peak since the last reading, so no peak is lost if steps are
# shorter. A reading costs 0.1 ms with cold caches.
READING_SECONDS = 0.25
FAR_READING_SECONDS = 1.0
# Limits the readings of a detailed sample. In a step with many micro-batches, only the first
# micro-batches and the update are read phase by phase.
READINGS_PER_DETAIL = 40
READINGS_OF_UPDATE = 4
# Share of training time that detailed samples may take. The limit matters for models with many
# parameters.
DETAIL_TIME_RATIO = 1e-3
# If there are more shapes between two readings, only shapes that no other shape exceeds are kept.
MAX_SHAPES = 64


class MemoryHooks(MemoryHookFields):
    """Samples memory when the engine's hooks call it, on the training thread.

    It keeps only a weak reference to the engine.

    Attributes:
        shape: The shape of the current or last micro-batch. None before the first micro-batch.
        micro_batch: The number of this micro-batch within its step, starting at 1.
        on_exception: Called with each error that passes through the engine.
        reading_due: When the next reading is due, by the monotonic clock. Before this time, and
            outside of a detailed sample, `on_step_end` returns None.
    """

    def __init__(
        self,
        engine: Any,
        reader: MemoryReader,
        phase_timer: PhaseTimer,
        fail_open: FailOpen,
        *,
        forecasts: MemoryForecasts,
        on_exception: Callable[[BaseException], object],
        detail_seconds: float | None,
    ) -> None:
        """Create the hooks.

        Args:
            engine: A DeepSpeed engine.
            reader: Reads memory.
            phase_timer: The phases of training.
            fail_open: Guards the functions that run inside training.
            forecasts: Assesses each micro-batch before it runs.
            on_exception: Called with each error that passes through the engine.
            detail_seconds: Seconds between two detailed samples. None if no step is sampled in
                detail.
        """
        self.shape: Shape | None = None
        self.micro_batch = 0
        self.on_exception = on_exception
        self._forecasts = forecasts
        self._engine = weakref.ref(engine)
        self._reader = reader
        self._phase_timer = phase_timer
        self._detail_seconds = detail_seconds
        self._shapes: dict[Shape, None] = {}
        self._known_shape: BatchShape | None = None
        self._known_risks: Mapping[Shape, object] = {}
        self.reading_due = self._detail_due = 0.0
        self._bytes_by_category = fail_open.wrap("memory categories", bytes_by_category)
        self._on_phase_end = fail_open.wrap("memory phases", self._read_phase)
        self._pass_readings_left = self._other_readings_left = 0
        self._phase_peaks: dict[str, dict[str, float]] = {}
        self._held_in_backward: EngineBytes | None = None
        self._held_before: EngineBytes | None = None
        self._detail_cost_seconds = 0.0

    def rebind_engine(self, engine: Any) -> None:
        """Sample another engine from now on, and discard an unfinished detailed sample."""
        self._engine = weakref.ref(engine)
        self._phase_timer.on_change = None
        self._shapes, self._known_shape = {}, None

    def on_batch_start(self, shape: BatchShape, micro_batch: int) -> None:
        """Record the shape of a forward pass, and assess the risk that it runs out of memory.

        Args:
            shape: The micro-batch.
            micro_batch: The number of the micro-batch within its step, starting at 1.
        """
        self.micro_batch = micro_batch
        known_risks = self._forecasts.known_risks
        if shape is self._known_shape and known_risks is self._known_risks:
            return  # it was recorded since the last reading, and assessed by these forecasts
        if shape.samples is None:
            return
        length = shape.sequence_length or (shape.elements or 0) // (shape.samples or 1)
        self.shape = batch = Shape(shape.samples, length)
        if len(self._shapes) >= MAX_SHAPES:
            self._shapes = dict.fromkeys(largest_shapes(tuple(self._shapes)))
        self._shapes[batch] = None
        self._forecasts.assess_batch(batch)
        # The next shape is often the same object.
        self._known_shape = shape if batch in known_risks else None
        self._known_risks = known_risks

    def on_backward_end(self) -> None:
        """In a detailed sample, sum the engine's tensors while the buckets exist."""
        engine = self._engine()
        if self._phase_timer.on_change is None or engine is None:
            return
        if self._held_in_backward is not None:
            return
        self._held_in_backward = self._sum_tensors(engine)

    def on_update_start(self) -> None:
        """In a detailed sample, sum the engine's tensors while the gradients exist."""
        engine = self._engine()
        if self._phase_timer.on_change is None or engine is None:
            return
        self._reader.sample_phase()  # the peak so far belongs to none of the following phases
        self._pass_readings_left = max(self._pass_readings_left, READINGS_OF_UPDATE)
        held = self._sum_tensors(engine)
        if held is not None and self._held_in_backward is not None:
            held = elementwise_max(self._held_in_backward, held)
        self._held_before = held

    def on_generation_start(self) -> None:
        """Keep the peaks from now on apart from those of the step's training."""
        self._reader.begin_generation()

    def on_generation_end(self) -> None:
        """End the peaks of a generation."""
        self._reader.end_generation()

    def on_use_changed(self) -> None:
        """Let the next sample cover only steps from now on, which use memory differently.

        A sample that covers steps of both uses would be counted for the use of its last step.
        """
        self._reader.end_step_peaks()
        self._shapes, self._known_shape = {}, None
        self._phase_timer.left_training = False

    def on_step_end(self) -> StepMemorySample | None:
        """Return the memory sample of this step, or None if the last sample is recent."""
        now = time.monotonic()
        detail = None if self._phase_timer.on_change is None else self._end_detail()
        if detail is None and now < self.reading_due:
            return None
        is_far = self._forecasts.are_very_far
        self.reading_due = now + (FAR_READING_SECONDS if is_far else READING_SECONDS)
        shapes, self._shapes, self._known_shape = tuple(self._shapes), {}, None
        sample = StepMemorySample(
            readings=self._reader.sample_step(),
            generation_peaks=self._reader.take_generation_peaks(),
            shapes=shapes,
            earlier_peaks=self._reader.take_earlier_peaks(),
            trained_only=not self._phase_timer.left_training,
            detail=detail,
        )
        self._phase_timer.left_training = False
        if self._detail_seconds is not None and now >= self._detail_due:
            self._begin_detail(now)
        return sample

    def close(self) -> None:
        """Discard an unfinished detailed sample. Safe to call twice."""
        self._phase_timer.on_change = None

    def _begin_detail(self, now: float) -> None:
        """Start a detailed sample of the step that begins now."""
        pause = max(self._detail_seconds or 0.0, self._detail_cost_seconds / DETAIL_TIME_RATIO)
        self._detail_due = now + pause
        self._pass_readings_left = self._other_readings_left = READINGS_PER_DETAIL
        self._phase_peaks = {}
        self._held_in_backward = self._held_before = None
        self._detail_cost_seconds = 0.0
        self._phase_timer.on_change = self._on_phase_end

    def _end_detail(self) -> DetailedSample | None:
        engine = self._engine()
        if engine is None:
            return None
        self._phase_timer.on_change = None
        before, after = self._held_before, self._sum_tensors(engine)
        if before is None or after is None:
            return None
        return DetailedSample(
            phase_peaks=self._phase_peaks,
            held_before=before,
            held_after=after,
            heap_free_bytes=self._timed(free_heap_bytes),
        )

    def _sum_tensors(self, engine: Any) -> EngineBytes | None:
        return self._timed(lambda: self._bytes_by_category(engine))

    def _timed(self, read: Callable[[], T]) -> T:
        """Call `read`, and count its time as a cost of this detailed sample."""
        begin = time.perf_counter()
        result = read()
        self._detail_cost_seconds += time.perf_counter() - begin
        return result

    def _read_phase(self, phase: int) -> None:
        # Always read these phases. Otherwise their peak would be attributed to the next pass.
        if phase not in (EVAL, GENERATE, CHECKPOINT):
            if phase in PASSES:
                if self._pass_readings_left <= 0:
                    return
                self._pass_readings_left -= 1
            else:
                if self._other_readings_left <= 0:
                    return
                self._other_readings_left -= 1
        for device, states in self._reader.sample_phase().items():
            if phase == GENERATE and "peak_allocated" not in states:
                continue  # what the call has used is free by now
            peak = states.get("peak_allocated", states.get("allocated", 0.0))
            peaks = self._phase_peaks.setdefault(device, {})
            name = PHASES[phase]
            peaks[name] = max(peaks.get(name, 0.0), peak)
