"""The dashboard Step anatomy: phases, ranks, throughput and training figures."""

from __future__ import annotations

from ...metrics.catalog import communication as comm
from ...metrics.catalog import training as steps
from ...metrics.catalog import window
from ...metrics.thresholds import DATA_RATIO_HIGH
from .. import recording_rules as recorded
from ..grafana.dashboard import Dashboard, Row, uid_of
from ..grafana.panels import (
    COUNT,
    FLOPS_PER_SECOND,
    PLAIN,
    PLAIN_TEXT,
    RATIO,
    SECONDS,
    BarGauge,
    Heatmap,
    Query,
    Stat,
    TimeSeries,
    above,
)
from ..promql import by, rate
from .queries import RANKS, WINDOW, of_first_rank, of_ranks, of_run, rate_of_ranks, total, worst
from .shared_panels import NOT_A_TRAINING_RUN, PHASE_COLORS, fault_count, sized, step_seconds

A_STEP = (
    TimeSeries(
        title="A step by phase",
        description="Seconds of a step, as a mean over ranks. A step is one optimizer update with "
        "all its micro-batches. `other` is the time between the phases: your own code.",
        queries=(Query(of_run(recorded.PHASE_SECONDS_PER_STEP), "{{phase}}"),),
        unit=SECONDS,
        minimum=0,
        stacked=True,
        colors=PHASE_COLORS,
        width=14,
        height=9,
    ),
    BarGauge(
        title="Share of each phase",
        description="Share of training time in the last five minutes. Backward usually takes about "
        "twice as long as forward. Much `data`: use more loader workers or prefetching. Much "
        "`optimizer`: check offloading on the dashboard Memory.",
        queries=(Query(of_run(recorded.PHASE_RATIO), "{{phase}}", shape="now"),),
        unit=RATIO,
        minimum=0,
        maximum=1,
        thresholds=PLAIN_TEXT,
        colors=PHASE_COLORS,
        decimals=1,
        width=10,
        height=9,
    ),
    step_seconds(),
    Heatmap(
        title="Step durations",
        description="Brighter means more steps. Two bands mean two kinds of step, such as short "
        "and long batches. Single cells far above the bands are stalls.",
        queries=(Query(of_run(recorded.STEP_BUCKETS), "{{le}}", shape="buckets"),),
        unit=SECONDS,
    ),
)

RANKS_APART = (
    TimeSeries(
        title="Step time of the slowest ranks",
        description="All ranks wait for each other, so these lines stay close together even if one "
        "rank is the cause. The straggler score on the dashboard Communication shows which one.",
        queries=(Query(worst(recorded.STEP_SECONDS_BY_RANK), "rank {{rank}}"),),
        unit=SECONDS,
        minimum=0,
        dashboard=uid_of("communication"),
    ),
    TimeSeries(
        title="Waiting for data: the worst ranks",
        description="Share of training time in the data loader. Above the line, use more workers, "
        "`pin_memory`, prefetching, or a faster disk.",
        queries=(Query(worst(recorded.DATA_RATIO_BY_RANK), "rank {{rank}}"),),
        unit=RATIO,
        minimum=0,
        thresholds=above(DATA_RATIO_HIGH),
    ),
)

THROUGHPUT = sized(
    6,
    7,
    TimeSeries(
        title="Steps per second",
        description="Rate of the fastest rank; all ranks take the same steps.",
        queries=(Query(by("max", rate(steps.STEPS, WINDOW, *RANKS)), "steps/s"),),
        unit=PLAIN,
        minimum=0,
    ),
    TimeSeries(
        title="Samples and tokens per second",
        description="Sum over all ranks; tokens appear if the batch shows them. The scale is "
        "logarithmic, because tokens are many.",
        queries=(
            Query(rate_of_ranks(steps.SAMPLES), "samples/s"),
            Query(rate_of_ranks(steps.TOKENS), "tokens/s"),
        ),
        unit=COUNT,
        log_scale=True,
    ),
    TimeSeries(
        title="FLOPs per second",
        description="FLOPs that the model needs, for all ranks together, without recomputed "
        "activations.",
        queries=(Query(rate_of_ranks(steps.FLOPS), "FLOP/s"),),
        unit=FLOPS_PER_SECOND,
        minimum=0,
        empty="not known for this model",
    ),
    TimeSeries(
        title="Model FLOPs utilization",
        description="FLOPs that the model needs over the device's peak. 0.3 to 0.5 is usual for "
        "large transformers on GPUs. Compare it with your own runs rather than with others.",
        queries=(Query(of_run(recorded.MFU), "MFU"),),
        unit=RATIO,
        minimum=0,
        maximum=1,
        empty="the device's peak is not known",
    ),
)

