"""What the training thread notes of memory: the batches, peaks of steps, and now and then all.

A step in some seconds is looked at closely: memory is read wherever its phase changes, and the
engine's tensors are added up three times. On all others there is one reading at the end at most.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from ...metrics.catalog.labels import PHASES
from ..common.fail_open import FailOpen
from ..common.phase_timer import BACKWARD, CHECKPOINT, EVAL, FORWARD, OPTIMIZER, PhaseTimer
from ..devices.memory.free_heap import free_heap_bytes
from ..memory.categories import Held, larger_of
from ..memory.engine_memory import bytes_by_category
from ..memory.forecast.series import Shape
from ..memory.memory_reader import MemoryReader
from ..memory.step_sample import DetailedSample, StepMemorySample, largest_shapes
from .batch_shape import BatchShape

T = TypeVar("T")

# The kernel and the allocator keep peaks from one reading to the next, so that shorter steps lose
# none; a reading costs 0.1 ms where caches are cold.
READING_SECONDS = 0.25
_PASSES = (FORWARD, BACKWARD, OPTIMIZER)
# Of steps with many micro-batches only the first are looked at phase by phase, and the update.
READINGS_PER_LOOK, READINGS_OF_UPDATE = 40, 4
# Adding up the tensors of a model with many parameters may take this share of the time at most.
LOOK_SHARE = 1e-3
# Of more kinds of batches between two readings only those are kept that no other exceeds.
MOST_SHAPES = 64


class MemoryHooks:
    """Called by the engine's hooks, on the training thread; holds the engine weakly.

    Attributes:
        shape: The micro-batch under way, or the last one; None before the first.
        micro_batch: Its number within its step, from 1 on.
    """

    def __init__(
        self,
        engine: Any,
        meter: MemoryReader,
        clock: PhaseTimer,
        fail_open: FailOpen,
        *,
        judge: Callable[[Shape], object],
        raised: Callable[[BaseException], object],
        look_seconds: float | None,
    ) -> None:
        """Describe the hooks.

        Args:
            engine: A DeepSpeed engine.
            meter: Reads memory.
            clock: Tells when a phase ends.
            fail_open: Guards what runs in training.
            judge: Is told each micro-batch's shape before it runs.
            raised: Is told each error that passes through the engine.
            look_seconds: Seconds from one close look to the next; None for no looks.
        """
        self.shape: Shape | None = None
        self.micro_batch = 0
        self.raised = raised
        self._judge = judge
        self._engine = weakref.ref(engine)
        self._meter = meter
        self._clock = clock
        self._look_seconds = look_seconds
        self._shapes: dict[Shape, None] = {}
        self._reading_due = self._look_due = 0.0
        self._holdings = fail_open.wrap("memory categories", bytes_by_category)
        self._phase_ended = fail_open.wrap("memory phases", self._read_phase)
        self._readings_left = [0, 0]  # of all else, and of passes
        self._phase_peaks: dict[str, dict[str, float]] = {}
        self._held_in_backward: Held | None = None
        self._held_before: Held | None = None
        self._looks_cost = 0.0

    def rebind_engine(self, engine: Any) -> None:
        """Look at another engine from now on; what is under way of the old one is dropped."""
        self._engine = weakref.ref(engine)
        self._clock.on_change = None
        self._shapes = {}

    def batch_begins(self, shape: BatchShape, micro_batch: int) -> None:
        """Note a forward pass of the given micro-batch of its step, and let it be judged."""
        self.micro_batch = micro_batch
        if shape.samples is None:
            return
        length = shape.sequence_length or (shape.elements or 0) // (shape.samples or 1)
        batch = self.shape = Shape(shape.samples, length)
        if len(self._shapes) >= MOST_SHAPES:
            self._shapes = dict.fromkeys(largest_shapes(tuple(self._shapes)))
        self._shapes[batch] = None
        self._judge(batch)

    def backward_ends(self) -> None:
        """Add up what the engine holds while buckets are there, if this step is looked at."""
        engine = self._engine()
        if self._clock.on_change is None or engine is None or self._held_in_backward is not None:
            return
        self._held_in_backward = self._add_up(engine)

    def step_begins(self) -> None:
        """Add up what the engine holds while the gradients are there, if this step is looked at."""
        engine = self._engine()
        if self._clock.on_change is None or engine is None:
            return
        self._meter.sample_phase()  # what passed belongs to no phase that is read from here on
        self._readings_left[True] = max(self._readings_left[True], READINGS_OF_UPDATE)
        held = self._add_up(engine)
        if held is not None and self._held_in_backward is not None:
            held = larger_of(self._held_in_backward, held)
        self._held_before = held

    def step_ended(self) -> StepMemorySample | None:
        """Return this step's reading; None where the last one is too fresh."""
        now = time.monotonic()
        look = self._end_look()
        if look is None and now < self._reading_due:
            return None
        self._reading_due = now + READING_SECONDS
        shapes, self._shapes = tuple(self._shapes), {}
        reading = StepMemorySample(
            readings=self._meter.sample_step(),
            shapes=shapes,
            trained_only=not self._clock.strayed,
            detail=look,
        )
        self._clock.strayed = False
        if self._look_seconds is not None and now >= self._look_due:
            self._begin_look(now)
        return reading

    def close(self) -> None:
        """Stop looking. Safe to call twice."""
        self._clock.on_change = None

    def _begin_look(self, now: float) -> None:
        """Look at the step that begins now."""
        pause = max(self._look_seconds or 0.0, self._looks_cost / LOOK_SHARE)
        self._look_due = now + pause
        self._readings_left = [READINGS_PER_LOOK, READINGS_PER_LOOK]
        self._phase_peaks = {}
        self._held_in_backward = self._held_before = None
        self._looks_cost = 0.0
        self._clock.on_change = self._phase_ended

    def _end_look(self) -> DetailedSample | None:
        engine = self._engine()
        if self._clock.on_change is None or engine is None:
            return None
        self._clock.on_change = None
        before, after = self._held_before, self._add_up(engine)
        if before is None or after is None:
            return None
        return DetailedSample(
            phase_peaks=self._phase_peaks,
            held_before=before,
            held_after=after,
            heap_free_bytes=self._timed(free_heap_bytes),
        )

    def _add_up(self, engine: Any) -> Held | None:
        return self._timed(lambda: self._holdings(engine))

    def _timed(self, ask: Callable[[], T]) -> T:
        """Ask, and count what that takes as a cost of this look."""
        begin = time.perf_counter()
        answer = ask()
        self._looks_cost += time.perf_counter() - begin
        return answer

    def _read_phase(self, phase: int) -> None:
        # An evaluation is read always, or its peak would be that of the next pass.
        if phase not in (EVAL, CHECKPOINT):
            is_pass = phase in _PASSES
            if self._readings_left[is_pass] <= 0:
                return
            self._readings_left[is_pass] -= 1
        for device, states in self._meter.sample_phase().items():
            peak = states.get("peak_allocated", states.get("allocated", 0.0))
            peaks = self._phase_peaks.setdefault(device, {})
            name = PHASES[phase]
            peaks[name] = max(peaks.get(name, 0.0), peak)
