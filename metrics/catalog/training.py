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
)
RUN_ACTIVE = gauge(
    "run_active",
    "1 while the rank is training, 0 after an end in good order or by Ctrl-C.",
    lean=EVERY_SERIES,
)
RUN_END_INFO = info(
    "run_end_info",
    "How monitoring of the rank ended; served until the server closes, which is at once after a "
    "failure.",
    Label(name="reason", values=END_REASONS),
    lean=EVERY_SERIES,
)
RUN_START_TIMESTAMP = gauge(
    "run_start_timestamp_seconds",
    "Unix time at which the first attempt of the run started.",
    lean=EVERY_SERIES,
)
RUN_ATTEMPT = gauge(
    "run_attempt",
    "Number of earlier attempts of the run, such as restarts.",
    lean=EVERY_SERIES,
)
WORLD_SIZE = gauge(
    "world_size",
    "Number of ranks with which the run was started.",
    lean=EVERY_SERIES,
)
PRODUCTIVE_SECONDS = counter(
    "productive_seconds_total",
    "Wall time of optimizer steps that count: without skipped updates, discarded attempts, "
    "evaluation and checkpoints.",
    lean=EVERY_SERIES,
    from_zero=True,
)
CHECKPOINTS = counter(
    "checkpoints_total",
    "Checkpoints by outcome.",
    Label(name="outcome", values=("saved", "failed")),
    lean=EVERY_SERIES,
    from_zero=True,
)
CHECKPOINT_SECONDS = counter(
    "checkpoint_seconds_total",
    "Seconds in which training stopped to save checkpoints.",
    lean=EVERY_SERIES,
    from_zero=True,
)
LAST_CHECKPOINT_TIMESTAMP = gauge(
    "last_checkpoint_timestamp_seconds",
    "Unix time at which the last checkpoint was saved.",
    lean=EVERY_SERIES,
)
LAST_CHECKPOINT_BYTES = gauge(
    "last_checkpoint_bytes",
    "Size of the files of the last checkpoint of a TrainingRun; rank 0.",
    lean=EVERY_SERIES,
)
ALERT_THRESHOLD = gauge(
    "alert_threshold",
    "A threshold of the alerts that the settings of this run replace, in the unit of the alert; "
    "on rank 0 only.",
    Label(name="name"),
    lean=EVERY_SERIES,
)
STEPS = counter(
    "steps_total",
    "Optimizer steps, skipped ones included.",
    lean=EVERY_SERIES,
    from_zero=True,
)
SAMPLES = counter(
    "samples_total",
    "Samples that this rank has trained on.",
    lean=EVERY_SERIES,
)
TOKENS = counter(
    "tokens_total",
    "Tokens that this rank has trained on, if the batch shows them.",
    lean=EVERY_SERIES,
)
SKIPPED_STEPS = counter(
    "skipped_steps_total",
    "Steps whose update was skipped because of a gradient overflow.",
    lean=EVERY_SERIES,
    from_zero=True,
)
NONFINITE_LOSSES = counter(
    "nonfinite_losses_total",
    "Steps whose loss was not a finite number.",
    lean=EVERY_SERIES,
    from_zero=True,
)
STEP_DURATION = histogram(
    "step_duration_seconds",
    "Wall time of one optimizer step, without evaluation and checkpoints.",
    STEP_DURATION_BUCKETS,
    lean=EVERY_SERIES,
)
STEP_DURATION_QUANTILE = summary(
    "step_duration_quantile_seconds",
    "Exact quantiles of this rank's step durations over the last minute, or over the last 20 steps "
    "if those took longer.",
    Label(name="quantile", values=("0.5", "0.9", "0.99")),
    lean=EVERY_SERIES,
)
PHASE_SECONDS = counter(
    "phase_seconds_total",
    "Training-thread seconds by phase; phases do not overlap and add up to wall time.",
    PHASE,
    lean=EVERY_SERIES,
    from_zero=True,
)
LOSS = gauge(
    "loss",
    "Mean loss of the step's micro-batches on this rank.",
    lean=EVERY_SERIES,
)
GRADIENT_NORM = gauge(
    "gradient_norm",
    "Global 2-norm of the gradients before clipping.",
    lean=EVERY_SERIES,
)
LEARNING_RATE = gauge(
    "learning_rate", "Learning rate of the first parameter group, for the next step."
)
LOSS_SCALE = gauge(
    "loss_scale",
    "Loss scale of mixed-precision training.",
    lean=EVERY_SERIES,
)
LAST_STEP_TIMESTAMP = gauge(
    "last_step_timestamp_seconds",
    "Unix time at which the last step ended.",
    lean=EVERY_SERIES,
)
LAST_ACTIVITY_TIMESTAMP = gauge(
    "last_activity_timestamp_seconds",
    "Unix time of the last progress in training.",
    lean=EVERY_SERIES,
)
FLOPS = counter("flops_total", "Floating point operations that the model needs, on this rank.")
MFU = gauge(
    "mfu_ratio",
    "Model FLOPs utilization: FLOP/s of the model over the device's peak.",
    lean=EVERY_SERIES,
)
PEAK_FLOPS = gauge(
    "device_peak_flops_per_second",
    "Peak FLOP/s of the device, from a table or measured.",
    DEVICE,
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
    LAST_CHECKPOINT_TIMESTAMP,
    LAST_CHECKPOINT_BYTES,
    ALERT_THRESHOLD,
    STEPS,
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
