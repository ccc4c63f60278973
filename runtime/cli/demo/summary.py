"""Summarizes the records of several steps, and advises what to try next."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....metrics.catalog.labels import NON_TRAINING_PHASES
from ....metrics.step_record import CollectiveTotals, StepRecord
from ....metrics.thresholds import DATA_RATIO_HIGH, DEVICE_UTILIZATION_LOW, EXPOSED_COMM_RATIO_HIGH
from ...common.report_files import display_path

LAST_STEPS = 10  # the final loss is their mean, because batches differ; at most half the run


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Sums over steps of one rank; None where nothing was measured.

    Attributes:
        num_steps: Number of steps.
        training_seconds: Time of the steps, without evaluation and checkpoints.
        phase_seconds: Time of the steps by phase.
        comm_seconds: Time in which a collective was in progress.
        comm_seconds_is_upper_bound: Whether that time is only an upper bound, as on a GPU.
        exposed_seconds: Time in which training waited for communication.
        collectives: Totals by operation, most wire bytes first.
        samples_per_second: Throughput of all ranks.
        first_loss: Loss of the first step.
        last_loss: Mean loss of the last steps.
        device: The GPU, or "cpu".
        peak_bytes: Peak memory of that device.
        utilization_ratio: Fraction of the time in which the device was busy; for a CPU the use by
            all ranks.
    """

    num_steps: int
    training_seconds: float
    phase_seconds: Mapping[str, float]
    comm_seconds: float | None
    comm_seconds_is_upper_bound: bool
    exposed_seconds: float | None
    collectives: Mapping[str, CollectiveTotals]
    samples_per_second: float | None
    first_loss: float | None
    last_loss: float | None
    device: str | None
    peak_bytes: float | None
    utilization_ratio: float | None

    def ratio(self, seconds: float) -> float:
        """Return a duration as a fraction of the training time."""
        return seconds / self.training_seconds if self.training_seconds else 0.0

    @property
    def exposed_ratio(self) -> float | None:
        """Fraction of the training time in which training waited for communication."""
        return None if self.exposed_seconds is None else self.ratio(self.exposed_seconds)

    @property
    def comm_ratio(self) -> float | None:
        """Fraction of the training time in which a collective was in progress."""
        return None if self.comm_seconds is None else self.ratio(self.comm_seconds)


