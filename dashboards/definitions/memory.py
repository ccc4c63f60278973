"""The dashboard Memory: out-of-memory risk, memory by category, errors, replays and restarts."""

from __future__ import annotations

from ...metrics.catalog import memory as catalog
from ...metrics.catalog import window
from ...metrics.thresholds import OOM_RISK_CRITICAL, OOM_RISK_HIGH, REPLAY_RATIO_HIGH
from .. import recording_rules as recorded
from ..grafana.dashboard import Dashboard, Row
from ..grafana.panels import (
    BYTES,
    COUNT,
    PLAIN,
    PLAIN_TEXT,
    RATIO,
    BarGauge,
    Column,
    Gauge,
    Query,
    Stat,
    TimeSeries,
    above,
    below,
)
from ..promql import by
from .queries import (
    DEVICE,
    RUN,
    WORST,
    last_known,
    latest,
    limit,
    of_devices,
    of_first_rank,
    of_ranks,
    of_run,
    total,
    worst,
)
from .shared_panels import (
    NONE_KNOWN,
    NOT_A_TRAINING_RUN,
    PHASE_COLORS,
    RANK_LEGEND,
    fault_count,
    heatmaps,
    rank_table,
    sized,
)

RISK_COLORS = above(OOM_RISK_HIGH, OOM_RISK_CRITICAL)
# Shares of the memory limit. Alerts do not use them, because the risk is more precise.
FULL = above(0.9, 0.97)


LIMIT = of_devices(recorded.MEMORY_LIMIT, operation="min")
PEAK = of_devices(recorded.MEMORY_PEAK, recorded.ALLOCATED)
ALLOCATED = of_devices(recorded.MEMORY_STATES, recorded.ALLOCATED)
RESERVED = of_devices(recorded.MEMORY_STATES, 'state="reserved"')
DEVICE_LEGEND = f"{RANK_LEGEND} {{{{device}}}}"
CATEGORY_COLORS = {
    "parameters": "blue",
    "gradients": "purple",
    "optimizer": "yellow",
    "activations": "orange",
    "comm_buffers": "green",
    "other": "text",
}
STATE_COLORS = {
    "limit": "red",
    "peak": "orange",
    "predicted peak": "yellow",
    "allocated": "blue",
    "reserved": "super-light-blue",
    "fragmented": "purple",
    "before training": "text",
}

WILL_IT_BE_ENOUGH = (
    *sized(
        6,
        7,
        Gauge(
            title="Risk of running out of memory",
            description="Probability that a peak within the next 50 steps exceeds the limit, for "
            f"the rank most at risk. From {OOM_RISK_HIGH:.0%} on, use a smaller micro-batch, a "
            "higher ZeRO stage or offload. `zerowatch estimate` shows what each would save.",
            queries=(Query(by("max", of_ranks(recorded.OOM_RISK)), "risk", shape="now"),),
            unit=RATIO,
            minimum=0,
            maximum=1,
            decimals=0,
            thresholds=RISK_COLORS,
        ),
        Gauge(
            title="Peak over limit",
            description="Highest peak of the last minute divided by the limit, for the fullest "
            "rank. A high value is good use of memory as long as the risk is low.",
            queries=(Query(by("max", of_ranks(recorded.PEAK_RATIO)), "peak", shape="now"),),
            unit=RATIO,
            minimum=0,
            maximum=1,
            decimals=0,
            thresholds=FULL,
        ),
        Stat(
            title="Headroom",
            description="Limit minus the predicted next peak, in bytes, for the rank with the "
            "least. If it is negative, the next batch of that size does not fit: use a smaller "
            "micro-batch.",
            queries=(Query(by("min", of_ranks(catalog.MEMORY_HEADROOM)), "headroom", shape="now"),),
            unit=BYTES,
            thresholds=below(0),
            plain=True,
        ),
        Stat(
            title="Steps until out of memory",
            description="Steps until the predicted peak exceeds the limit at the current growth, "
            "for the first rank that reaches it. If it is shown, save a checkpoint and look for "
            "the leak below.",
            queries=(
                Query(by("min", f"{of_ranks(catalog.OOM_ETA_STEPS)} < Inf"), "steps", shape="now"),
            ),
            empty="not in sight, or not served",
            unit=COUNT,
            thresholds=below(1000, 50),
            plain=True,
        ),
    ),
    TimeSeries(
        title="Risk of the ranks most at risk",
        description="Probability of an out-of-memory error within the next 50 steps. The lines are "
        "the thresholds of the two alerts. If only one rank is at risk, it has longer batches or "
        "shares its device.",
        queries=(
            Query(worst(recorded.OOM_RISK, also="device"), DEVICE_LEGEND),
            limit(OOM_RISK_HIGH, "limit of OomRiskHigh"),
            limit(OOM_RISK_CRITICAL, "limit of OomRiskCritical"),
        ),
        unit=RATIO,
        minimum=0,
        maximum=1,
    ),
    TimeSeries(
        title="Peak against limit",
        description="Bytes on the fullest rank: the peak of the last minute, the predicted next "
        "peak and the memory allocated now; and the smallest limit of a rank. The predicted peak "
        "should follow the peaks; memory runs out where it reaches the limit. The limit is shown "
        "once peaks exceed half of it.",
        queries=(
            Query(f"({LIMIT}) < 2 * ({PEAK})", "limit"),
            Query(PEAK, "peak"),
            Query(of_devices(recorded.PREDICTED_PEAK), "predicted peak"),
            Query(ALLOCATED, "allocated"),
        ),
        unit=BYTES,
        minimum=0,
        colors=STATE_COLORS,
    ),
)

