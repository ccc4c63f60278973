"""A step as the training thread hands it over, and the record it becomes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...metrics.catalog.labels import PHASES
from ...metrics.step_record import StepRecord
from ..collectives.batch import Batch
from ..collectives.totals import StepCommTotals
from ..common.device_scalar import Number, arrived, mean, read, total
from ..common.phase_timer import PhaseInterval
from ..memory.memory_reader import Readings
from ..memory.step_sample import StepMemorySample
from .step_counts import StepCounts


@dataclass(slots=True)
class RawStep:
    """What the training thread knows when a step has ended.

    `trace` names the span of the script's own that it ended in; `intervals` when each phase had the
    time, by `time.perf_counter_ns`, where traces are made.
    """

    step: int
    ended_at: float
    phase_ns: list[int]
    intervals: Iterable[PhaseInterval]
    window: StepCounts
    coverage: float | None
    gradient_norm: Number
    learning_rate: Number
    loss_scale: Number
    trace: Mapping[str, str] | None
    memory: StepMemorySample | None
    batch: Batch

    def settled(self) -> bool:
        """Whether what was under way when the step ended has arrived. Never waits."""
        numbers = (self.gradient_norm, self.learning_rate, self.loss_scale, *self.window.losses)
        return all(map(arrived, numbers)) and self.batch.settled()

    def record(
        self, comm: StepCommTotals, device_readings: Readings, oom_risk_ratio: Mapping[str, float]
    ) -> StepRecord:
        """Make the step's record, once `settled`."""
        window, phase_ns, memory = self.window, self.phase_ns, self.memory
        loss = total(window.losses) if window.losses_are_shares else mean(window.losses)
        return StepRecord(
            step=self.step,
            ended_at_unix_seconds=self.ended_at,
            seconds=sum(phase_ns) / 1e9,
            phase_seconds=_by_phase(phase_ns),
            micro_batches=window.micro_batches,
            samples=window.samples,
            tokens=window.tokens,
            loss=loss,
            nonfinite_loss=loss is not None and not math.isfinite(loss),
            gradient_norm=read(self.gradient_norm),
            learning_rate=read(self.learning_rate),
            loss_scale=read(self.loss_scale),
            skipped=window.skipped,
            collectives=comm.totals(),
            comm_seconds=comm.seconds,
            comm_exposed_seconds=comm.exposed_seconds,
            memory_bytes=memory.readings if memory else {},
            micro_batch_shapes=[(s.samples, s.length) for s in memory.shapes] if memory else (),
            oom_risk_ratio=oom_risk_ratio,
            device_readings=device_readings,
            comm_exposed_phase_seconds=_by_phase(comm.blocked_ns),
        )


def _by_phase(nanoseconds: Sequence[int]) -> dict[str, float]:
    return {PHASES[place]: ns / 1e9 for place, ns in enumerate(nanoseconds) if ns}
