"""Defines the values from which a measurement is a problem.

Advice, dashboards and alerts use these values. They are rules of thumb of this project for where
to start looking, without a published source.
"""

# Share of training time that is exposed communication; above it, tune communication first. It is
# the limit of the alert ZerowatchCommBottleneck, of dashboards and of the demo, and the default of
# the setting tuner.max_exposed_comm_ratio.
EXPOSED_COMM_RATIO_HIGH = 0.20
# Share of time in which a device is busy; below it, the device waits for something else.
DEVICE_UTILIZATION_LOW = 0.70

# Bandwidth of a link over the best that it sustained; estimates vary by 10 to 20 %.
LINK_BANDWIDTH_LOW = 0.50
# Recorded collectives over all; below it, communication times are incomplete.
COMM_COVERAGE_LOW = 0.99
# Time by which a rank is slower than the median rank, as a share of a step.
STRAGGLER_SCORE_HIGH = 0.05
# Share of a step spent waiting for later ranks; random variation alone causes some.
IMBALANCE_RATIO_HIGH = 0.10

# Share of a step spent loading data; a loader that prefetches needs almost none.
DATA_RATIO_HIGH = 0.10

# Share of a step that is neither device, communication nor data time.
HOST_RATIO_HIGH = 0.10

# Share of the memory limit that the next peak leaves free.
MEMORY_HEADROOM_LOW = 0.08
MEMORY_HEADROOM_IDLE = 0.50  # above it, more memory could be used for speed

# Probability of an out-of-memory error within 50 steps.
OOM_RISK_HIGH = 0.50  # an error is more likely than not
OOM_RISK_CRITICAL = 0.80  # the forecast alone is at most 0.87

# Share of training time lost to replayed windows.
REPLAY_RATIO_HIGH = 0.05
# Restarts within half an hour.
RESTARTS_HIGH = 3

# A collapse of the loss scale needs both. Below 16, fp16 gradients of the usual sizes underflow.
# The fall is relative to the highest scale of the last hour, so the scale was halved four times.
LOSS_SCALE_LOW = 16.0
LOSS_SCALE_FALL = 1 / 16

# Share of the time of a run that monitoring takes. The goal is 0.004; tiny steps on CPU take 0.015.
WATCH_RATIO_HIGH = 0.02

STEPS_TO_JUDGE = 10  # in half an hour; with fewer the run is warming up, and shares mean little
