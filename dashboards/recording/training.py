"""Steps: how many, how long, of what."""

from __future__ import annotations

from ...metrics.catalog import training
from ..promql import by, rate, ratio
from .rule import TRAINING_PHASES, aggregated, recorded, share_of_training, summed_rate

STEPS_RATE = recorded(
    training.STEPS,
    "rate5m",  # every rank takes the same steps
    lambda timing: by("max", rate(training.STEPS, timing.short)),
)
MFU = aggregated(training.MFU, "avg")
LOSS = aggregated(training.LOSS, "avg")
GRADIENT_NORM = aggregated(training.GRADIENT_NORM, "max")
ACTIVE_RANKS = aggregated(training.RUN_ACTIVE, "sum")
STEP_BUCKETS = summed_rate(training.STEP_SECONDS, "le", part="_bucket")
STEP_SECONDS = recorded(
    training.STEP_SECONDS,
    "mean_rate5m",
    lambda timing: ratio(
        by("sum", rate(training.STEP_SECONDS, timing.short, part="_sum")),
        by("sum", rate(training.STEP_SECONDS, timing.short, part="_count")),
    ),
)
STEP_SECONDS_BY_RANK = recorded(
    training.STEP_SECONDS,
    "mean_rate5m",
    lambda timing: ratio(
        by("sum", rate(training.STEP_SECONDS, timing.short, part="_sum"), "rank"),
        by("sum", rate(training.STEP_SECONDS, timing.short, part="_count"), "rank"),
        "rank",
    ),
    "rank",
)
PHASE_SECONDS_PER_STEP = recorded(
    training.PHASE_SECONDS,
    "per_step_rate5m",
    lambda timing: ratio(
        by("sum", rate(training.PHASE_SECONDS, timing.short), "phase"),
        by("sum", rate(training.STEPS, timing.short)),
    ),
    "phase",
)
PHASE_RATIO = recorded(
    training.PHASE_SECONDS,
    "ratio_rate5m",
    lambda timing: share_of_training(training.PHASE_SECONDS, timing.short, "phase"),
    "phase",
)
DATA_RATIO_BY_RANK = recorded(
    training.PHASE_SECONDS,
    "data_ratio_rate5m",
    lambda timing: ratio(
        by("sum", rate(training.PHASE_SECONDS, timing.short, 'phase="data"'), "rank"),
        by("sum", rate(training.PHASE_SECONDS, timing.short, TRAINING_PHASES), "rank"),
        "rank",
    ),
    "rank",
)
SKIPPED_RATIO = recorded(
    training.SKIPPED_STEPS,
    "ratio_rate5m",
    lambda timing: ratio(
        by("sum", rate(training.SKIPPED_STEPS, timing.short)),
        by("sum", rate(training.STEPS, timing.short)),
    ),
)

RULES = (
    STEPS_RATE,
    MFU,
    LOSS,
    GRADIENT_NORM,
    ACTIVE_RANKS,
    STEP_BUCKETS,
    STEP_SECONDS,
    STEP_SECONDS_BY_RANK,
    PHASE_SECONDS_PER_STEP,
    PHASE_RATIO,
    DATA_RATIO_BY_RANK,
    SKIPPED_RATIO,
)
