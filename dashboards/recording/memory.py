"""Memory over its limits, and what offloading moves."""

from __future__ import annotations

from ...metrics.catalog import memory
from ...metrics.catalog.training import STEPS
from ..promql import by, rate, ratio, select
from .rule import aggregated, recorded, share_of_training

_PEAK = 'state="peak_allocated"'
_LIMIT = 'state="limit"'
PEAK_RATIO = recorded(
    memory.MEMORY_BYTES,
    "peak_ratio",
    lambda timing: (
        f"{by('max', select(memory.MEMORY_BYTES, _PEAK), 'rank', 'device')}\n"
        f"/ {by('min', select(memory.MEMORY_BYTES, _LIMIT), 'rank', 'device')}"
    ),
    "rank",
    "device",
)
HEADROOM_RATIO = recorded(
    memory.MEMORY_HEADROOM,
    "limit_ratio",
    lambda timing: (
        f"{by('min', select(memory.MEMORY_HEADROOM), 'rank', 'device')}\n"
        f"/ {by('min', select(memory.MEMORY_BYTES, _LIMIT), 'rank', 'device')}"
    ),
    "rank",
    "device",
)
OOM_RISK = aggregated(memory.OOM_RISK, "max", "rank", "device")
MEMORY_CATEGORIES = aggregated(memory.MEMORY_CATEGORY_BYTES, "max", "device", "category")
OFFLOAD_RATIO = recorded(
    memory.OFFLOAD_SECONDS,
    "ratio_rate5m",
    lambda timing: share_of_training(memory.OFFLOAD_SECONDS, timing.short, "direction"),
    "direction",
)

# By the step and not by the second: such a rate rises for five minutes after a start.
OFFLOAD_BYTES_PER_STEP = recorded(
    memory.OFFLOAD_BYTES,
    "per_step_rate5m",
    lambda timing: ratio(
        by("sum", rate(memory.OFFLOAD_BYTES, timing.short), "direction"),
        by("sum", rate(STEPS, timing.short)),
    ),
    "direction",
)
# For dashboards: of a thousand ranks, as lines over time, the raw series would be too many.
MEMORY_STATES = aggregated(memory.MEMORY_BYTES, "max", "device", "state")
PHASE_PEAK = aggregated(memory.MEMORY_PHASE_PEAK, "max", "device", "phase")
BASELINE = aggregated(memory.MEMORY_BASELINE, "max", "device")
FRAGMENTATION = aggregated(memory.MEMORY_FRAGMENTATION, "max", "device")
PREDICTED_PEAK = aggregated(memory.MEMORY_PREDICTED_PEAK, "max", "device")
PREDICTION_ERROR = aggregated(memory.MEMORY_PREDICTION_ERROR, "max", "device")
LEAK = aggregated(memory.MEMORY_LEAK, "max", "device", "category")

RULES = (
    PEAK_RATIO,
    HEADROOM_RATIO,
    OOM_RISK,
    MEMORY_CATEGORIES,
    OFFLOAD_RATIO,
    OFFLOAD_BYTES_PER_STEP,
    MEMORY_STATES,
    PHASE_PEAK,
    BASELINE,
    FRAGMENTATION,
    PREDICTED_PEAK,
    PREDICTION_ERROR,
    LEAK,
)
