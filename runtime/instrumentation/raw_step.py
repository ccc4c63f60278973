"""Creates a step's record from the measurements that the training thread enqueues."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...metrics.step_record import GenerationTotals, StepRecord, seconds_by_phase
from ..collectives.call_batch import CallBatch
from ..collectives.totals import StepCommTotals
from ..collectives.unseen_calls import UnseenCalls
from ..common.device_scalar import ScalarOrPending, arrived, lose, mean, read, total
from ..common.phase_timer import GENERATE, PhaseInterval
from ..memory.memory_reader import Readings
from ..memory.step_sample import StepMemorySample
from .batch_shape import BatchShape
from .device_phases import DevicePhaseTimes
from .generated_tokens import GenerationCounts


@dataclass(slots=True)
class StepCounts:
    """Counts over the micro-batches of one rank since the last step.

    Attributes:
        micro_batches: Number of micro-batches.
        samples: Number of samples. `samples`, `tokens` and `sequence_length` are None if they
            cannot be read from the batches.
        tokens: Number of tokens, padding included.
        sequence_length: Number of tokens per sample in the last micro-batch.
        losses: The loss of each micro-batch.
        losses_are_divided: Whether the losses were divided by the number of micro-batches before
            the backward pass, as Hugging Face's Trainer does.
        skipped: Whether the step did not update the weights.
        discarded_ns: Nanoseconds of forward and backward passes that were discarded.
        generation: The calls of `generate` since the last step. None if there were none.
    """

    micro_batches: int = 0
    samples: int | None = None
    tokens: int | None = None
    sequence_length: int | None = None
    losses: list[ScalarOrPending] = field(default_factory=list)
    losses_are_divided: bool = False
    skipped: bool = False
    discarded_ns: int = 0
    generation: GenerationCounts | None = None

    def add(self, shapes: list[BatchShape], loss: ScalarOrPending) -> None:
        """Count one micro-batch, which consists of one or more forward passes."""
        self.micro_batches += 1
        for shape in shapes:
            if shape.samples is not None:
                self.samples = (self.samples or 0) + shape.samples
            if shape.tokens is not None:
                self.tokens = (self.tokens or 0) + shape.tokens
                self.sequence_length = shape.sequence_length
        self.losses.append(loss)

    def loss(self) -> float | None:
        """Return the loss of the step by the micro-batches whose loss is known, if any is."""
        return total(self.losses) if self.losses_are_divided else mean(self.losses)


@dataclass(slots=True)
class RawStep:
    """The measurements of a step, taken when the step ends.

    Some measurements are complete only later: values on a device, such as the loss, and the ends of
    collectives.

    Attributes:
        step: Number of the step.
        ended_at: The time at which the step ended, in Unix seconds.
        phase_ns: Nanoseconds of each phase by the host, in the order of PHASES. `use_device_phases`
            replaces them and `intervals` by the times on the device.
        intervals: The start and end of each phase, by `time.perf_counter_ns`. Empty if no traces
            are made.
        counts: The micro-batches of the step.
        coverage: Ratio of recorded collectives to all collectives, 0 to 1. None if it was not read
            in this step.
        gradient_norm: The global gradient norm.
        learning_rate: The learning rate of the first parameter group.
        loss_scale: The loss scale. None without fp16.
        trace: Labels of the script's own span in which the step ended. None if there is no span.
        memory: The memory sample of the step. None if the last sample is recent.
        batch: The collectives since the last step.
        device_phases: The phases on the accelerator. None on CPU.
        unseen: The calls that process groups counted and no wrapper recorded, without a DeepSpeed
            engine. None if there are none.
    """

    step: int
    ended_at: float
    phase_ns: list[int]
    intervals: Iterable[PhaseInterval]
    counts: StepCounts
    coverage: float | None
    gradient_norm: ScalarOrPending
    learning_rate: ScalarOrPending
    loss_scale: ScalarOrPending
    trace: Mapping[str, str] | None
    memory: StepMemorySample | None
    batch: CallBatch
    device_phases: DevicePhaseTimes | None = None
    unseen: UnseenCalls | None = None

    @property
    def phases_show_work(self) -> bool:
        """Whether the phases are those of the device that computes, and not of a host that waits.

        False on an accelerator if the times on the device were lost.
        """
        return self.device_phases is None or self.device_phases.phase_ns is not None

    def settled(self) -> bool:
        """Return whether all measurements are complete. Never waits."""
        has_phases = self.device_phases is None or self.device_phases.is_read
        return has_phases and all(map(arrived, self._scalars())) and self.batch.settled()

    def use_device_phases(self) -> None:
        """Replace the host's times of the phases by those on the device, if they were read.

        The intervals are placed so that the step ends when it ended on the host. The device may
        reach that point later, at a time of the host's clock that is not known.
        """
        times = self.device_phases
        if times is None or times.phase_ns is None:
            return
        self.phase_ns, self.counts.discarded_ns = times.phase_ns, times.discarded_ns
        intervals = list(self.intervals)
        if intervals:
            end_ns = intervals[-1][2]
            self.intervals = [(phase, a + end_ns, b + end_ns) for phase, a, b in times.intervals]

    def lose(self) -> int:
        """Give up what is still on the device, whose driver raises errors.

        Returns:
            The number of calls whose times are lost.
        """
        self.lose_scalars()
        return self.batch.lose()

    def expire(self) -> int:
        """Give up what is not complete yet, and return the number of calls whose times are lost."""
        self.lose_scalars()
        return self.batch.expire()

    def lose_scalars(self) -> None:
        """Give up the values on the device that are not known to have arrived."""
        for one in self._scalars():
            lose(one)

    def _scalars(self) -> tuple[ScalarOrPending, ...]:
        generation = self.counts.generation
        tokens = () if generation is None else generation.tokens
        losses = self.counts.losses
        return (self.gradient_norm, self.learning_rate, self.loss_scale, *losses, *tokens)

    def record(
        self, comm: StepCommTotals, device_readings: Readings, oom_risk_ratio: Mapping[str, float]
    ) -> StepRecord:
        """Return the step's record. Call this after `lose`, or when `settled` returns True."""
        counts, phase_ns, memory = self.counts, self.phase_ns, self.memory
        loss = counts.loss()
        return StepRecord(
            step=self.step,
            ended_at_unix_seconds=self.ended_at,
            seconds=sum(phase_ns) / 1e9,
            phase_seconds=seconds_by_phase(phase_ns),
            micro_batches=counts.micro_batches,
            samples=counts.samples,
            tokens=counts.tokens,
            loss=loss,
            nonfinite_loss=loss is not None and not math.isfinite(loss),
            gradient_norm=read(self.gradient_norm),
            learning_rate=read(self.learning_rate),
            loss_scale=read(self.loss_scale),
            skipped=counts.skipped,
            collectives=comm.totals(),
            comm_seconds=comm.comm_seconds,
            comm_seconds_is_upper_bound=comm.is_upper_bound,
            comm_exposed_seconds=comm.exposed_seconds if comm.is_exposed_known else None,
            memory_bytes=memory.readings_with_earlier_peaks() if memory else {},
            micro_batch_shapes=[(s.samples, s.length) for s in memory.shapes] if memory else (),
            peak_bytes_since_change=memory.peak_bytes_since_change() if memory else {},
            oom_risk_ratio=oom_risk_ratio,
            device_readings=device_readings,
            comm_exposed_phase_seconds=(
                seconds_by_phase(comm.blocked_ns) if comm.is_exposed_known else {}
            ),
            generation=self._generation(comm),
            phases_are_host_times=not self.phases_show_work,
        )

    def _generation(self, comm: StepCommTotals) -> GenerationTotals | None:
        counts = self.counts.generation
        if counts is None:
            return None
        peaks = {} if self.memory is None else self.memory.generation_peaks
        return GenerationTotals(
            calls=counts.calls,
            sequences=counts.sequences,
            tokens=counts.total_tokens(),
            seconds=self.phase_ns[GENERATE] / 1e9,
            collectives=comm.generation_calls,
            gathers=comm.generation_gathers,
            gathered_bytes=comm.generation_gathered_bytes,
            peak_bytes={
                device: states["peak_allocated"]
                for device, states in peaks.items()
                if "peak_allocated" in states
            },
        )