WHAT_FILLS_IT = (
    TimeSeries(
        title="Device memory at a step's peak",
        description="Bytes by category at the peak of a step, for the fullest rank. If "
        "**optimizer** is large, use a higher ZeRO stage or offload. If **activations** is large, "
        "use a smaller micro-batch or activation checkpointing.",
        queries=(Query(of_devices(recorded.MEMORY_CATEGORIES, label="category"), "{{category}}"),),
        unit=BYTES,
        minimum=0,
        stacked=True,
        colors=CATEGORY_COLORS,
        width=9,
        height=9,
    ),
    TimeSeries(
        title="Host memory",
        description="Bytes of host memory by category at the peak of a step, for the fullest rank. "
        "Without GPUs it equals the panel next to it. Here **activations** includes memory of "
        "earlier batches that the C library keeps.",
        queries=(
            Query(
                by("max", of_run(recorded.MEMORY_CATEGORIES, 'device="cpu"'), "category"),
                "{{category}}",
            ),
        ),
        unit=BYTES,
        minimum=0,
        stacked=True,
        colors=CATEGORY_COLORS,
        empty=NONE_KNOWN,
        width=9,
        height=9,
    ),
    BarGauge(
        title="Peak of each phase",
        description="Peak bytes in each phase of the last step sampled in detail, for the fullest "
        "rank. The phase with the highest peak decides what fits: backward depends on activations, "
        "optimizer on the optimizer states, generate on the key-value cache.",
        queries=(Query(of_devices(recorded.PHASE_PEAK, label="phase"), "{{phase}}", shape="now"),),
        unit=BYTES,
        minimum=0,
        thresholds=PLAIN_TEXT,
        colors=PHASE_COLORS,
        width=6,
        height=9,
    ),
    TimeSeries(
        title="Reserved, allocated and fragmented",
        description="Bytes on the fullest rank. If reserved is far above allocated, or fragmented "
        "is large, set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`. On the host, reserved "
        "is address space and harmless.",
        queries=(
            Query(RESERVED, "reserved"),
            Query(ALLOCATED, "allocated"),
            Query(of_devices(recorded.FRAGMENTATION), "fragmented"),
            Query(of_devices(recorded.BASELINE), "before training"),
        ),
        unit=BYTES,
        minimum=0,
        colors=STATE_COLORS,
    ),
    TimeSeries(
        title="Leaks per step",
        description="Bytes per step by which memory grows although the batches do not explain it, "
        "by category. The panel is empty while nothing leaks. With `memory.trace_leaks` set, the "
        "run folder names the lines of code whose memory grows.",
        queries=(Query(of_run(recorded.LEAK), "{{device}} {{category}}"),),
        unit=BYTES,
        minimum=0,
        empty="nothing leaks",
    ),
)

RANKS_APART = (
    TimeSeries(
        title="Fullest ranks",
        description="Peak of the last minute divided by the limit, for the fullest ranks. If a few "
        "ranks stand out, balance the batches. If all are alike, the model itself is large.",
        queries=(Query(worst(recorded.PEAK_RATIO, also="device"), DEVICE_LEGEND),),
        unit=RATIO,
        minimum=0,
        maximum=1,
        thresholds=FULL,
        width=12,
    ),
    rank_table(
        title="Ranks with the least headroom now",
        description="Limit minus the predicted next peak, as a share of the limit, and the "
        "probability of an out-of-memory error within 50 steps. Reduce the micro-batch if the "
        "headroom is negative.",
        labels=DEVICE,
        columns=(
            Column(
                title="Headroom",
                expression=by("min", of_ranks(recorded.HEADROOM_RATIO), *DEVICE),
                unit=RATIO,
                thresholds=below(0.1, 0),
                decimals=1,
            ),
            Column(
                title="Risk",
                expression=by("max", of_ranks(recorded.OOM_RISK), *DEVICE),
                unit=RATIO,
                thresholds=RISK_COLORS,
                decimals=0,
            ),
        ),
        lowest=True,
        sort_by="Risk",
        ascending=False,
        width=12,
    ),
    TimeSeries(
        title="Host memory of a node",
        description="Host memory of the ranks of a node that serve at one address together, "
        "divided by the smallest limit that one of them has, for the fullest nodes. Of containers "
        "with an address each, the fullest counts. Near 100% the kernel ends a rank, although each "
        "alone may look harmless.",
        queries=(Query(f"topk({WORST}, {of_run(recorded.NODE_MEMORY_RATIO)})", "{{node}}"),),
        unit=RATIO,
        minimum=0,
        width=12,
        height=7,
    ),
    TimeSeries(
        title="Prediction error of peaks",
        description="Median of recent prediction errors divided by the actual peaks, for the worst "
        "rank. If it is within a few percent, the risk is reliable; otherwise judge by the peaks.",
        queries=(Query(of_run(recorded.PREDICTION_ERROR), "{{device}}"),),
        unit=RATIO,
        minimum=0,
        width=12,
        height=7,
    ),
)

