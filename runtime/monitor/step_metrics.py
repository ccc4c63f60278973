"""From steps and calls to metric values. Takes a stretch of steps at once, which costs less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...metrics.catalog import communication, training
from ...metrics.catalog.spec import MetricSpec
from ...metrics.recorder import Recorder
from ...metrics.step_record import StepRecord
from ..collectives.batch import Batch
from ..collectives.call import CollectiveCall
from ..collectives.comm_time import CommTime
from ..collectives.totals import PeriodTotals
from ..instrumentation.raw_step import RawStep, StepCounts


@dataclass(frozen=True, slots=True)
class Step:
    """A step and what is known of it beside its record.

    `calls` are its collectives, where traces are made: all of them, or of very many the longest.
    """

    record: StepRecord
    closed: RawStep
    calls: Sequence[CollectiveCall] = ()


class StepMetrics:
    """Writes steps to the recorder. The sums live there."""

    def __init__(
        self,
        recorder: Recorder,
        flops_of: Callable[[StepCounts], float | None],
        peak_flops: float | None,
    ) -> None:
        self._recorder = recorder
        self._flops_of = flops_of
        self._peak_flops = peak_flops

    def publish(self, steps: Sequence[Step], tally: PeriodTotals) -> None:
        """Let a stretch of steps, and the calls that came meanwhile, become visible at once."""
        with self._recorder.commit():
            self._count_calls(tally)
            if steps:
                records = [step.record for step in steps]
                self._count_steps(steps)
                self._set_latest(records)
                self._count_arithmetic(steps, sum(record.training_seconds for record in records))

    def publish_earlier(self, batch: Batch) -> None:
        """Count what was issued before the watch began, such as the broadcast of the weights.

        These calls are in the counters and in no step. They are not timed: some may be under way,
        or wait for events that nobody has read.
        """
        batch.discard()
        tally = PeriodTotals()
        tally.add(batch.calls, CommTime(0.0, {}))
        self.publish([], tally)

    def _count_steps(self, steps: Sequence[Step]) -> None:
        put, records = self._recorder, [step.record for step in steps]
        put.add(training.STEPS, len(records))
        put.add(training.SKIPPED_STEPS, sum(record.skipped for record in records))
        put.add(training.NONFINITE_LOSSES, sum(record.nonfinite_loss for record in records))
        for step in steps:
            seconds = step.record.training_seconds
            put.observe(training.STEP_SECONDS, seconds, exemplar=step.closed.trace)
            for phase, spent in step.record.phase_seconds.items():
                put.add(training.PHASE_SECONDS, spent, phase)
        self._add_known(training.SAMPLES, [record.samples for record in records])
        self._add_known(training.TOKENS, [record.tokens for record in records])
        shares = [step.closed.coverage for step in steps if step.closed.coverage is not None]
        if shares:  # the worst, so that a lapse between two scrapes shows
            put.set(communication.COMM_COVERAGE_RATIO, min(shares))

    def _add_known(self, spec: MetricSpec, amounts: Sequence[int | None]) -> None:
        known = [amount for amount in amounts if amount is not None]
        if known:
            self._recorder.add(spec, sum(known))

    def _set_latest(self, records: Sequence[StepRecord]) -> None:
        latest = records[-1]
        self._recorder.set(training.LAST_STEP_TIMESTAMP, latest.ended_at_unix_seconds)
        for spec, value in (
            (training.LOSS, latest.loss),
            (training.GRADIENT_NORM, latest.gradient_norm),
            (training.LEARNING_RATE, latest.learning_rate),
            (training.LOSS_SCALE, latest.loss_scale),
        ):
            if value is not None:
                self._recorder.set(spec, value)

    def _count_arithmetic(self, steps: Sequence[Step], seconds: float) -> None:
        counted = [self._flops_of(step.closed.counts) for step in steps]
        flops = sum(one for one in counted if one is not None)
        if flops:
            self._recorder.add(training.FLOPS, flops)
            if self._peak_flops and seconds > 0:
                self._recorder.set(training.MFU, flops / seconds / self._peak_flops)

    def _count_calls(self, tally: PeriodTotals) -> None:
        put = self._recorder
        for sums in tally.sums:
            key = (sums.op, sums.group)
            put.add(communication.COLLECTIVE_CALLS, sums.calls, *key, sums.phase)
            put.add(communication.COLLECTIVE_BYTES, sums.payload_bytes, *key)
            put.add(communication.COLLECTIVE_WIRE_BYTES, sums.wire_bytes, *key)
            for seconds in sums.seconds:
                put.observe(communication.COLLECTIVE_SECONDS, seconds, sums.op)
        for group, seconds in tally.comm_seconds.items():
            put.add(communication.COMM_SECONDS, seconds, group)
