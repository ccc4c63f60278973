"""Defines the values from which a measurement counts as a problem.

Advice, dashboards and alerts use these values. The values are rules of thumb of this project, and
show where to start looking. They have no published source.
"""

# Share of training time that is exposed communication. Above this value, tune communication first.
# The alert ZerowatchCommBottleneck, dashboards and the demo use the value as their limit. The value
# is also the default of the setting tuner.max_exposed_comm_ratio.
EXPOSED_COMM_RATIO_HIGH = 0.20
# Share of time in which a device is busy. Below this value, the device waits for something else.
DEVICE_UTILIZATION_LOW = 0.70

# Bandwidth of a link, divided by the best bandwidth that the link has sustained. Estimates of the
# bandwidth vary by 10 to 20 %.
LINK_BANDWIDTH_LOW = 0.50
# Recorded collectives divided by all collectives. Below this value, communication times are
# incomplete.
COMM_COVERAGE_LOW = 0.99
# Time by which a rank is slower than the median rank, as a share of a step.
STRAGGLER_SCORE_HIGH = 0.05
# Share of a step spent waiting for later ranks. Random variation alone causes some waiting.
IMBALANCE_RATIO_HIGH = 0.10

# Share of a step spent loading data. A loader that prefetches takes almost no time.
DATA_RATIO_HIGH = 0.10

# Share of a step that is not device, communication or data time.
HOST_RATIO_HIGH = 0.10

# Share of the memory limit that remains free at the next peak.
MEMORY_HEADROOM_LOW = 0.08
MEMORY_HEADROOM_IDLE = 0.50  # above this value, the job could use more memory to run faster

# Probability of an out-of-memory error within 50 steps.
OOM_RISK_HIGH = 0.50  # above this value, an error is more likely than not
OOM_RISK_CRITICAL = 0.80  # the forecast alone is at most 0.87

# Share of training time lost to replayed windows.
REPLAY_RATIO_HIGH = 0.05
# Restarts within half an hour.
RESTARTS_HIGH = 3

# The loss scale has collapsed if it is below both limits. Below 16, fp16 gradients of the usual
# sizes underflow. LOSS_SCALE_FALL is relative to the highest scale of the last hour. At 1/16 the
# scale was halved four times.
LOSS_SCALE_LOW = 16.0
LOSS_SCALE_FALL = 1 / 16

# Share of the time of a run that monitoring takes. The goal is 0.004. A run of tiny steps on CPU
# reaches 0.015.
WATCH_RATIO_HIGH = 0.02

STEPS_TO_JUDGE = 10  # in half an hour; a run with fewer steps is warming up