OVER_TIME = heatmaps(
    recorded.PEAK_RATIO,
    title="Peak over limit",
    description="Peak of the last minute divided by the memory limit; brighter is fuller. Bright "
    "rows have longer batches or share their device. A whole bright node: look at its host memory.",
    unit=RATIO,
    minimum=0,
)

TROUBLE = sized(
    6,
    6,
    fault_count(
        title="Out-of-memory errors",
        description="Out-of-memory errors since the start, by outcome. For each error, a report in "
        "`oom/` in the run folder shows which configurations would have fitted.",
        expression=total(catalog.OOMS, "outcome"),
        legend="{{outcome}}",
        empty=NONE_KNOWN,
    ),
    fault_count(
        title="Allocator retries",
        description="How often the allocator emptied its cache and tried again, since the start. "
        "Each retry costs time and is the last sign before an out-of-memory error: use a smaller "
        "micro-batch.",
        expression=total(catalog.ALLOC_RETRIES),
        legend="retries",
        empty=NONE_KNOWN,
    ),
    TimeSeries(
        title="Offloaded bytes per step",
        description="Bytes that offloading moves on one rank in a step, by direction. If it is "
        "large and the time next to it too, offload less.",
        queries=(Query(of_run(recorded.OFFLOAD_BYTES_PER_STEP), "{{direction}}"),),
        unit=BYTES,
        minimum=0,
        empty=NONE_KNOWN,
    ),
    TimeSeries(
        title="Offloading time",
        description="Share of training time spent on offloading, by direction. If it is large, "
        "offload less or use pinned memory.",
        queries=(Query(of_run(recorded.OFFLOAD_RATIO), "{{direction}}"),),
        unit=RATIO,
        minimum=0,
        empty=NONE_KNOWN,
    ),
)

REPLAYS_AND_RESTARTS = sized(
    6,
    6,
    Stat(
        title="Replayed windows",
        description="Accumulation windows that were repeated since the start because memory ran "
        "out. **committed**: the replay succeeded with smaller micro-batches. **gave_up**: the run "
        "ended. No sample is lost or trained on twice.",
        queries=(
            Query(
                last_known(of_first_rank(window.WINDOW_REPLAYS), "outcome"),
                "{{outcome}}",
                shape="now",
            ),
        ),
        unit=PLAIN,
        thresholds=PLAIN_TEXT,
        plain=True,
        empty=NOT_A_TRAINING_RUN,
    ),
    TimeSeries(
        title="Time lost to replayed windows",
        description="Share of training time lost to replayed windows. Above the line, start with "
        "smaller micro-batches, or use activation checkpointing.",
        queries=(
            Query(of_run(recorded.REPLAY_RATIO), "5 minutes"),
            Query(of_run(recorded.REPLAY_RATIO_LONG), "30 minutes"),
            limit(REPLAY_RATIO_HIGH),
        ),
        unit=RATIO,
        minimum=0,
        empty=NOT_A_TRAINING_RUN,
    ),
    Stat(
        title="Engine rebuilds",
        description="Rebuilds of the engine since the start, for another ZeRO stage or offload, by "
        "outcome. **undone**: the rebuild failed. **refused**: it would not have worked. In both "
        "cases training continued unchanged, and the log has the reason.",
        queries=(
            Query(
                last_known(of_first_rank(window.ENGINE_REBUILDS), "outcome"),
                "{{outcome}}",
                shape="now",
            ),
        ),
        unit=PLAIN,
        thresholds=PLAIN_TEXT,
        plain=True,
        empty=NOT_A_TRAINING_RUN,
    ),
    fault_count(
        title="Restarts",
        description="Number of earlier attempts of the run: restarts by the launcher, also on "
        "other nodes, and jobs with the same run id. If it is not 0 and should be, see the log of "
        "the rank that ended first, or `oom/` in the run folder.",
        expression=latest(recorded.RUN_ATTEMPT, *RUN),
        legend="restarts",
        empty=NONE_KNOWN,
    ),
)

DASHBOARD = Dashboard(
    name="memory",
    title="Memory and OOM",
    description="What fills memory, and will it be enough?",
    rows=(
        Row("Will it be enough?", WILL_IT_BE_ENOUGH),
        Row("What fills it?", WHAT_FILLS_IT),
        Row("Nodes and ranks", RANKS_APART),
        Row("Nodes and ranks over time", OVER_TIME, collapsed=True),
        Row("Errors and offloading", TROUBLE, collapsed=True),
        Row("Replays, rebuilds and restarts", REPLAYS_AND_RESTARTS, collapsed=True),
    ),
)
