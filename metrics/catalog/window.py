"""Metrics of a TrainingRun: micro-batches, replayed windows, engine rebuilds and restarts."""

from __future__ import annotations

from ..thresholds import REPLAY_RATIO_HIGH
from .spec import EVERY_SERIES, Label, counter, gauge

REPLAY_OUTCOMES = ("committed", "gave_up")
REBUILD_OUTCOMES = ("committed", "undone", "refused")
COMPRESSION_FORMATS = ("bf16", "fp16", "int8", "fp8")

MICRO_BATCH_SAMPLES = gauge(
    "micro_batch_samples",
    "Samples of this rank's largest planned micro-batch.",
    usual="Constant, unless memory ran out or the tuner changed it.",
)
BATCH_SHARE = gauge(
    "batch_share_ratio",
    "Share of the global batch that this rank trains on.",
    usual="1 over the number of ranks. With load balancing, within a few tenths of that.",
)
COMPRESSION_ERROR = gauge(
    "compression_error_ratio",
    "Norm of the compression error of the last window's gradients, over the norm of the gradients.",
    Label(name="codec", values=COMPRESSION_FORMATS),
    usual="0.002 for bf16, 0.01 for int8 (norms of rounding errors). Worry above 0.1: the "
    "loss may suffer.",
)

# Events that concern all ranks together, so only rank 0 exports them.
ACCUMULATION_STEPS = gauge(
    "accumulation_steps",
    "Planned micro-batches per window; on rank 0 only.",
    lean=EVERY_SERIES,
    usual="Constant, unless memory ran out or the tuner changed it.",
)
WINDOW_REPLAYS = counter(
    "window_replays_total",
    "Windows replayed after an out-of-memory error on some rank, by outcome; on rank 0 only.",
    Label(name="outcome", values=REPLAY_OUTCOMES),
    lean=EVERY_SERIES,
    from_zero=True,
    usual="A few `committed` after the start, while sizes are learned. Any `gave_up` ended "
    "the run.",
)
REPLAY_SECONDS = counter(
    "replay_seconds_total",
    "Seconds lost to discarded attempts at a window and their cleanup; on rank 0 only.",
    lean=EVERY_SERIES,
    from_zero=True,
    usual=f"A rate below {REPLAY_RATIO_HIGH:g}. Above it, start with a smaller micro-batch.",
)
ENGINE_REBUILDS = counter(
    "engine_rebuilds_total",
    "Engine rebuilds by outcome; on rank 0 only.",
    Label(name="outcome", values=REBUILD_OUTCOMES),
    lean=EVERY_SERIES,
    from_zero=True,
    usual="0, or a few with the tuner. `undone` and `refused` change nothing; the log has the"
    " reason.",
)
ENGINE_REBUILD_SECONDS = counter(
    "engine_rebuild_seconds_total",
    "Seconds in which training stopped for engine rebuilds; on rank 0 only.",
    lean=EVERY_SERIES,
    from_zero=True,
    usual="Seconds to a few minutes for each rebuild, depending on the size of the model.",
)
RESTARTS = counter(
    "restarts_total",
    "Restarts of this job that the launcher of rank 0 has counted; on rank 0 only.",
    lean=EVERY_SERIES,
    from_zero=True,
    usual="0. Several within half an hour: each attempt fails for the same reason. torchrun does "
    "not count a restart after a node was lost or joined; `run_attempt` does.",
)

ON_RANK_ZERO = (
    ACCUMULATION_STEPS,
    WINDOW_REPLAYS,
    REPLAY_SECONDS,
    ENGINE_REBUILDS,
    ENGINE_REBUILD_SECONDS,
    RESTARTS,
)
METRICS = (MICRO_BATCH_SAMPLES, BATCH_SHARE, COMPRESSION_ERROR, *ON_RANK_ZERO)
