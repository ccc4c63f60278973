"""Metrics of memory: use, peaks, categories, out-of-memory risk and errors, offloading."""

from __future__ import annotations

from ..thresholds import OOM_RISK_CRITICAL, OOM_RISK_HIGH
from .labels import DEVICE, PHASE
from .spec import EVERY_SERIES, Label, Lean, counter, gauge

MEMORY_STATES = ("allocated", "reserved", "inactive_split")
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
    "Memory in use on a device; on cpu allocated is RSS without mapped files and reserved is the "
    "virtual size.",
    DEVICE,
    Label(name="state", values=MEMORY_STATES),
    lean=Lean(only={"state": ("allocated",)}),
    usual="Up to 0.9 of memory_limit_bytes. `reserved` far above `allocated` is fragmentation"
    " or a cache that was once needed.",
)
MEMORY_PEAK = gauge(
    "memory_peak_bytes",
    "Highest memory use of the last minute.",
    DEVICE,
    Label(name="state", values=("allocated", "reserved")),
    lean=Lean(only={"state": ("allocated",)}),
    usual="Up to 0.9 of memory_limit_bytes. Judge by oom_risk_ratio, not by this value.",
)
MEMORY_LIMIT = gauge(
    "memory_limit_bytes",
    "Memory of a device that this process can use at most.",
    DEVICE,
    lean=EVERY_SERIES,
    usual="Constant, unless other processes use the device.",
)
_CATEGORY = Label(name="category", values=MEMORY_CATEGORIES)
MEMORY_CATEGORY_BYTES = gauge(
    "memory_category_bytes",
    "Memory of a device at a step's peak by category; without the baseline on cpu.",
    DEVICE,
    _CATEGORY,
    usual="Constant apart from activations, which follow the batch. `other` below a tenth.",
)
MEMORY_BASELINE = gauge(
    "memory_baseline_bytes",
    "Memory in use beside the engine when monitoring started; with the categories it adds up to a "
    "step's peak.",
    DEVICE,
    usual="Constant. Some hundred MB per process for CUDA's context and kernels.",
)
MEMORY_PHASE_PEAK = gauge(
    "memory_phase_peak_bytes",
    "Highest memory use in a phase of the last step that was sampled in detail; in generate of the "
    "last step with a reading.",
    DEVICE,
    PHASE,
    usual="Highest in backward, or in optimizer at the first step. In generate it grows with the "
    "number of prompts and their length, by the key-value cache.",
)
MEMORY_FRAGMENTATION = gauge(
    "memory_fragmentation_bytes",
    "Memory reserved in blocks too small to be usable at a step's peak, or free in the pools of "
    "captured graphs.",
    DEVICE,
    usual="Below a tenth of memory_limit_bytes, unless graphs are captured. Above it, set "
    "`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.",
)
MEMORY_PREDICTED_PEAK = gauge(
    "memory_predicted_peak_bytes",
    "Predicted median of the next step's peak.",
    DEVICE,
    usual="Within a few percent of the next peaks.",
)
MEMORY_PREDICTION_ERROR = gauge(
    "memory_prediction_error_ratio",
    "Median of recent prediction errors, each relative to the measured peak.",
    DEVICE,
    usual="0.0001 to 0.03 (docs/trust.md). Above 0.1, the risk is unreliable.",
)
MEMORY_LEAK = gauge(
    "memory_leak_bytes_per_step",
    "Growth that batch shapes do not explain, by category; absent while nothing leaks.",
    DEVICE,
    _CATEGORY,
    lean=EVERY_SERIES,
    usual="Absent. Any value that stays for minutes is a leak.",
)
MEMORY_HEADROOM = gauge(
    "memory_headroom_bytes",
    "Limit of a device minus the predicted next peak.",
    DEVICE,
    usual="Above 0.08 of memory_limit_bytes. Below 0, the next batch of that size does not fit.",
)
OOM_RISK = gauge(
    "oom_risk_ratio",
    "Probability that a peak of the next 50 steps exceeds the limit.",
    DEVICE,
    lean=EVERY_SERIES,
    usual=f"0 to 0.01. Warning from {OOM_RISK_HIGH:g}, critical from {OOM_RISK_CRITICAL:g}.",
)
OOM_NEXT_BATCH_RISK = gauge(
    "oom_next_batch_risk_ratio",
    "Probability that a micro-batch exceeds the limit, computed as its forward starts; maximum "
    "since the last update.",
    DEVICE,
    usual="0 to 0.01. Near 1, this micro-batch probably runs out of memory.",
)
OOM_ETA_STEPS = gauge(
    "oom_eta_steps",
    "Steps until the predicted peak exceeds the limit; +Inf if it never does.",
    DEVICE,
    usual="+Inf. A number means growth: save a checkpoint before that step.",
)
ALLOC_RETRIES = counter(
    "alloc_retries_total",
    "Times that the allocator freed its cache and tried again.",
    DEVICE,
    usual="0. Each one costs milliseconds to seconds, and is often the last sign before an "
    "out-of-memory error.",
)
OOMS = counter(
    "ooms_total",
    "Out-of-memory errors: raised; fatal if they end the run; replayed; killed by the kernel and "
    "found at the next start.",
    DEVICE,
    Label(name="outcome", values=("replayed", "fatal", "killed", "raised")),
    from_zero=True,
    usual="0. `replayed` costs time only; the others ended a rank.",
)
_DIRECTION = Label(name="direction", values=("to_host", "to_device", "to_nvme", "from_nvme"))
OFFLOAD_BYTES = counter(
    "offload_bytes_total",
    "Bytes moved by ZeRO's offloading; on cpu what would move between host and device.",
    _DIRECTION,
    usual="The same number in each step.",
)
OFFLOAD_SECONDS = counter(
    "offload_seconds_total",
    "Seconds in offloading code, casts and norms included; for NVMe only while the host was "
    "blocked.",
    _DIRECTION,
    usual="A rate below 0.2 of training time. Above it, offload less or use pinned memory.",
)

METRICS = (
    MEMORY_BYTES,
    MEMORY_PEAK,
    MEMORY_LIMIT,
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
