"""The window: how a batch is cut into micro-batches, and what became of it. Of a TrainingRun."""

from __future__ import annotations

from .spec import Label, counter, gauge

REPLAY_OUTCOMES = ("committed", "gave_up")
REBUILD_OUTCOMES = ("committed", "undone", "refused")
COMPRESSION_FORMATS = ("bf16", "fp16", "int8", "fp8")

MICRO_BATCH_SAMPLES = gauge(
    "micro_batch_samples", "Samples of this rank's largest micro-batch, as the window is planned."
)
BATCH_SHARE = gauge("batch_share_ratio", "Share of the global batch that this rank trains on.")
COMPRESSION_ERROR = gauge(
    "compression_error_ratio",
    "Norm of what compression lost of the last window's gradients, over the gradients' norm.",
    Label(name="codec", values=COMPRESSION_FORMATS),
)

# What all ranks do together, and rank 0 alone tells.
ACCUMULATION_STEPS = gauge(
    "accumulation_steps", "Micro-batches of a window, as it is planned; on rank 0 only."
)
WINDOW_REPLAYS = counter(
    "window_replays_total",
    "Times a window was done again because memory ran out on some rank, by what became of it; on "
    "rank 0 only.",
    Label(name="outcome", values=REPLAY_OUTCOMES),
)
REPLAY_SECONDS = counter(
    "replay_seconds_total",
    "Seconds spent on attempts at a window that were given up, and on cleaning up after them; on "
    "rank 0 only.",
)
ENGINE_REBUILDS = counter(
    "engine_rebuilds_total",
    "Engines made anew within the run: committed, undone as it failed, or refused beforehand; on "
    "rank 0 only.",
    Label(name="outcome", values=REBUILD_OUTCOMES),
)
ENGINE_REBUILD_SECONDS = counter(
    "engine_rebuild_seconds_total",
    "Seconds that training stood still for engines made anew; on rank 0 only.",
)
RESTARTS = counter(
    "restarts_total", "Times this run was started again after a failure; on rank 0 only."
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