NUMBERS = (
    TimeSeries(
        title="Loss",
        description="Mean over the step's micro-batches and over ranks.",
        queries=(Query(of_run(recorded.LOSS), "loss"),),
        unit=PLAIN,
        width=8,
    ),
    TimeSeries(
        title="Gradient norm",
        description="Largest of all ranks, before clipping. A sudden rise often precedes a loss "
        "that is not finite: lower the learning rate or clip.",
        queries=(Query(of_run(recorded.GRADIENT_NORM), "norm"),),
        unit=PLAIN,
        minimum=0,
        width=8,
    ),
    TimeSeries(
        title="Learning rate",
        description="Learning rate of the first parameter group, on rank 0.",
        queries=(Query(of_first_rank(steps.LEARNING_RATE), "learning rate"),),
        unit=PLAIN,
        minimum=0,
        width=8,
    ),
    fault_count(
        title="Non-finite losses",
        description="Steps since each rank's start, over the chosen ranks. One is too many: see "
        "the alert ZerowatchLossNotFinite.",
        expression=total(steps.NONFINITE_LOSSES),
        legend="steps",
        width=6,
        height=5,
    ),
    Stat(
        title="Skipped updates",
        description="Share of steps of the last five minutes whose gradients overflowed. A few at "
        "the start of fp16 training are normal.",
        queries=(Query(of_run(recorded.SKIPPED_RATIO), "skipped"),),
        unit=RATIO,
        thresholds=above(0.05, 0.5),
        width=6,
        height=5,
    ),
    TimeSeries(
        title="Loss scale",
        description="Loss scale of fp16 training. It halves at each overflow, and doubles after "
        "many steps without one. If it keeps falling, gradients overflow at any scale.",
        queries=(Query(of_first_rank(steps.LOSS_SCALE), "scale"),),
        unit=COUNT,
        log_scale=True,
        width=12,
        height=5,
        empty="no loss scale: training is not in fp16",
    ),
)

PROFILED = sized(
    12,
    6,
    TimeSeries(
        title="The last profiled step",
        description="Shares of computation only, communication only, both at once and neither, "
        "measured by the profiler on rank 0. More overlap is better. It is off unless "
        "`profile.every_steps` is set.",
        queries=(Query(of_first_rank(comm.STEP_TIME_RATIO), "{{part}}"),),
        unit=RATIO,
        minimum=0,
        maximum=1,
        stacked=True,
        empty="profiling is off: set profile.every_steps",
    ),
    TimeSeries(
        title="Exposed time: zerowatch against the profiler",
        description="Difference between the two, over the profiled step's time, for the worst of "
        "the chosen ranks. Above 5%, do not rely on small differences in exposed time.",
        queries=(Query(by("max", of_ranks(comm.COMM_EXPOSED_ERROR_RATIO)), "difference"),),
        unit=RATIO,
        minimum=0,
        empty="profiling is off: set profile.every_steps",
    ),
)

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
            Query(by("max", of_first_rank(window.ACCUMULATION_STEPS)), "micro-batches"),
        ),
        unit=COUNT,
        minimum=0,
        empty=NOT_A_TRAINING_RUN,
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
        empty=NOT_A_TRAINING_RUN,
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

DASHBOARD = Dashboard(
    name="step_anatomy",
    title="Step anatomy",
    description="Where does a step's time go, and on which rank?",
    rows=(
        Row("A step", A_STEP),
        Row("Ranks", RANKS_APART),
        Row("Micro-batches, shares and compression", MICRO_BATCHES_AND_SHARES),
        Row("Throughput", THROUGHPUT),
        Row("Loss, gradients and learning rate", NUMBERS),
        Row("Profiled step", PROFILED),
    ),
)
