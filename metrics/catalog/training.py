"""Metrics of the run and its steps: phases, throughput, loss, gradients and FLOPs."""

from __future__ import annotations

from .labels import DEVICE, PHASE
from .spec import EVERY_SERIES, Label, counter, gauge, histogram, info, summary

# How monitoring of a rank can end. After the first two, run_active is 0 until the last scrape.
# After the others it remains 1 until the server closes, so that alerts recognize the failure.
END_REASONS = (
    "completed",
    "interrupted",
    "exception",
    "out_of_memory",
    "peer_failed",
    "hang_abort",
)
# Each bound is at most 1.5 times the bound below it, from 10 ms to 2 minutes.
STEP_DURATION_BUCKETS = (
    *(0.01, 0.015, 0.022, 0.033, 0.047, 0.068),
    *(0.1, 0.15, 0.22, 0.33, 0.47, 0.68),
    *(1.0, 1.5, 2.2, 3.3, 4.7, 6.8),
    *(10.0, 15.0, 22.0, 33.0, 47.0, 68.0, 100.0, 120.0),
)

RUN_INFO = info(
    "run_info",
    "Properties of the run, as labels.",
    Label(name="run_id"),
    Label(name="version"),
    Label(name="torch"),
    Label(name="deepspeed"),
    Label(name="backend"),
    Label(name="accelerator"),
    Label(name="zero_stage"),
    Label(name="world_size"),
    lean=EVERY_SERIES,
    usual="One series per rank. Differing labels between ranks mean that the nodes have "
    "different software.",
)
RUN_ACTIVE = gauge(
    "run_active",
    "1 while the rank is training, 0 after an end in good order or by Ctrl-C.",
    lean=EVERY_SERIES,
    usual="1. If it vanishes while it is 1, the rank died.",
)
RUN_END_INFO = info(
    "run_end_info",
    "How monitoring of the rank ended; served until the server closes, which is at once after a "
    "failure.",
    Label(name="reason", values=END_REASONS),
    lean=EVERY_SERIES,
    usual="Absent while training, then `completed`. Look at the log of the rank for any other"
    " reason than `completed` or `interrupted`.",
)
RUN_START_TIMESTAMP = gauge(
    "run_start_timestamp_seconds",
    "Unix time at which the first attempt of the run started.",
    lean=EVERY_SERIES,
    usual="Constant over restarts.",
)
RUN_ATTEMPT = gauge(
    "run_attempt",
    "Number of earlier attempts of the run, such as restarts.",
    lean=EVERY_SERIES,
    usual="0 to a few. A number that grows every few minutes means that each attempt fails.",
)
WORLD_SIZE = gauge(
    "world_size",
    "Number of ranks with which the run was started.",
    lean=EVERY_SERIES,
    usual="The number of ranks that should have the metric run_active. Fewer means that some "
    "rank is not seen.",
)
PRODUCTIVE_SECONDS = counter(
    "productive_seconds_total",
    "Wall time of optimizer steps that count: without skipped updates, discarded attempts, "
    "evaluation and checkpoints.",
    lean=EVERY_SERIES,
    from_zero=True,
    usual="90 to 97 % of the time since the start are reported for large, well-tuned runs "
    "(published figures of others). Below 80 %, look at checkpoints, restarts and "
    "skipped steps.",
)
CHECKPOINTS = counter(
    "checkpoints_total",
    "Checkpoints by outcome.",
    Label(name="outcome", values=("saved", "failed")),
    lean=EVERY_SERIES,
    from_zero=True,
    usual="`saved` grows at the script's interval. Any `failed` deserves a look at the log, "
    "as the next crash then costs more.",
)
CHECKPOINT_SECONDS = counter(
    "checkpoint_seconds_total",
    "Seconds in which training stopped to save checkpoints.",
    lean=EVERY_SERIES,
    from_zero=True,
    usual="A rate below 0.05: at most 5 % of the time (a rule of thumb). Above it, save less "
    "often, or in the background.",
)
CHECKPOINT_BACKGROUND_SECONDS = counter(
    "checkpoint_background_seconds_total",
    "Seconds in which a TrainingRun wrote checkpoints while training went on.",
    from_zero=True,
    usual="Less than the time between two saves: a save waits until the one before it is written. "
    "0 if `checkpoint.background` is off.",
)
LAST_CHECKPOINT_TIMESTAMP = gauge(
    "last_checkpoint_timestamp_seconds",
    "Unix time at which the last checkpoint was saved; of one that was written in the background, "
    "the time of its state.",
    lean=EVERY_SERIES,
    usual="At most twice the usual interval ago. Absent until the first checkpoint of this "
    "process.",
)
LAST_CHECKPOINT_BYTES = gauge(
    "last_checkpoint_bytes",
    "Size of the files of the last checkpoint of a TrainingRun; rank 0.",
    lean=EVERY_SERIES,
    usual="About 14 bytes per parameter with Adam and 16-bit weights. A smaller value than "
    "before means that a part is missing.",
)
ALERT_THRESHOLD = gauge(
    "alert_threshold",
    "A threshold of the alerts that the settings of this run replace, in the unit of the alert; "
    "on rank 0 only.",
    Label(name="name"),
    lean=EVERY_SERIES,
    usual="Absent if the run uses the defaults.",
)
STEPS = counter(
    "steps_total",
    "Optimizer steps, skipped ones included.",
    lean=EVERY_SERIES,
    from_zero=True,
    usual="The same on all ranks, within a few steps. Worry if it stands still for ten usual "
    "steps.",
)
LAST_STEP = gauge(
    "last_step",
    "Number of the last step, as the engine counts it: it continues after a restart from a "
    "checkpoint.",
    lean=EVERY_SERIES,
    usual="The same on all ranks, within a few steps.",
)
SHARED_WORK = gauge(
    "shared_work",
    "1 if several ranks train on the same samples or tokens, as with tensor, sequence and pipeline "
    "parallelism: a sum over ranks is then too large. Absent otherwise.",
    Label(name="of", values=("samples", "tokens")),
    lean=EVERY_SERIES,
    usual="Constant after the first steps.",
)
SAMPLES = counter(
    "samples_total",
    "Samples that this rank has trained on.",
    lean=EVERY_SERIES,
    usual="A steady rate. Differs between ranks only if the batch is divided unevenly.",
)
TOKENS = counter(
    "tokens_total",
    "Tokens that this rank has trained on, if the batch shows them.",
    lean=EVERY_SERIES,
    usual="A steady rate; it varies with the lengths of the samples.",
)
SKIPPED_STEPS = counter(
    "skipped_steps_total",
    "Steps whose update was skipped because of a gradient overflow.",
    lean=EVERY_SERIES,
    from_zero=True,
    usual="With fp16, up to one step in a thousand, and some in the first hundred; else 0. "
    "Worry if most steps of some minutes are skipped.",
)
NONFINITE_LOSSES = counter(
    "nonfinite_losses_total",
    "Steps whose loss was not a finite number.",
    lean=EVERY_SERIES,
    from_zero=True,
    usual="0. Any increase: stop, and find the batch or the learning rate.",
)
STEP_DURATION = histogram(
    "step_duration_seconds",
    "Wall time of one optimizer step, without evaluation and checkpoints. Generation before the "
    "step is part of it.",
    STEP_DURATION_BUCKETS,
    lean=EVERY_SERIES,
    usual="Depends on the job. Compare with the run's own hour before.",
)
STEP_DURATION_QUANTILE = summary(
    "step_duration_quantile_seconds",
    "Exact quantiles of this rank's step durations over the last minute, or over the last 20 steps "
    "if those took longer.",
    Label(name="quantile", values=("0.5", "0.9", "0.99")),
    lean=EVERY_SERIES,
    usual="The quantile 0.99 is at most 1.5 times the median in a steady run (a rule of "
    "thumb). More means that single steps stall: data loading, other jobs on the host, "
    "garbage collection.",
)
PHASE_SECONDS = counter(
    "phase_seconds_total",
    "Seconds by phase, of the training thread on cpu and of the compute stream on a GPU (of the "
    "training thread if the stream's times could not be read: see phases_are_host_times in the run "
    "log); phases do not overlap and add up to wall time.",
    PHASE,
    lean=EVERY_SERIES,
    from_zero=True,
    usual="Backward takes about twice as long as forward. Worry if data or optimizer take "
    "more than a tenth.",
)
LOSS = gauge(
    "loss",
    "Mean loss of the step's micro-batches on this rank.",
    lean=EVERY_SERIES,
    usual="Falls slowly, with noise. Worry about a jump to a multiple of the last hour's "
    "median that stays.",
)
GRADIENT_NORM = gauge(
    "gradient_norm",
    "Global 2-norm of the gradients before clipping.",
    lean=EVERY_SERIES,
    usual="0.1 to 10 for most language models, higher at the start. Worry about ten times the"
    " usual value.",
)
LEARNING_RATE = gauge(
    "learning_rate",
    "Learning rate of the first parameter group, for the next step.",
    usual="As the scheduler says.",
)
LOSS_SCALE = gauge(
    "loss_scale",
    "Loss scale of mixed-precision training.",
    lean=EVERY_SERIES,
    usual="2^10 to 2^20 with fp16; it halves at an overflow. Worry if it falls to 1: "
    "gradients overflow at any scale.",
)
LAST_STEP_TIMESTAMP = gauge(
    "last_step_timestamp_seconds",
    "Unix time at which the last step ended.",
    lean=EVERY_SERIES,
    usual="At most two step durations ago.",
)
LAST_ACTIVITY_TIMESTAMP = gauge(
    "last_activity_timestamp_seconds",
    "Unix time of the last progress in training.",
    lean=EVERY_SERIES,
    usual="Seconds ago. Worry after a minute, if no long computation or checkpoint runs.",
)
FLOPS = counter(
    "flops_total",
    "Floating point operations that the model needs, on this rank.",
    usual="A steady rate.",
)
MFU = gauge(
    "mfu_ratio",
    "Model FLOPs utilization: FLOP/s of the model over the device's peak, without generation. On "
    "GPUs this is the peak in bf16, whichever type the run uses.",
    lean=EVERY_SERIES,
    usual="0.3 to 0.55 for dense transformers on H100 or A100 (published figures of others); "
    "lower for small models and long waits. Worry about a fall to less than 0.8 of the "
    "run's own hours.",
)
PEAK_FLOPS = gauge(
    "device_peak_flops_per_second",
    "Peak FLOP/s of the device: dense bf16 from a table of GPUs, fp32 measured on a CPU.",
    DEVICE,
    usual="Constant. 989e12 for H100 SXM with 16-bit types, without sparsity.",
)

METRICS = (
    RUN_INFO,
    RUN_ACTIVE,
    RUN_END_INFO,
    RUN_START_TIMESTAMP,
    RUN_ATTEMPT,
    WORLD_SIZE,
    PRODUCTIVE_SECONDS,
    CHECKPOINTS,
    CHECKPOINT_SECONDS,
    CHECKPOINT_BACKGROUND_SECONDS,
    LAST_CHECKPOINT_TIMESTAMP,
    LAST_CHECKPOINT_BYTES,
    ALERT_THRESHOLD,
    STEPS,
    LAST_STEP,
    SHARED_WORK,
    SAMPLES,
    TOKENS,
    SKIPPED_STEPS,
    NONFINITE_LOSSES,
    STEP_DURATION,
    STEP_DURATION_QUANTILE,
    PHASE_SECONDS,
    LOSS,
    GRADIENT_NORM,
    LEARNING_RATE,
    LOSS_SCALE,
    LAST_STEP_TIMESTAMP,
    LAST_ACTIVITY_TIMESTAMP,
    FLOPS,
    MFU,
    PEAK_FLOPS,
)
