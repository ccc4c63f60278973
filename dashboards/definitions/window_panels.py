"""Panels of a TrainingRun's accumulation windows. They are empty for other runs."""

from __future__ import annotations

from ...metrics.catalog import window as catalog
from ...metrics.thresholds import REPLAY_RATIO_HIGH
from .. import recording_rules as recorded
from ..grafana.panels import Stat, TimeSeries
from ..grafana.style import ANY_IS_BAD, COUNT, PLAIN, PLAIN_TEXT, RATIO, Query, above
from ..promql import by
from .parts import sized
from .queries import of_first_rank, of_run

NO_RUN = "not a TrainingRun"

MICRO_BATCHES_AND_SHARES = sized(
    8,
    7,
    TimeSeries(
        title="Micro-batches of a step",
        description="Samples of the largest micro-batch, and micro-batches per step. They change "
        "after an out-of-memory error, when memory is free again, and by your own call. The update "
        "stays that of the whole batch.",
        queries=(
            Query(of_run(recorded.MICRO_BATCH_SAMPLES), "samples of a micro-batch"),
            Query(by("max", of_first_rank(catalog.ACCUMULATION_STEPS)), "micro-batches"),
        ),
        unit=COUNT,
        minimum=0,
        empty=NO_RUN,
    ),
    TimeSeries(
        title="Shares of the batch",
        description="Share of a batch that the ranks get. With `balance`, slow ranks get less. If "
        "the lines diverge, the dashboard Communication shows which rank is slow, and why.",
        queries=(
            Query(of_run(recorded.LARGEST_SHARE), "largest"),
            Query(of_run(recorded.EVEN_SHARE), "even"),
            Query(of_run(recorded.SMALLEST_SHARE), "smallest"),
        ),
        unit=RATIO,
        minimum=0,
        empty=NO_RUN,
    ),
    TimeSeries(
        title="Compression error",
        description="Error of the compressed gradients over their norm, for the worst rank. With 8 "
        "bits a few percent are usual, and error feedback compensates for them. If it grows, or "
        "the loss stalls, use bf16 or none.",
        queries=(Query(of_run(recorded.COMPRESSION_ERROR), "{{codec}}"),),
        unit=RATIO,
        minimum=0,
        empty="gradients are not compressed",
    ),
)

REPLAYS_AND_RESTARTS = sized(
    6,
    6,
    Stat(
        title="Replayed windows",
        description="Accumulation windows replayed since the start, because memory ran out. "
        "**committed**: the replay succeeded in smaller pieces. **gave_up**: the run ended. No "
        "sample is lost or trained on twice.",
        queries=(Query(of_first_rank(catalog.WINDOW_REPLAYS), "{{outcome}}", shape="now"),),
        unit=PLAIN,
        thresholds=PLAIN_TEXT,
        plain=True,
        empty=NO_RUN,
    ),
    TimeSeries(
        title="Time lost to replayed windows",
        description="Share of training time. Above the line, start with smaller micro-batches, or "
        "use activation checkpointing.",
        queries=(
            Query(of_run(recorded.REPLAY_RATIO), "5 minutes"),
            Query(of_run(recorded.REPLAY_RATIO_LONG), "30 minutes"),
        ),
        unit=RATIO,
        minimum=0,
        thresholds=above(REPLAY_RATIO_HIGH),
        empty=NO_RUN,
    ),
    Stat(
        title="Engine rebuilds",
        description="Rebuilds within the run, for another ZeRO stage or offload. **undone**: it "
        "failed. **refused**: it would not have worked. In both cases training continued "
        "unchanged, and the log has the reason.",
        queries=(Query(of_first_rank(catalog.ENGINE_REBUILDS), "{{outcome}}", shape="now"),),
        unit=PLAIN,
        thresholds=PLAIN_TEXT,
        plain=True,
        empty=NO_RUN,
    ),
    Stat(
        title="Restarts",
        description="How often the run restarted from its last save after a failure. See the log "
        "of the rank that ended first, or `oom/` in the run folder.",
        queries=(Query(of_first_rank(catalog.RESTARTS), "restarts", shape="now"),),
        unit=PLAIN,
        thresholds=ANY_IS_BAD,
        plain=True,
        empty=NO_RUN,
    ),
)
