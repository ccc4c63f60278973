"""Memory: in use, at its peak, by category, and the risk of running out."""

from __future__ import annotations

from .labels import DEVICE, PHASE
from .spec import Label, counter, gauge

MEMORY_STATES = (
    "allocated",
    "reserved",
    "peak_allocated",
    "peak_reserved",
    "inactive_split",
    "limit",
)
MEMORY_CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "comm_buffers",
    "other",
)

MEMORY_BYTES = gauge(
    "memory_bytes",
    "Memory of a device, peaks those of the last minute; on cpu allocated is RSS and reserved the "
    "virtual size.",
    DEVICE,
    Label(name="state", values=MEMORY_STATES),
)
_CATEGORY = Label(name="category", values=MEMORY_CATEGORIES)
MEMORY_CATEGORY_BYTES = gauge(
    "memory_category_bytes",
    "Memory of a device at a step's peak by what it holds; without the baseline on cpu.",
    DEVICE,
    _CATEGORY,
)
MEMORY_BASELINE = gauge(
    "memory_baseline_bytes",
    "Memory in use beside the engine as watching began; with the categories it is a step's peak.",
    DEVICE,
)
MEMORY_PHASE_PEAK = gauge(
    "memory_phase_peak_bytes",
    "Most memory in use in a phase of the step last looked at.",
    DEVICE,
    PHASE,
)
MEMORY_FRAGMENTATION = gauge(
    "memory_fragmentation_bytes", "Memory reserved in pieces too small to be of use.", DEVICE
)
MEMORY_PREDICTED_PEAK = gauge(
    "memory_predicted_peak_bytes", "Median of the next step's peak as predicted.", DEVICE
)
MEMORY_PREDICTION_ERROR = gauge(
    "memory_prediction_error_ratio",
    "Median of the last errors of prediction, each relative to the peak that came.",
    DEVICE,
)
MEMORY_LEAK = gauge(
    "memory_leak_bytes_per_step",
    "Growth that no batch explains, by what grows; absent while nothing leaks.",
    DEVICE,
    _CATEGORY,
)
MEMORY_HEADROOM = gauge(
    "memory_headroom_bytes", "Limit of a device minus the next peak that is predicted.", DEVICE
)
OOM_RISK = gauge(
    "oom_risk_ratio", "Probability that a peak within the next 50 steps passes the limit.", DEVICE
)
OOM_NEXT_BATCH_RISK = gauge(
    "oom_next_batch_risk_ratio",
    "Probability that a micro-batch passed the limit, judged as it began; highest since last told.",
    DEVICE,
)
OOM_ETA_STEPS = gauge(
    "oom_eta_steps",
    "Steps until the predicted peak passes the limit; +Inf if it never does.",
    DEVICE,
)
ALLOC_RETRIES = counter(
    "alloc_retries_total", "Times the allocator had to free its cache and try again.", DEVICE
)
OOMS = counter(
    "ooms_total",
    "Out-of-memory errors: raised as they pass, fatal where they also end the run, replayed, or "
    "killed by the kernel and found at the next start.",
    DEVICE,
    Label(name="outcome", values=("replayed", "fatal", "killed", "raised")),
)
_DIRECTION = Label(name="direction", values=("to_host", "to_device", "to_nvme", "from_nvme"))
OFFLOAD_BYTES = counter(
    "offload_bytes_total",
    "Bytes moved by ZeRO's offloading; on cpu what would move between host and device.",
    _DIRECTION,
)
OFFLOAD_SECONDS = counter(
    "offload_seconds_total",
    "Seconds in code that offloads, casts and norms included; of NVMe only what blocked the host.",
    _DIRECTION,
)

METRICS = (
    MEMORY_BYTES,
    MEMORY_CATEGORY_BYTES,
    MEMORY_BASELINE,
    MEMORY_PHASE_PEAK,
    MEMORY_FRAGMENTATION,
    MEMORY_PREDICTED_PEAK,
    MEMORY_PREDICTION_ERROR,
    MEMORY_LEAK,
    MEMORY_HEADROOM,
    OOM_RISK,
    OOM_NEXT_BATCH_RISK,
    OOM_ETA_STEPS,
    ALLOC_RETRIES,
    OOMS,
    OFFLOAD_BYTES,
    OFFLOAD_SECONDS,
)
