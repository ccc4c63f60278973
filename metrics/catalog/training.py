"""Metrics of the run and its steps: phases, throughput, loss, gradients and FLOPs."""

from __future__ import annotations

from .labels import DEVICE, PHASE
from .spec import Label, counter, gauge, histogram, info

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
)
RUN_ACTIVE = gauge("run_active", "1 while the rank is training, 0 after monitoring was closed.")
STEPS = counter("steps_total", "Optimizer steps, skipped ones included.")
SAMPLES = counter("samples_total", "Samples that this rank has trained on.")
TOKENS = counter("tokens_total", "Tokens that this rank has trained on, if the batch shows them.")
SKIPPED_STEPS = counter(
    "skipped_steps_total", "Steps whose update was skipped because of a gradient overflow."
)
NONFINITE_LOSSES = counter("nonfinite_losses_total", "Steps whose loss was not a finite number.")
STEP_SECONDS = histogram(
    "step_seconds",
    "Wall time of one optimizer step, without evaluation and checkpoints.",
    (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0),
)
PHASE_SECONDS = counter(
    "phase_seconds_total",
    "Training-thread seconds by phase; phases do not overlap and add up to wall time.",
    PHASE,
)
LOSS = gauge("loss", "Mean loss of the step's micro-batches on this rank.")
GRADIENT_NORM = gauge("gradient_norm", "Global 2-norm of the gradients before clipping.")
LEARNING_RATE = gauge(
    "learning_rate", "Learning rate of the first parameter group, for the next step."
)
LOSS_SCALE = gauge("loss_scale", "Loss scale of mixed-precision training.")
LAST_STEP_TIMESTAMP = gauge(
    "last_step_timestamp_seconds", "Unix time at which the last step ended."
)
LAST_ACTIVITY_TIMESTAMP = gauge(
    "last_activity_timestamp_seconds", "Unix time of the last progress in training."
)
FLOPS = counter("flops_total", "Floating point operations that the model needs, on this rank.")
MFU = gauge("mfu_ratio", "Model FLOPs utilization: FLOP/s of the model over the device's peak.")
PEAK_FLOPS = gauge(
    "device_peak_flops_per_second",
    "Peak FLOP/s of the device, from a table or measured.",
    DEVICE,
)

METRICS = (
    RUN_INFO,
    RUN_ACTIVE,
    STEPS,
    SAMPLES,
    TOKENS,
    SKIPPED_STEPS,
    NONFINITE_LOSSES,
    STEP_SECONDS,
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
