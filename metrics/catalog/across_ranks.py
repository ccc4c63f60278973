"""Metrics across ranks: minimum, median and maximum over all ranks of a run, on rank 0 only.

Their number does not depend on the number of ranks. They are absent if ranks are not compared
(`cross_rank.enabled`), or if no rank has the figure.
"""

from __future__ import annotations

from ..thresholds import DATA_RATIO_HIGH, EXPOSED_COMM_RATIO_HIGH, OOM_RISK_HIGH
from .spec import EVERY_SERIES, Label, gauge

STATS = ("min", "median", "max")
_STAT = Label(name="stat", values=STATS)

RANKS_STEP_DURATION = gauge(
    "ranks_step_duration_seconds",
    "Median step duration of each rank, over all ranks.",
    _STAT,
    lean=EVERY_SERIES,
    usual="`min`, `median` and `max` within 5 %: ranks wait for each other in each step.",
)
RANKS_EXPOSED_COMM_RATIO = gauge(
    "ranks_exposed_comm_ratio",
    "Share of training time that is exposed communication, over all ranks.",
    _STAT,
    lean=EVERY_SERIES,
    usual=f"`median` below {EXPOSED_COMM_RATIO_HIGH:g}. One rank with far less than the others"
    " is the one that they wait for.",
)
RANKS_COMM_WAIT_RATIO = gauge(
    "ranks_comm_wait_ratio",
    "Seconds that collectives wait for a later rank, over training time, over all ranks. The rank "
    "with the minimum is the one that the others wait for.",
    _STAT,
    lean=EVERY_SERIES,
    usual="Below 0.05. A `min` far below the median points at one slow rank.",
)
RANKS_DATA_RATIO = gauge(
    "ranks_data_ratio",
    "Share of training time spent loading data, over all ranks.",
    _STAT,
    lean=EVERY_SERIES,
    usual=f"`max` below {DATA_RATIO_HIGH:g}.",
)
RANKS_MEMORY_PEAK_RATIO = gauge(
    "ranks_memory_peak_ratio",
    "Allocated memory at the peak of the last minute, over the limit of the training device, over "
    "all ranks.",
    _STAT,
    lean=EVERY_SERIES,
    usual="`max` below 0.9. A `max` far above the median: uneven batches or pipeline stages.",
)
RANKS_OOM_RISK = gauge(
    "ranks_oom_risk_ratio",
    "Highest out-of-memory risk of each rank's devices, over all ranks.",
    _STAT,
    lean=EVERY_SERIES,
    usual=f"`max` below {OOM_RISK_HIGH:g}.",
)
RANKS_DEVICE_UTILIZATION = gauge(
    "ranks_device_utilization_ratio",
    "Mean utilization of the training device in the last minute, over all ranks.",
    _STAT,
    lean=EVERY_SERIES,
    usual="`min` above 0.9 on GPUs.",
)
RANKS_DEVICE_TEMPERATURE = gauge(
    "ranks_device_temperature_celsius",
    "Core temperature of the training device, over all ranks.",
    _STAT,
    lean=EVERY_SERIES,
    usual="`max` within 15 degrees of the median. More: cooling of one node.",
)
RANKS_MFU = gauge(
    "ranks_mfu_ratio",
    "Model FLOPs utilization in the last minute of training, over all ranks.",
    _STAT,
    lean=EVERY_SERIES,
    usual="`min` and `max` within a few percent of the median.",
)
RANKS_SAMPLES_PER_SECOND = gauge(
    "ranks_samples_per_second",
    "Samples per second of each rank in the last minute, over all ranks.",
    _STAT,
    lean=EVERY_SERIES,
    usual="All equal, unless the batch is divided unevenly.",
)

# The figures of which rank 0 publishes statistics, in the order in which ranks report them.
STATISTICS = {
    "step_duration": RANKS_STEP_DURATION,
    "exposed_comm": RANKS_EXPOSED_COMM_RATIO,
    "comm_wait": RANKS_COMM_WAIT_RATIO,
    "data": RANKS_DATA_RATIO,
    "memory_peak": RANKS_MEMORY_PEAK_RATIO,
    "oom_risk": RANKS_OOM_RISK,
    "device_utilization": RANKS_DEVICE_UTILIZATION,
    "device_temperature": RANKS_DEVICE_TEMPERATURE,
    "mfu": RANKS_MFU,
    "samples_per_second": RANKS_SAMPLES_PER_SECOND,
}
_FIGURE = Label(name="figure", values=tuple(STATISTICS))
RANKS_REPORTING = gauge(
    "ranks_reporting",
    "Number of ranks of which rank 0 knows a figure; the others are left out of its statistics.",
    _FIGURE,
    lean=EVERY_SERIES,
    usual="All ranks: world_size. Fewer: some ranks send no reports.",
)
RANKS_EXTREME = gauge(
    "ranks_extreme",
    "The rank that has the minimum or the maximum of a figure; the lowest of several.",
    _FIGURE,
    Label(name="stat", values=("min", "max")),
    lean=EVERY_SERIES,
    usual="Changes from minute to minute. The same rank for half an hour deserves a look at "
    "its host.",
)
RANKS_SAME_LOSS = gauge(
    "ranks_same_loss",
    "1 if the losses of all ranks were equal to the last digit in the last window of 32 steps, "
    "else 0. Only with data parallelism alone.",
    lean=EVERY_SERIES,
    usual="0. 1: all ranks are probably fed the same samples, so all but one of them are wasted.",
)

METRICS = (*STATISTICS.values(), RANKS_REPORTING, RANKS_EXTREME, RANKS_SAME_LOSS)
