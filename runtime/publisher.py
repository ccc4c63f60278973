"""From a closed step to values, a record and a line: the watch thread's work for each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..metrics.catalog import communication, memory, training
from ..metrics.catalog.labels import PHASES
from ..metrics.recorder import Recorder
from ..metrics.step_record import StepRecord
from .collectives.batch import Batch
from .collectives.tally import StepComm, Tally, union_seconds
from .deferred import Deferred, mean
from .engine_hooks import Window
from .flops_counter import FlopsOf


@dataclass(slots=True, kw_only=True)
class ClosedStep:
    """What the training thread knows when a step has ended."""

    step: int
    ended_at: float
    phase_ns: list[int]
    window: Window
    coverage: float | None
    gradient_norm: Deferred
    learning_rate: Deferred
    loss_scale: Deferred
    skipped: bool
    trace: Mapping[str, str] | None
    batch: Batch

    def settled(self) -> bool:
        """Whether what was under way when the step ended has arrived."""
        numbers = (self.gradient_norm, self.learning_rate, self.loss_scale, *self.window.losses)
        return all(number.ready for number in numbers) and self.batch.settled()


class Publisher:
    """Writes steps to the recorder. Its sums live there; it keeps none of its own."""

    def __init__(self, recorder: Recorder, flops_of: FlopsOf, peak_flops: float | None) -> None:
        self._recorder = recorder
        self._flops_of = flops_of
        self._peak_flops = peak_flops

    def publish(
        self,
        closed: ClosedStep,
        comm: StepComm,
        memory_bytes: Mapping[str, Mapping[str, float]],
        device_readings: Mapping[str, Mapping[str, float]],
    ) -> StepRecord:
        """Make the step's record and let every value of it become visible at once."""
        record = _record(closed, comm, memory_bytes, device_readings)
        with self._recorder.commit():
            self._publish_step(record, closed)
            self._publish_flops(record, closed.window)
            if closed.coverage is not None:
                self._recorder.set(communication.COMM_COVERAGE_RATIO, closed.coverage)
            self._publish_memory(memory_bytes)
        return record

    def _publish_step(self, record: StepRecord, closed: ClosedStep) -> None:
        put = self._recorder
        put.add(training.STEPS, 1)
        put.add(training.SKIPPED_STEPS, record.skipped)
        put.observe(training.STEP_SECONDS, record.training_seconds, exemplar=closed.trace)
        put.set(training.LAST_STEP_TIMESTAMP, record.ended_at_unix_seconds)
        for phase, seconds in record.phase_seconds.items():
            put.add(training.PHASE_SECONDS, seconds, phase)
        for spec, amount in (
            (training.SAMPLES, record.samples),
            (training.TOKENS, record.tokens),
        ):
            if amount is not None:
                put.add(spec, amount)
        for spec, value in (
            (training.LOSS, record.loss),
            (training.GRADIENT_NORM, record.gradient_norm),
            (training.LEARNING_RATE, record.learning_rate),
            (training.LOSS_SCALE, record.loss_scale),
        ):
            if value is not None:
                put.set(spec, value)
        nonfinite = record.loss is not None and not math.isfinite(record.loss)
        put.add(training.NONFINITE_LOSSES, nonfinite)

    def _publish_flops(self, record: StepRecord, window: Window) -> None:
        flops = self._flops_of(window)
        if flops is None:
            return
        self._recorder.add(training.FLOPS, flops)
        if self._peak_flops and record.training_seconds > 0:
            rate = flops / record.training_seconds
            self._recorder.set(training.MFU, rate / self._peak_flops)

    def publish_communication(self, tally: Tally) -> None:
        """Count a batch of calls, which may come long before their step ends."""
        with self._recorder.commit():
            self._count_calls(tally)

    def _count_calls(self, tally: Tally) -> None:
        put = self._recorder
        for sums in tally.sums:
            key = (sums.op, sums.group)
            put.add(communication.COLLECTIVE_CALLS, sums.calls, *key, sums.phase)
            put.add(communication.COLLECTIVE_BYTES, sums.payload_bytes, *key)
            put.add(communication.COLLECTIVE_WIRE_BYTES, sums.wire_bytes, *key)
            for seconds in sums.seconds:
                put.observe(communication.COLLECTIVE_SECONDS, seconds, sums.op)
        for group, intervals in tally.intervals.items():
            put.add(communication.COMM_SECONDS, union_seconds(intervals), group)

    def _publish_memory(self, readings: Mapping[str, Mapping[str, float]]) -> None:
        for device, states in readings.items():
            for state, value in states.items():
                if state == "alloc_retries":
                    self._recorder.set(memory.ALLOC_RETRIES, value, device)
                else:
                    self._recorder.set(memory.MEMORY_BYTES, value, device, state)


def _record(
    closed: ClosedStep,
    comm: StepComm,
    memory_bytes: Mapping[str, Mapping[str, float]],
    device_readings: Mapping[str, Mapping[str, float]],
) -> StepRecord:
    window = closed.window
    phase_seconds = {
        phase: ns / 1e9 for phase, ns in zip(PHASES, closed.phase_ns, strict=True) if ns
    }
    return StepRecord(
        step=closed.step,
        ended_at_unix_seconds=closed.ended_at,
        seconds=sum(closed.phase_ns) / 1e9,
        phase_seconds=phase_seconds,
        micro_batches=window.micro_batches,
        samples=window.samples,
        tokens=window.tokens,
        loss=mean(window.losses),
        gradient_norm=closed.gradient_norm.value,
        learning_rate=closed.learning_rate.value,
        loss_scale=closed.loss_scale.value,
        skipped=closed.skipped,
        collectives=comm.by_op,
        comm_seconds=comm.seconds,
        memory_bytes=memory_bytes,
        device_readings=device_readings,
    )
