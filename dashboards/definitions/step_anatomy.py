"""The dashboard Step anatomy: phases, slow ranks, throughput, loss and gradients."""

from __future__ import annotations

from ...metrics.catalog import communication as comm
from ...metrics.catalog import generation, window
from ...metrics.catalog import training as steps
from ...metrics.thresholds import DATA_RATIO_HIGH
from .. import recording_rules as recorded
from ..grafana.dashboard import Dashboard, Row, uid_of
from ..grafana.panels import (
    BYTES,
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
from ..promql import by
from .queries import (
    limit,
    of_devices,
    of_first_rank,
    of_ranks,
    of_run,
    rate_of_ranks,
    total,
    worst,
)
from .shared_panels import (
    NONE_KNOWN,
    NOT_A_TRAINING_RUN,
    NOT_KNOWN,
    PHASE_COLORS,
    RANK_LEGEND,
    SAMPLES_SHARED,
    fault_count,
    heatmaps,
    sized,
    step_seconds,
)

A_STEP = (
    TimeSeries(
        title="A step by phase",
        description="Seconds of a step in each phase, as a mean over ranks. A step is one "
        "optimizer update with all its micro-batches. `other` is the time between the phases, "
        "spent in your own code. Begin with the widest band.",
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
        description="Share of training time in each phase, over the last five minutes. Backward "
        "usually takes about twice as long as forward. If `data` is large, use more loader workers "
        "or prefetching. If `optimizer` is large, check offloading on the dashboard Memory.",
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
        description="Number of steps by their duration; brighter cells have more steps. Two bands "
        "mean that there are two kinds of step, such as short and long batches. Single cells far "
        "above the bands are stalls.",
        queries=(Query(of_run(recorded.STEP_BUCKETS), "{{le}}", shape="buckets"),),
        unit=SECONDS,
    ),
)

RANKS_APART = (
    TimeSeries(
        title="Step time of the slowest ranks",
        description="Mean time of a step over five minutes, for the slowest ranks. All ranks wait "
        "for each other, so these lines stay close together even if a single rank is the cause. "
        "The straggler score on the dashboard Communication shows which one.",
        queries=(Query(worst(recorded.STEP_DURATION_BY_RANK), RANK_LEGEND),),
        unit=SECONDS,
        minimum=0,
        dashboard=uid_of("communication"),
    ),
    TimeSeries(
        title="Waiting for data: the worst ranks",
        description="Share of training time spent in the data loader, for the worst ranks. Above "
        "the line, use more workers, `pin_memory`, prefetching, or a faster disk.",
        queries=(
            Query(worst(recorded.DATA_RATIO_BY_RANK), RANK_LEGEND),
            limit(DATA_RATIO_HIGH),
        ),
        unit=RATIO,
        minimum=0,
    ),
)

OVER_TIME = (
    *heatmaps(
        recorded.STEP_DURATION_BY_RANK,
        title="Step time",
        description="Mean time of a step over five minutes; brighter is longer. A bright column is "
        "a pause of all ranks. A bright row is a rank that takes longer than the others, which is "
        "rare: they wait for each other.",
        unit=SECONDS,
    ),
    *heatmaps(
        recorded.DATA_RATIO_BY_RANK,
        title="Waiting for data",
        description="Share of training time spent in the data loader; brighter is more. Bright "
        "rows of one node: its disk or its share of the CPUs is slow.",
        unit=RATIO,
        minimum=0,
    ),
)

THROUGHPUT = sized(
    6,
    7,
    TimeSeries(
        title="Steps per second",
        description="Optimizer steps per second of the fastest rank, as a mean over five "
        "minutes; all ranks take the same steps. If it falls, the panels above show which phase "
        "takes longer.",
        queries=(Query(rate_of_ranks(steps.STEPS, operation="max"), "steps/s"),),
        unit=PLAIN,
        minimum=0,
    ),
    TimeSeries(
        title="Samples and tokens per second",
        description="Samples and tokens per second of the chosen ranks together, as a mean over "
        "five minutes, on a logarithmic scale. Tokens appear only if the batches show how many "
        "there are. What ranks share, as with tensor, sequence and pipeline parallelism, is not "
        "shown.",
        queries=(
            Query(rate_of_ranks(steps.SAMPLES, "samples"), "samples/s"),
            Query(rate_of_ranks(steps.TOKENS, "tokens"), "tokens/s"),
        ),
        unit=COUNT,
        log_scale=True,
        empty=SAMPLES_SHARED,
    ),
    TimeSeries(
        title="FLOPs per second",
        description="Floating point operations per second that the model needs, for the chosen "
        "ranks together, as a mean over five minutes. Recomputed activations are not counted.",
        queries=(Query(rate_of_ranks(steps.FLOPS), "FLOP/s"),),
        unit=FLOPS_PER_SECOND,
        minimum=0,
        empty=NOT_KNOWN,
    ),
    TimeSeries(
        title="Model FLOPs utilization",
        description="Floating point operations that the model needs, divided by the peak of the "
        "device. 0.3 to 0.5 is usual for large transformers on GPUs. If it is lower, look for "
        "waiting time in the phases above. Compare it with your own runs rather than with others.",
        queries=(Query(of_run(recorded.MFU), "MFU"),),
        unit=RATIO,
        minimum=0,
        maximum=1,
        empty=NOT_KNOWN,
    ),
)

NUMBERS = (
    TimeSeries(
        title="Loss",
        description="Mean loss over the micro-batches of a step and over ranks. If it is NaN or "
        "Inf, see the alert ZerowatchLossNotFinite.",
        queries=(Query(of_run(recorded.LOSS), "loss"),),
        unit=PLAIN,
        width=8,
    ),
    TimeSeries(
        title="Gradient norm",
        description="Norm of the gradients before clipping, the largest of all ranks. A sudden "
        "rise often precedes a loss that is not finite: lower the learning rate or clip the "
        "gradients.",
        queries=(Query(of_run(recorded.GRADIENT_NORM), "norm"),),
        unit=PLAIN,
        minimum=0,
        width=8,
    ),
    TimeSeries(
        title="Learning rate",
        description="Learning rate of the first parameter group, on rank 0. It should follow your "
        "schedule.",
        queries=(Query(of_first_rank(steps.LEARNING_RATE), "learning rate"),),
        unit=PLAIN,
        minimum=0,
        width=8,
    ),
    fault_count(
        title="Non-finite losses",
        description="Steps with a loss of NaN or Inf since the start, over the chosen ranks. It "
        "should be 0: see the alert ZerowatchLossNotFinite.",
        expression=total(steps.NONFINITE_LOSSES),
        legend="steps",
        width=6,
        height=5,
    ),
    Stat(
        title="Skipped updates",
        description="Share of the steps of the last five minutes whose update was skipped because "
        "gradients overflowed. A few at the start of fp16 training are normal. If it stays high, "
        "lower the learning rate or train in bf16.",
        queries=(Query(of_run(recorded.SKIPPED_RATIO), "skipped"),),
        unit=RATIO,
        thresholds=above(0.05, 0.5),
        width=6,
        height=5,
    ),
    TimeSeries(
        title="Loss scale",
        description="Loss scale of fp16 training. It is halved at each overflow and doubled after "
        "many steps without one. If it keeps falling, gradients overflow at every scale: see the "
        "alert ZerowatchLossScaleCollapse.",
        queries=(Query(of_first_rank(steps.LOSS_SCALE), "scale"),),
        unit=COUNT,
        log_scale=True,
        width=12,
        height=5,
        empty="no loss scale: training is not in fp16",
    ),
)

NOT_PROFILED = "profiling is off, or not served"
PROFILED = sized(
    12,
    6,
    TimeSeries(
        title="The last profiled step",
        description="Shares of the last profiled step on rank 0: computation only, communication "
        "only, both at once and neither, measured by the profiler. More overlap is better. "
        "Profiling is off unless `profile.every_steps` is set.",
        queries=(Query(of_first_rank(comm.STEP_TIME_RATIO), "{{part}}"),),
        unit=RATIO,
        minimum=0,
        maximum=1,
        stacked=True,
        empty=NOT_PROFILED,
    ),
    TimeSeries(
        title="Exposed time: zerowatch against the profiler",
        description="Difference between the exposed communication time of zerowatch and of the "
        "profiler, divided by the time of the profiled step, for the worst of the chosen ranks. "
        "Above 5%, do not rely on small differences in exposed time.",
        queries=(Query(by("max", of_ranks(comm.COMM_EXPOSED_ERROR_RATIO)), "difference"),),
        unit=RATIO,
        minimum=0,
        empty=NOT_PROFILED,
    ),
)

MICRO_BATCHES_AND_SHARES = sized(
    8,
    7,
    TimeSeries(
        title="Micro-batches of a step",
        description="Samples in the largest micro-batch, and number of micro-batches per step. "
        "They change after an out-of-memory error, when memory is free again, and when your script "
        "changes them. The update remains that of the whole batch.",
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
        description="Largest, mean and smallest share of the global batch that a rank trains on. "
        "With `balance`, slow ranks get less. If the lines diverge, the dashboard Communication "
        "shows which rank is slow, and why.",
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
        description="Error of the compressed gradients divided by their norm, for the worst rank. "
        "With 8 bits a few percent are usual, and error feedback compensates for them. If it "
        "grows, or the loss stalls, use bf16 or no compression.",
        queries=(Query(of_run(recorded.COMPRESSION_ERROR), "{{codec}}"),),
        unit=RATIO,
        minimum=0,
        empty=NONE_KNOWN,
    ),
)

PASSES = 'phase=~"forward|backward|optimizer"'
NOT_GENERATING = "the run does not generate, or not served"
GENERATION = (
    TimeSeries(
        title="Generated tokens per second",
        description="New tokens per second, without prompts and padding: of one rank while it "
        "generates, as a mean over ranks, and of the chosen ranks together over all time. If only "
        "the second falls, training takes longer.",
        queries=(
            Query(of_run(recorded.GENERATION_SPEED), "one rank, while generating"),
            Query(rate_of_ranks(generation.GENERATED_TOKENS), "all ranks, over all time"),
        ),
        unit=COUNT,
        minimum=0,
        width=8,
        empty=NOT_GENERATING,
    ),
    TimeSeries(
        title="Length of generated sequences",
        description="New tokens of a sequence, as a mean over ranks. If it rises, generation takes "
        "longer and needs a larger key-value cache.",
        queries=(Query(of_run(recorded.GENERATED_LENGTH), "tokens"),),
        unit=COUNT,
        minimum=0,
        width=8,
        empty=NOT_GENERATING,
    ),
    TimeSeries(
        title="Memory in generation and in training",
        description="Peak bytes in generation and in the passes of training, for the fullest rank. "
        "The larger one decides what fits.",
        queries=(
            Query(of_devices(recorded.PHASE_PEAK, recorded.GENERATING), "generation"),
            Query(of_devices(recorded.PHASE_PEAK, PASSES), "training"),
        ),
        unit=BYTES,
        minimum=0,
        width=8,
        dashboard=uid_of("memory"),
    ),
    TimeSeries(
        title="Generation that waits for communication",
        description="Share of the time of generation in which it could do nothing but wait for "
        "collectives. With ZeRO 3 each token gathers all parameters: gather them once with "
        "`hybrid_engine.pin_parameters`, or train with ZeRO 2.",
        queries=(Query(of_run(recorded.GENERATION_WAIT), "waiting"),),
        unit=RATIO,
        minimum=0,
        maximum=1,
        width=12,
        height=6,
        empty=NOT_GENERATING,
    ),
    TimeSeries(
        title="Gathers of parameters in generation",
        description="All-gathers of one rank in the generation of a step. Below ZeRO 3 there are "
        "none.",
        queries=(Query(of_run(recorded.GATHERS_OF_GENERATION), "gathers"),),
        unit=COUNT,
        minimum=0,
        width=12,
        height=6,
        empty=NONE_KNOWN,
    ),
)

DASHBOARD = Dashboard(
    name="step_anatomy",
    title="Step anatomy",
    description="Where does a step's time go, and on which rank?",
    rows=(
        Row("A step", A_STEP),
        Row("Ranks", RANKS_APART),
        Row("Throughput", THROUGHPUT),
        Row("Loss, gradients and learning rate", NUMBERS),
        Row("Nodes and ranks over time", OVER_TIME, collapsed=True),
        Row("Generation", GENERATION, collapsed=True),
        Row("Micro-batches, shares and compression", MICRO_BATCHES_AND_SHARES, collapsed=True),
        Row("Profiled step", PROFILED, collapsed=True),
    ),
)
