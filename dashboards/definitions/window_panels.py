"""Panels of a TrainingRun's windows. They are empty where a script owns its loop itself."""

from __future__ import annotations

from ...metrics.catalog import window as catalog
from ...metrics.thresholds import REPLAY_RATIO_HIGH
from ..grafana.panels import Stat, TimeSeries
from ..grafana.style import ANY_IS_BAD, COUNT, PLAIN, PLAIN_TEXT, RATIO, Query, above
from ..promql import by
from ..recording import window
from .parts import sized
from .queries import of_first_rank, of_run

NO_RUN = "not a TrainingRun"

CUT_AND_SHARED = sized(
    8,
    7,
    TimeSeries(
        title="Micro-batches of a step",
        description="Samples of the largest micro-batch, and how many micro-batches make a step. "
        "It changes after an out-of-memory error, when memory is free again, and by your own call; "
        "the update stays that of the whole batch.",
        queries=(
            Query(of_run(window.MICRO_BATCH_SAMPLES), "samples of a micro-batch"),
            Query(by("max", of_first_rank(catalog.ACCUMULATION_STEPS)), "micro-batches"),
        ),
        unit=COUNT,
        minimum=0,
        empty=NO_RUN,
    ),
    TimeSeries(
        title="Shares of the batch",
        description="What part of a batch the ranks get. With `balance` slow ranks get less: if "
        "the lines part, see on the dashboard Communication who is slow, and why.",
        queries=(
            Query(of_run(window.LARGEST_SHARE), "largest"),
            Query(of_run(window.EVEN_SHARE), "even"),
            Query(of_run(window.SMALLEST_SHARE), "smallest"),
        ),
        unit=RATIO,
        minimum=0,
        empty=NO_RUN,
    ),
    TimeSeries(
        title="What compression loses",
        description="Error of the compressed gradients over their norm, of the worst rank. With 8 "
        "bits a few per cent are usual, and error feedback makes up for them. If it grows, or the "
        "loss stalls, use bf16 or none.",
        queries=(Query(of_run(window.COMPRESSION_ERROR), "{{codec}}"),),
        unit=RATIO,
        minimum=0,
        empty="gradients are not compressed",
    ),
)

DONE_AGAIN = sized(
    6,
    6,
    Stat(
        title="Windows done again",
        description="Since the start, as memory ran out: **committed** ended well in smaller "
        "pieces; after **gave_up** the run ended. No sample is lost or trained on twice.",
        queries=(Query(of_first_rank(catalog.WINDOW_REPLAYS), "{{outcome}}", shape="now"),),
        unit=PLAIN,
        thresholds=PLAIN_TEXT,
        plain=True,
        empty=NO_RUN,
    ),
    TimeSeries(
        title="Time lost to replayed windows",
        description="Share of training time. Above the line, ask for smaller micro-batches from "
        "the start, or for activation checkpointing.",
        queries=(
            Query(of_run(window.REPLAY_RATIO), "5 minutes"),
            Query(of_run(window.REPLAY_RATIO_LONG), "30 minutes"),
        ),
        unit=RATIO,
        minimum=0,
        thresholds=above(REPLAY_RATIO_HIGH),
        empty=NO_RUN,
    ),
    Stat(
        title="Engine rebuilds",
        description="Within the run, for another ZeRO stage or offload. **undone**: it failed, and "
        "**refused**: it would not have worked; either way training went on as it was, and the "
        "log says why.",
        queries=(Query(of_first_rank(catalog.ENGINE_REBUILDS), "{{outcome}}", shape="now"),),
        unit=PLAIN,
        thresholds=PLAIN_TEXT,
        plain=True,
        empty=NO_RUN,
    ),
    Stat(
        title="Restarts",
        description="Times the run was started again after a failure, from its last save. See the "
        "log of the rank that ended first, or `oom/` in the run folder.",
        queries=(Query(of_first_rank(catalog.RESTARTS), "restarts", shape="now"),),
        unit=PLAIN,
        thresholds=ANY_IS_BAD,
        plain=True,
        empty=NO_RUN,
    ),
)
