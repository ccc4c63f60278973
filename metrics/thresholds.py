"""Defines the values from which a measurement counts as a problem.

Alerts, dashboards and advice use these values. The values are rules of thumb of this project, and
show where to start looking. They have no published source.

`THRESHOLDS` lists the thresholds of alerts. They can be changed for all runs
(`zerowatch dashboards build --set`) and for one run (the setting `alerts.thresholds`). The numbers
at the end of the file belong to advice and the tuner, and are fixed.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Literal, get_args

from ..errors import cut, shortened

# What a value counts: a ratio is 0 to 1, a factor is a multiple of something usual.
Unit = Literal["ratio", "factor", "count", "seconds", "bytes", "celsius"]
# How bad a problem is, the worst first.
Severity = Literal["critical", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


class Threshold(float):
    """A value beyond which an alert fires. As a number it is the default.

    Args:
        name: The name in settings, in rules and in the exported metric.
        default: The value of a run that sets no other.
        unit: What the value counts.
        meaning: What is compared with the value.
    """

    name: str
    unit: Unit
    meaning: str

    def __new__(cls, name: str, default: float, unit: Unit, meaning: str) -> Threshold:
        """Make the number and attach its description."""
        threshold = super().__new__(cls, default)
        threshold.name, threshold.unit, threshold.meaning = name, unit, meaning
        return threshold

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """Copy and pickle as the number."""
        return float, (float(self),)


EXPOSED_COMM_RATIO_HIGH = Threshold(
    "exposed_comm_ratio_high",
    0.20,
    "ratio",
    "Share of training time that is exposed communication. Above it, tune communication first. "
    "Also the default of tuner.max_exposed_comm_ratio.",
)
LINK_BANDWIDTH_LOW = Threshold(
    "link_bandwidth_low",
    0.50,
    "ratio",
    "Bandwidth of a link, divided by the usual one of the last six hours. Estimates vary by 10 to "
    "20 %.",
)
COMM_COVERAGE_LOW = Threshold(
    "comm_coverage_low",
    0.99,
    "ratio",
    "Recorded collectives divided by all. Below it, communication times are incomplete.",
)
STRAGGLER_SCORE_HIGH = Threshold(
    "straggler_score_high",
    0.05,
    "ratio",
    "Time by which a rank is slower than the median rank, as a share of a step.",
)
DATA_RATIO_HIGH = Threshold(
    "data_ratio_high",
    0.10,
    "ratio",
    "Share of a step spent loading data. A loader that prefetches takes almost no time.",
)
DEVICE_UTILIZATION_LOW = Threshold(
    "device_utilization_low",
    0.70,
    "ratio",
    "Share of time in which a GPU is busy. Below it, the GPU waits for something else.",
)
OOM_RISK_HIGH = Threshold(
    "oom_risk_high",
    0.50,
    "ratio",
    "Probability of an out-of-memory error within 50 steps: more likely than not.",
)
OOM_RISK_CRITICAL = Threshold(
    "oom_risk_critical",
    0.80,
    "ratio",
    "The same, for the critical alert. The forecast alone is at most 0.87.",
)
REPLAY_RATIO_HIGH = Threshold(
    "replay_ratio_high", 0.05, "ratio", "Share of training time lost to replayed windows."
)
RESTARTS_HIGH = Threshold("restarts_high", 3, "count", "Restarts within half an hour.")
# The loss scale has collapsed if it is below both limits. At 1/16 of the highest scale, the scale
# was halved four times.
LOSS_SCALE_LOW = Threshold(
    "loss_scale_low",
    16,
    "factor",
    "Loss scale. Below it, fp16 gradients of the usual sizes underflow.",
)
LOSS_SCALE_FALL = Threshold(
    "loss_scale_fall", 1 / 16, "ratio", "Loss scale, divided by the highest of the last hour."
)
THROTTLED_RATIO_HIGH = Threshold(
    "throttled_ratio_high",
    0.10,
    "ratio",
    "Share of time in which heat, the power brake or the hardware lowers the clock of a GPU.",
)
TEMPERATURE_MARGIN_LOW = Threshold(
    "temperature_margin_low",
    5,
    "celsius",
    "Degrees that a GPU may get hotter before it lowers its clock.",
)
NVLINK_CRC_ERRORS_HIGH = Threshold(
    "nvlink_crc_errors_high",
    100,
    "count",
    "CRC errors per second on the NVLinks of a GPU. The value is that of DCGM's health check.",
)
PCIE_REPLAYS_HIGH = Threshold(
    "pcie_replays_high",
    8,
    "count",
    "Replays per minute on the PCIe link of a GPU. The value is that of DCGM's health check.",
)
COMM_RISE_HIGH = Threshold(
    "comm_rise_high",
    1.5,
    "factor",
    "Share of training time that is exposed communication, divided by the median of the run's own "
    "last six hours.",
)
MFU_DROP_LOW = Threshold(
    "mfu_drop_low", 0.7, "ratio", "MFU, divided by the median of the run's own last six hours."
)
LOSS_SPIKE_HIGH = Threshold(
    "loss_spike_high",
    0.5,
    "factor",
    "By how much the loss is above the median of its last hour, divided by the median, or by ten "
    "median deviations if those are larger.",
)
GRADIENT_NORM_HIGH = Threshold(
    "gradient_norm_high", 10, "factor", "Gradient norm, divided by the median of its last hour."
)
SKIPPED_RATIO_HIGH = Threshold(
    "skipped_ratio_high", 0.5, "ratio", "Share of steps whose update was skipped."
)
HOST_MEMORY_NODE_HIGH = Threshold(
    "host_memory_node_high",
    0.9,
    "ratio",
    "Host memory of all ranks of a run on one node together, divided by the limit.",
)
CHECKPOINT_DELAY_HIGH = Threshold(
    "checkpoint_delay_high",
    3,
    "factor",
    "Age of the last checkpoint, divided by the run's usual interval between checkpoints.",
)
CHECKPOINT_AGE_HIGH = Threshold(
    "checkpoint_age_high",
    86_400,
    "seconds",
    "Age of the last checkpoint of a run whose usual interval is not known.",
)
WATCH_RATIO_HIGH = Threshold(
    "watch_ratio_high",
    0.02,
    "ratio",
    "Share of a run's time that monitoring takes. The goal is 0.004. A run of tiny steps on CPU "
    "reaches 0.015.",
)
MONITORING_FAILURES_HIGH = Threshold(
    "monitoring_failures_high",
    10,
    "count",
    "Failed exports, or failed exchanges between ranks, of a rank within half an hour. A single "
    "failed hook is always reported.",
)
RECORDS_LOST_HIGH = Threshold(
    "records_lost_high",
    100,
    "count",
    "Records that a part of a rank's monitoring lost within half an hour.",
)

THRESHOLDS = {
    threshold.name: threshold
    for threshold in (
        EXPOSED_COMM_RATIO_HIGH,
        LINK_BANDWIDTH_LOW,
        COMM_COVERAGE_LOW,
        STRAGGLER_SCORE_HIGH,
        DATA_RATIO_HIGH,
        DEVICE_UTILIZATION_LOW,
        OOM_RISK_HIGH,
        OOM_RISK_CRITICAL,
        REPLAY_RATIO_HIGH,
        RESTARTS_HIGH,
        LOSS_SCALE_LOW,
        LOSS_SCALE_FALL,
        THROTTLED_RATIO_HIGH,
        TEMPERATURE_MARGIN_LOW,
        NVLINK_CRC_ERRORS_HIGH,
        PCIE_REPLAYS_HIGH,
        COMM_RISE_HIGH,
        MFU_DROP_LOW,
        LOSS_SPIKE_HIGH,
        GRADIENT_NORM_HIGH,
        SKIPPED_RATIO_HIGH,
        HOST_MEMORY_NODE_HIGH,
        CHECKPOINT_DELAY_HIGH,
        CHECKPOINT_AGE_HIGH,
        WATCH_RATIO_HIGH,
        MONITORING_FAILURES_HIGH,
        RECORDS_LOST_HIGH,
    )
}


def parsed_thresholds(assignments: Iterable[str]) -> dict[str, float]:
    """Return the values of texts such as "exposed_comm_ratio_high=0.35", by name.

    Upper and lower case are the same in a name.

    Raises:
        ValueError: A text has no "=", its name is no threshold, or its value is not allowed.
    """
    values: dict[str, float] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(
                f"{shortened(text)} is no NAME=VALUE, such as {EXPOSED_COMM_RATIO_HIGH.name}=0.35"
            )
        values |= checked_thresholds({name.strip(): value.strip()})
    return values


def checked_thresholds(given: object) -> dict[str, float]:
    """Return thresholds by their names in lower case, with numbers as values.

    Raises:
        ValueError: It is no table, a name is no threshold, or a value is not allowed.
    """
    if not isinstance(given, dict):
        raise ValueError(
            f"must be a table of names and numbers, such as {{{EXPOSED_COMM_RATIO_HIGH.name} = "
            "0.35}"
        )
    return dict(_checked(str(name), value) for name, value in given.items())


def _checked(given_name: str, given_value: object) -> tuple[str, float]:
    name = given_name.lower()
    threshold = THRESHOLDS.get(name)
    if threshold is None:
        close = difflib.get_close_matches(name, THRESHOLDS, n=1)
        cased = str.upper if given_name.isupper() else str
        named = ", ".join(map(cased, close or THRESHOLDS))
        advice = f"did you mean {named}?" if close else f"there are {named}"
        raise ValueError(f"{cut(repr(given_name))} is no threshold of an alert; {advice}")
    try:
        if isinstance(given_value, bool):
            raise ValueError
        value = float(given_value)  # type: ignore[arg-type]  # TypeError is caught
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{given_name} must be a number, got {shortened(given_value)}") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{given_name} must be a finite number from 0 on, got {value:g}")
    if threshold.unit == "ratio" and value > 1:
        raise ValueError(f"{given_name} is a ratio from 0 to 1, got {value:g}; for 35 % write 0.35")
    return name, value


# Limits of advice and the tuner, which no alert uses.

# Share of a step spent waiting for later ranks. Random variation alone causes some waiting.
IMBALANCE_RATIO_HIGH = 0.10
# Share of a step that is not device, communication or data time.
HOST_RATIO_HIGH = 0.10
# Share of the memory limit that remains free at the next peak.
MEMORY_HEADROOM_LOW = 0.08
MEMORY_HEADROOM_IDLE = 0.50  # above this value, the job could use more memory to run faster

STEPS_TO_JUDGE = 10  # in half an hour; a run with fewer steps is warming up
