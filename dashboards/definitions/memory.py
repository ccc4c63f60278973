"""What fills memory, and will it be enough?"""

from __future__ import annotations

from ...metrics.catalog import memory as catalog
from ...metrics.thresholds import OOM_RISK_CRITICAL, OOM_RISK_HIGH
from ..grafana.dashboard import Dashboard, Row
from ..grafana.panels import BarGauge, Column, Gauge, Stat, Table, TimeSeries
from ..grafana.style import (
    ANY_IS_BAD,
    BYTES,
    COUNT,
    PLAIN,
    PLAIN_TEXT,
    RATIO,
    Query,
    above,
    below,
)
from ..promql import ON_GPU, ON_HOST, by, where
from ..recording import memory
from ..recording.rule import RecordingRule
from .palette import CATEGORIES, MEMORY_STATES, PHASES
from .parts import sized
from .queries import of_ranks, of_run, total, worst
from .window_panels import DONE_AGAIN

RISK_COLORS = above(OOM_RISK_HIGH, OOM_RISK_CRITICAL)
FULL = above(0.9, 0.97)  # of a limit: no alert of its own, the risk of running out is the judge


def of_devices(rule: RecordingRule, *matchers: str, label: str = "") -> str:
    """Select the largest of all GPUs, or in a run without any, the host's."""
    labels = (label,) if label else ()
    gpus, host = (
        by("max", of_run(rule, matcher, *matchers), *labels) for matcher in (ON_GPU, ON_HOST)
    )
    return f"{gpus}\nor on (job, run) {host}"


LIMIT, PEAK, ALLOCATED, RESERVED = (
    of_devices(memory.MEMORY_STATES, f'state="{state}"')
    for state in ("limit", "peak_allocated", "allocated", "reserved")
)
RANK_AND_DEVICE = ("rank", "device")
LEAST_HEADROOM = f"bottomk(10, {by('min', of_ranks(memory.HEADROOM_RATIO), *RANK_AND_DEVICE)})"

WILL_IT_BE_ENOUGH = (
    *sized(
        6,
        7,
        Gauge(
            title="Risk of running out",
            description="Probability that a peak within the next 50 steps passes the limit, of "
            "the rank most at risk. From 50 % on: a smaller micro-batch, a higher ZeRO stage, "
            "offload. `zerowatch estimate` says what each would save.",
            queries=(Query(by("max", of_ranks(memory.OOM_RISK)), "risk", shape="now"),),
            unit=RATIO,
            minimum=0,
            maximum=1,
            decimals=0,
            thresholds=RISK_COLORS,
        ),
        Gauge(
            title="Peak over limit",
            description="The highest peak of the last minute over the limit, of the fullest rank. "
            "High is good use of memory as long as the risk is low.",
            queries=(Query(by("max", of_ranks(memory.PEAK_RATIO)), "peak", shape="now"),),
            unit=RATIO,
            minimum=0,
            maximum=1,
            decimals=0,
            thresholds=FULL,
        ),
        Stat(
            title="Headroom",
            description="Limit less the next peak that is predicted, of the rank with the least. "
            "Negative: the next such batch does not fit.",
            queries=(Query(by("min", of_ranks(catalog.MEMORY_HEADROOM)), "headroom", shape="now"),),
            unit=BYTES,
            thresholds=below(0),
            plain=True,
        ),
        Stat(
            title="Steps until it runs out",
            description="Until the predicted peak passes the limit, at the present growth, of the "
            "rank that is first.",
            queries=(
                Query(by("min", f"{of_ranks(catalog.OOM_ETA_STEPS)} < Inf"), "steps", shape="now"),
            ),
            empty="not in sight",
            unit=COUNT,
            thresholds=below(1000, 50),
            plain=True,
        ),
    ),
    TimeSeries(
        title="Risk, of the ranks most at risk",
        description="Lines are the limits of the two alerts. One rank alone at risk has longer "
        "batches or a neighbour on its device.",
        queries=(Query(worst(memory.OOM_RISK, also="device"), "rank {{rank}} {{device}}"),),
        unit=RATIO,
        minimum=0,
        maximum=1,
        thresholds=RISK_COLORS,
    ),
    TimeSeries(
        title="Peak against limit",
        description="The largest of all ranks. What is predicted should run along the peaks; "
        "where it meets the limit, memory runs out. The limit is drawn once peaks pass half of it.",
        queries=(
            Query(f"({LIMIT}) < 2 * ({PEAK})", "limit"),
            Query(PEAK, "peak"),
            Query(of_devices(memory.PREDICTED_PEAK), "predicted peak"),
            Query(ALLOCATED, "allocated"),
        ),
        unit=BYTES,
        minimum=0,
        colors=MEMORY_STATES,
    ),
)

