"""Turns settled steps and their collectives into records, metrics, traces and listener calls."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Protocol

from ...metrics.step_record import StepRecord
from ...metrics.thresholds import OOM_RISK_HIGH
from ..collectives.call_batch import CallBatch
from ..collectives.comm_time import CommTimeCounter
from ..collectives.groups import CollectiveCall
from ..collectives.totals import PeriodTotals, StepCommTotals
from ..common.fail_open import FailOpen
from ..common.gil_pauses import let_training_run
from ..instrumentation.raw_step import RawStep
from .device_sampler import DeviceSampler
from .memory_analysis import MemoryAnalysis
from .otel_exporter import OtelExporter
from .run_folder import RunFolder
from .step_metrics import FinishedStep, StepMetrics

Listener = Callable[[Sequence[StepRecord]], object]

# Maximum number of a step's calls that are kept for its trace. If a step has more calls, the
# LONGEST_CALLS longest ones are kept.
MAX_KEPT_CALLS = 16384
LONGEST_CALLS = 512


class StepTimesReceiver(Protocol):
    """Receives the time of each step by phase, to compare it with that of other ranks."""

    def add_step_times(self, phase_ns: Sequence[int], blocked_ns: Sequence[int]) -> None:
        """Add the nanoseconds of a step in each of PHASES, and the blocked part of each."""


class StepAnalysis:
    """Analyses the settled steps of one watch. Only the watch thread uses it.

    Args:
        step_metrics: Turns steps into metrics.
        sampler: Has the last readings of the devices.
        memory: Receives the memory sample of each step, and returns the risk by device.
        comparison: Receives the time of each step by phase.
        folder: Writes the records of complete steps, all at once.
        otel: Receives the steps of each second with their calls, if it makes traces.
        fail_open: Wraps all calls to the parts.
        listeners: Functions that receive the records of the steps of each second. They must not
            block. The list may grow.
        on_device: Whether training runs on an accelerator.

    Attributes:
        is_risky: Whether memory may soon run out, by the last forecast.
        has_unwritten: Whether records could not be written to the run log.
        publishes_log: Whether `publish` does what `write_log` does.
    """

    publishes_log = False

    def __init__(
        self,
        *,
        step_metrics: StepMetrics,
        sampler: DeviceSampler,
        memory: MemoryAnalysis,
        comparison: StepTimesReceiver,
        folder: RunFolder,
        otel: OtelExporter,
        fail_open: FailOpen,
        listeners: Sequence[Listener],
        on_device: bool,
    ) -> None:
        self.is_risky = self.has_unwritten = False
        self._sampler = sampler
        self._add_memory_sample = fail_open.wrap("memory", memory.add_step)
        self._folder = folder
        self._append = fail_open.wrap("run log", self._append_records)
        self._add_step_times = fail_open.wrap("step times", comparison.add_step_times)
        self._listeners = listeners
        self._trace = fail_open.wrap("traces", otel.trace) if otel.makes_traces else None
        self._on_device = on_device
        self._publish = fail_open.wrap("publish", step_metrics.publish)
        self._comm_time, self._comm = CommTimeCounter(), StepCommTotals()
        self._totals = PeriodTotals()
        self._steps: list[FinishedStep] = []
        self._calls: list[CollectiveCall] = []
        self._unlogged: list[StepRecord] = []

    @property
    def num_unlogged(self) -> int:
        """Number of steps whose records were not passed to the run log yet."""
        return len(self._unlogged)

    def add_calls(self, batch: CallBatch) -> None:
        """Add settled calls, which belong to the next step that is added."""
        time_taken = self._comm_time.measure(batch)
        self._comm.add(batch.calls, time_taken, self._totals)
        if self._trace is not None:
            self._calls.extend(batch.calls)
            if len(self._calls) > MAX_KEPT_CALLS:
                self._calls = heapq.nlargest(LONGEST_CALLS, self._calls, _duration)

    def add_step(self, raw: RawStep) -> None:
        """Add a settled step. Its calls were added before."""
        comm, self._comm = self._comm, StepCommTotals()
        calls, self._calls = self._calls, []
        if raw.unseen is not None:
            comm.is_exposed_known = False  # the ends of these calls are not known
        risks = self._add_memory_sample(raw) or {}
        self.is_risky = max(risks.values(), default=0.0) >= OOM_RISK_HIGH
        record = raw.record(comm, self._sampler.device_readings, risks)
        if raw.phases_show_work and comm.is_exposed_known:
            blocked_ns = comm.device_blocked_ns() if self._on_device else comm.blocked_ns
            self._add_step_times(raw.phase_ns, blocked_ns)
        self._unlogged.append(record)
        self._steps.append(FinishedStep(record, raw, calls))

    def write_log(self) -> None:
        """Write the records of the steps since the last call to the run log."""
        if self._unlogged:
            if self._append(self._unlogged) is None:
                self.has_unwritten = True
            self._unlogged = []  # not before: a disk that does not respond must not hide them

    def publish(self) -> None:
        """Publish the steps and calls since the last call, and call the listeners."""
        steps, self._steps = self._steps, []
        totals, self._totals = self._totals, PeriodTotals()
        self._publish(steps, totals)
        let_training_run()
        if self._trace is not None:
            self._trace(steps)
        records = [step.record for step in steps]
        for listener in self._listeners if records else ():
            let_training_run()
            listener(records)

    def _append_records(self, records: Sequence[StepRecord]) -> bool:
        """Append records to the run log; return True, because None means that this has failed."""
        self._folder.append(records)
        return True


def _duration(call: CollectiveCall) -> int:
    return call.duration_ns
