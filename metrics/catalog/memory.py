"""Memory: in use, at its peak, by category, and the risk of running out."""

from __future__ import annotations

from .labels import DEVICE
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
    "Memory of a device; on cpu allocated is RSS, peak_allocated the peak RSS of the last "
    "minute and reserved the virtual size.",
    DEVICE,
    Label(name="state", values=MEMORY_STATES),
)
MEMORY_CATEGORY_BYTES = gauge(
    "memory_category_bytes",
    "Memory of a device by what it holds.",
    DEVICE,
    Label(name="category", values=MEMORY_CATEGORIES),
)
MEMORY_HEADROOM = gauge(
    "memory_headroom_bytes", "Limit of a device minus the next peak that is predicted.", DEVICE
)
OOM_RISK = gauge(
    "oom_risk_ratio", "Probability that a peak within the next 50 steps passes the limit.", DEVICE
)
OOM_ETA_STEPS = gauge("oom_eta_steps", "Steps until the predicted peak passes the limit.", DEVICE)
ALLOC_RETRIES = counter(
    "alloc_retries_total", "Times the allocator had to free its cache and try again.", DEVICE
)
OOMS = counter(
    "ooms_total",
    "Out-of-memory errors by what became of them.",
    DEVICE,
    Label(name="outcome", values=("replayed", "fatal", "killed", "raised")),
)
_DIRECTION = Label(name="direction", values=("to_host", "to_device", "to_nvme", "from_nvme"))
OFFLOAD_BYTES = counter("offload_bytes_total", "Bytes moved by offloading.", _DIRECTION)
OFFLOAD_SECONDS = counter("offload_seconds_total", "Seconds spent offloading.", _DIRECTION)

METRICS = (
    MEMORY_BYTES,
    MEMORY_CATEGORY_BYTES,
    MEMORY_HEADROOM,
    OOM_RISK,
    OOM_ETA_STEPS,
    ALLOC_RETRIES,
    OOMS,
    OFFLOAD_BYTES,
    OFFLOAD_SECONDS,
)
