"""Publishes the metrics of steps and collectives, for several steps at once to save CPU time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...metrics.catalog import communication, generation, training
from ...metrics.catalog.labels import WORK_SHARED_BY
from ...metrics.catalog.spec import MetricSpec
from ...metrics.recorder import Recorder
from ...metrics.step_record import StepRecord
from ..collectives.call_batch import CallBatch
from ..collectives.comm_time import CommTime
from ..collectives.groups import CollectiveCall
from ..collectives.totals import PeriodTotals
from ..common.phase_timer import GENERATE_PHASE
from ..instrumentation.raw_step import RawStep, StepCounts
from .step_quantiles import StepQuantiles

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 600.0  # on losses that are not finite again and again


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step with complete measurements.

    Attributes:
        record: The record of the step.
        raw: The measurements of the hooks.
        calls: The collectives of the step, if traces are made. Only the longest collectives if the
            step has very many.
    """

    record: StepRecord
    raw: RawStep
    calls: Sequence[CollectiveCall] = ()


class StepMetrics:
    """Writes the values of each step to the recorder, which adds them up.

    Args:
        recorder: Receives the values.
        flops_of: Returns the FLOPs of a step; None if unknown.
        peak_flops: Peak FLOP/s of the device; None if unknown.
        logs_loss: Whether to log that the loss has become NaN or infinite. One rank is enough: the
            loss of all ranks does within a step.
    """

    def __init__(
        self,
        recorder: Recorder,
        flops_of: Callable[[StepCounts], float | None],
        peak_flops: float | None,
        *,
        logs_loss: bool = False,
    ) -> None:
        self._recorder = recorder
        self._flops_of = flops_of
        self._peak_flops = peak_flops
        self._logs_loss, self._logged_at = logs_loss, -math.inf
        self._quantiles = StepQuantiles()

    def publish(self, steps: Sequence[FinishedStep], totals: PeriodTotals) -> None:
        """Publish steps, and the calls that ended since the last call, in one commit.

        The watch thread calls this method each second, even if no step has ended.
        """
        with self._recorder.commit():
            self._count_calls(totals)
            if steps:
                records = [step.record for step in steps]
                self._count_steps(steps)
                self._set_latest(records)
                self._count_generation(records)
                self._count_flops(steps, sum(map(_pass_seconds, records)))
                self._quantiles.add([record.training_seconds for record in records])
            for label, seconds in self._quantiles.current().items():
                self._recorder.set(training.STEP_DURATION_QUANTILE, seconds, label)
        if self._logs_loss:
            self._log_loss(steps)

    def publish_calls_before_start(self, batch: CallBatch) -> None:
        """Count calls issued before the watch began, such as the broadcast of the weights.

        These calls are part of the counters, but not of any step. They have no duration, because
        some calls may still run, or wait for events that were never read.
        """
        batch.discard()
        totals = PeriodTotals()
        totals.add(batch.calls, CommTime(0.0, {}))
        self.publish([], totals)

    def _count_steps(self, steps: Sequence[FinishedStep]) -> None:
        recorder, records = self._recorder, [step.record for step in steps]
        recorder.add(training.STEPS, len(records))
        recorder.add(training.SKIPPED_STEPS, sum(record.skipped for record in records))
        recorder.add(training.NONFINITE_LOSSES, sum(record.nonfinite_loss for record in records))
        productive: list[float] = []
        by_phase: dict[str, list[float]] = {}
        for step in steps:
            seconds = step.record.training_seconds
            recorder.observe(training.STEP_DURATION, seconds, exemplar=step.raw.trace)
            if not step.record.skipped:
                discarded_seconds = step.raw.counts.discarded_ns / 1e9
                productive.append(max(0.0, seconds - discarded_seconds))
            for phase, spent in step.record.phase_seconds.items():
                by_phase.setdefault(phase, []).append(spent)
        if productive:
            recorder.add_all(training.PRODUCTIVE_SECONDS, productive)
        for phase, amounts in by_phase.items():
            recorder.add_all(training.PHASE_SECONDS, amounts, phase)
        self._add_known(training.SAMPLES, [record.samples for record in records])
        self._add_known(training.TOKENS, [record.tokens for record in records])
        ratios = [step.raw.coverage for step in steps if step.raw.coverage is not None]
        if ratios:  # the minimum, so a scrape sees a low value of any step
            recorder.set(communication.COMM_COVERAGE_RATIO, min(ratios))

    def _add_known(self, spec: MetricSpec, amounts: Sequence[int | None]) -> None:
        known = [amount for amount in amounts if amount is not None]
        if known:
            self._recorder.add(spec, sum(known))

    def _count_generation(self, records: Sequence[StepRecord]) -> None:
        generated = [each.generation for each in records if each.generation is not None]
        if not generated:
            return
        self._recorder.add(generation.GENERATE_CALLS, sum(each.calls for each in generated))
        self._add_known(generation.GENERATED_SEQUENCES, [each.sequences for each in generated])
        self._add_known(generation.GENERATED_TOKENS, [each.tokens for each in generated])
        waited = sum(each.comm_exposed_phase_seconds.get(GENERATE_PHASE, 0.0) for each in records)
        self._recorder.add(generation.GENERATE_COMM_EXPOSED_SECONDS, waited)

    def _set_latest(self, records: Sequence[StepRecord]) -> None:
        latest = records[-1]
        self._recorder.set(training.LAST_STEP_TIMESTAMP, latest.ended_at_unix_seconds)
        self._recorder.set(training.LAST_STEP, latest.step)
        for spec, value in (
            (training.LOSS, latest.loss),
            (training.GRADIENT_NORM, latest.gradient_norm),
            (training.LEARNING_RATE, latest.learning_rate),
            (training.LOSS_SCALE, latest.loss_scale),
        ):
            if value is not None:
                self._recorder.set(spec, value)

    def _log_loss(self, steps: Sequence[FinishedStep]) -> None:
        first = next((step.record for step in steps if step.record.nonfinite_loss), None)
        if first is None or self._logged_at + SECONDS_BETWEEN_LINES > first.ended_at_unix_seconds:
            return
        self._logged_at = first.ended_at_unix_seconds
        logger.warning(
            "step %d: the loss is not a finite number; `zerowatch report` shows on which rank and "
            "in which step this began",
            first.step,
        )

    def _count_flops(self, steps: Sequence[FinishedStep], seconds: float) -> None:
        counted = [self._flops_of(step.raw.counts) for step in steps]
        flops = sum(one for one in counted if one is not None)
        if flops:
            self._recorder.add(training.FLOPS, flops)
            if self._peak_flops and seconds > 0:
                self._recorder.set(training.MFU, flops / seconds / self._peak_flops)

    def _count_calls(self, totals: PeriodTotals) -> None:
        recorder = self._recorder
        for sums in totals.sums:
            key = (sums.op, sums.group)
            recorder.add(communication.COLLECTIVE_CALLS, sums.calls, *key, sums.phase)
            recorder.add(communication.COLLECTIVE_BYTES, sums.payload_bytes, *key)
            recorder.add(communication.COLLECTIVE_WIRE_BYTES, sums.wire_bytes, *key)
            if sums.seconds:
                recorder.observe_all(communication.COLLECTIVE_DURATION, sums.seconds, sums.op)
        for group, seconds in totals.comm_seconds.items():
            recorder.add(communication.COMM_SECONDS, seconds, group)
            for work in WORK_SHARED_BY.get(group, ()):
                recorder.set(training.SHARED_WORK, 1.0, work)
        if totals.comm_seconds:
            recorder.add(communication.COMM_UNION_SECONDS, totals.seconds)


def _pass_seconds(record: StepRecord) -> float:
    """Return the time in which the counted FLOPs were made, which is without generation."""
    return record.training_seconds - record.phase_seconds.get(GENERATE_PHASE, 0.0)