WHAT_FILLS_IT = (
    TimeSeries(
        title="What a device holds at a step's peak",
        description="The largest of all ranks, category by category. Much **optimizer**: a higher "
        "ZeRO stage or offload. Much **activations**: a smaller micro-batch or checkpointing of "
        "activations.",
        queries=(Query(of_devices(memory.MEMORY_CATEGORIES, label="category"), "{{category}}"),),
        unit=BYTES,
        minimum=0,
        stacked=True,
        colors=CATEGORIES,
        width=9,
        height=9,
    ),
    TimeSeries(
        title="What the host holds",
        description="The largest of all ranks; without GPUs the same as the panel next to it. Here "
        "**activations** includes what the C library keeps of earlier batches.",
        queries=(
            Query(
                by("max", of_run(memory.MEMORY_CATEGORIES, 'device="cpu"'), "category"),
                "{{category}}",
            ),
        ),
        unit=BYTES,
        minimum=0,
        stacked=True,
        colors=CATEGORIES,
        empty="nothing is offloaded to the host",
        width=9,
        height=9,
    ),
    BarGauge(
        title="Peak of each phase",
        description="In the step last looked at, of the fullest rank. The phase with the highest "
        "peak decides what fits: backward for activations, optimizer for its states.",
        queries=(Query(of_devices(memory.PHASE_PEAK, label="phase"), "{{phase}}", shape="now"),),
        unit=BYTES,
        minimum=0,
        thresholds=PLAIN_TEXT,
        colors=PHASES,
        width=6,
        height=9,
    ),
    TimeSeries(
        title="Reserved, allocated, and in pieces too small",
        description="The largest of all ranks. Reserved far above allocated, or many small "
        "pieces: set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. On the host reserved is "
        "address space and harmless.",
        queries=(
            Query(RESERVED, "reserved"),
            Query(ALLOCATED, "allocated"),
            Query(of_devices(memory.FRAGMENTATION), "fragmented"),
            Query(of_devices(memory.BASELINE), "before training"),
        ),
        unit=BYTES,
        minimum=0,
        colors=MEMORY_STATES,
    ),
    TimeSeries(
        title="What leaks, per step",
        description="Growth that no batch explains, by what grows. It is empty as long as nothing "
        "leaks; with `memory.leak_sites` the run folder names the lines that grow.",
        queries=(Query(of_run(memory.LEAK), "{{device}} {{category}}"),),
        unit=BYTES,
        minimum=0,
        empty="nothing leaks",
    ),
)

RANKS_APART = (
    TimeSeries(
        title="Fullest ranks",
        description="Peak over limit. If few stand out, balance the batches; if all are alike, "
        "the model is what is large.",
        queries=(Query(worst(memory.PEAK_RATIO, also="device"), "rank {{rank}} {{device}}"),),
        unit=RATIO,
        minimum=0,
        maximum=1,
        thresholds=FULL,
        width=7,
    ),
    Table(
        title="Ranks with the least headroom now",
        description="Headroom and peak over each rank's own limit.",
        labels={"rank": "Rank", "device": "Device"},
        columns=(
            Column(
                title="Headroom",
                expression=LEAST_HEADROOM,
                unit=RATIO,
                thresholds=below(0.1, 0),
                decimals=1,
            ),
            Column(
                title="Risk",
                expression=where(
                    by("max", of_ranks(memory.OOM_RISK), *RANK_AND_DEVICE),
                    LEAST_HEADROOM,
                    *RANK_AND_DEVICE,
                ),
                unit=RATIO,
                thresholds=RISK_COLORS,
                decimals=0,
            ),
        ),
        sort_by="Risk",
        width=10,
    ),
    TimeSeries(
        title="How well peaks are predicted",
        description="Median of recent errors over the peaks that came, of the worst rank. Within "
        "a few per cent the risk can be relied on.",
        queries=(Query(of_run(memory.PREDICTION_ERROR), "{{device}}"),),
        unit=RATIO,
        minimum=0,
        width=7,
    ),
)

TROUBLE = sized(
    6,
    6,
    Stat(
        title="Out-of-memory errors",
        description="Since the start, by what became of them. Each wrote a report into `oom/` in "
        "the run folder that says what would have fitted.",
        queries=(Query(total(catalog.OOMS, "outcome"), "{{outcome}}", shape="now"),),
        unit=PLAIN,
        thresholds=ANY_IS_BAD,
        plain=True,
        empty="none",
    ),
    Stat(
        title="Allocator retries",
        description="Times it had to empty its cache and try again, since the start. Each costs "
        "time, and is the last sign before an out-of-memory error.",
        queries=(Query(total(catalog.ALLOC_RETRIES), "retries", shape="now"),),
        unit=PLAIN,
        thresholds=ANY_IS_BAD,
        plain=True,
        empty="none",
    ),
    TimeSeries(
        title="Moved by offloading in a step",
        description="Bytes that one rank moves, by direction.",
        queries=(Query(of_run(memory.OFFLOAD_BYTES_PER_STEP), "{{direction}}"),),
        unit=BYTES,
        minimum=0,
        empty="nothing is offloaded",
    ),
    TimeSeries(
        title="Time that offloading takes",
        description="Share of training time. If it is large, offload less or use pinned memory.",
        queries=(Query(of_run(memory.OFFLOAD_RATIO), "{{direction}}"),),
        unit=RATIO,
        minimum=0,
        empty="nothing is offloaded",
    ),
)

DASHBOARD = Dashboard(
    name="memory",
    title="Memory and OOM",
    description="What fills memory, and will it be enough?",
    rows=(
        Row("Will it be enough?", WILL_IT_BE_ENOUGH),
        Row("What fills it?", WHAT_FILLS_IT),
        Row("Ranks", RANKS_APART),
        Row("Trouble and offloading", TROUBLE),
        Row("What was done about it", DONE_AGAIN),
    ),
)