def summarize(records: Sequence[StepRecord], *, num_ranks: int) -> Summary:
    """Sum up the records of one rank, at least one.

    Args:
        records: Consecutive steps.
        num_ranks: Ranks of the job, all on this machine and equally loaded.
    """
    seconds = sum(record.training_seconds for record in records)
    device = _device(records)
    losses = [record.loss for record in records if record.loss is not None]
    return Summary(
        num_steps=len(records),
        training_seconds=seconds,
        phase_seconds=_phase_seconds(records),
        comm_seconds=_total([record.comm_seconds for record in records]),
        comm_seconds_is_upper_bound=any(record.comm_seconds_is_upper_bound for record in records),
        exposed_seconds=_total([record.training_exposed_seconds for record in records]),
        collectives=_collectives(records),
        samples_per_second=_samples_per_second(records, seconds, num_ranks),
        first_loss=losses[0] if losses else None,
        last_loss=_mean(losses[-min(LAST_STEPS, (len(losses) + 1) // 2) :]),
        device=device,
        peak_bytes=_peak_bytes(records, device),
        utilization_ratio=_utilization_ratio(records, device, num_ranks),
    )


def advise(summary: Summary, *, stage: int) -> list[str]:
    """Return two or three lines on what to try next, by the usual thresholds.

    Args:
        summary: Summary of a whole run.
        stage: ZeRO stage of the run.
    """
    findings = [
        line
        for line in (_on_communication(summary, stage), _on_device(summary))
        if line is not None
    ]
    other_stage = 2 if stage == 3 else 3
    within_limits = (
        "All figures are within usual limits. "
        f"Compare sharding: {_program()} demo --stage {other_stage}"
    )
    your_own = f"Monitor your own job: {_program()} run your_script.py"
    return [*(findings or [within_limits]), your_own]


def _on_communication(summary: Summary, stage: int) -> str | None:
    ratio = summary.exposed_ratio
    if ratio is None or ratio <= EXPOSED_COMM_RATIO_HIGH:
        return None
    limit = EXPOSED_COMM_RATIO_HIGH
    problem = f"Training waits for communication {ratio:.0%} of its time, over {limit:.0%}."
    if stage == 0:
        return f"{problem} Larger micro-batches do more work for the same bytes."
    less = 2 if stage == 3 else 0
    return f"{problem} Less sharding sends less, if memory allows: {_program()} demo --stage {less}"


def _on_device(summary: Summary) -> str | None:
    ratio = summary.utilization_ratio
    if ratio is None or ratio >= DEVICE_UTILIZATION_LOW:
        return None
    problem = f"{summary.device} is {ratio:.0%} busy, under {DEVICE_UTILIZATION_LOW:.0%}."
    if summary.ratio(summary.phase_seconds.get("data", 0.0)) > DATA_RATIO_HIGH:
        return f"{problem} It waits for data: give the DataLoader more workers."
    if summary.device == "cpu":
        return f"{problem} Other programs may be using it."
    return f"{problem} Larger micro-batches keep it busier."


def _phase_seconds(records: Sequence[StepRecord]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for record in records:
        total.update(record.phase_seconds)
    return {phase: seconds for phase, seconds in total.items() if phase not in NON_TRAINING_PHASES}


def _collectives(records: Sequence[StepRecord]) -> dict[str, CollectiveTotals]:
    """Return the totals by operation, most wire bytes first."""
    parts: dict[str, list[CollectiveTotals]] = {}
    for record in records:
        for op, totals in record.collectives.items():
            parts.setdefault(op, []).append(totals)
    sums = {
        op: CollectiveTotals(
            calls=sum(part.calls for part in steps),
            payload_bytes=sum(part.payload_bytes for part in steps),
            wire_bytes=sum(part.wire_bytes for part in steps),
            seconds=_total([part.seconds for part in steps]),
        )
        for op, steps in parts.items()
    }
    return dict(sorted(sums.items(), key=lambda item: -item[1].wire_bytes))


def _samples_per_second(
    records: Sequence[StepRecord], seconds: float, num_ranks: int
) -> float | None:
    samples = _total([record.samples for record in records])
    return samples * num_ranks / seconds if samples is not None and seconds else None


def _device(records: Sequence[StepRecord]) -> str | None:
    """Return the GPU if there is one; the host's memory is recorded too."""
    devices = {
        device for record in records for device in (*record.memory_bytes, *record.device_readings)
    }
    return max(devices, default=None)  # "cuda:0" sorts after "cpu"


def _peak_bytes(records: Sequence[StepRecord], device: str | None) -> float | None:
    readings = [record.memory_bytes.get(device or "", {}) for record in records]
    # Some kernels do not report the peak; memory at the end of each step is the next best figure.
    peaks = [memory.get("peak_allocated", memory.get("allocated")) for memory in readings]
    return max((peak for peak in peaks if peak is not None), default=None)


def _utilization_ratio(
    records: Sequence[StepRecord], device: str | None, num_ranks: int
) -> float | None:
    readings = [
        record.device_readings.get(device or "", {}).get("utilization_ratio") for record in records
    ]
    mean = _mean([reading for reading in readings if reading is not None])
    # On CPU a rank measures only its own use of the cores.
    return mean if mean is None or device != "cpu" else min(1.0, mean * num_ranks)


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _program() -> str:
    """Return the command of this program: its name if that is on PATH, or its path."""
    if shutil.which("zerowatch"):
        return "zerowatch"
    return display_path(Path(sys.executable).with_name("zerowatch"))
