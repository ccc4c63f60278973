"""Thresholds from which a measurement is a problem; used by advice, dashboards and alerts.

They are rules of thumb: where to start looking. The first two are from practical guides to
DeepSpeed's hybrid engine, which tune a job until it meets them.
"""

COMM_RATIO_HIGH = 0.20  # exposed communication in training time; above it, tune communication first
DEVICE_UTILIZATION_LOW = 0.70  # a device's busy share; below it, it waits for something else

LINK_BANDWIDTH_LOW = 0.50  # of the best bandwidth this link sustained; estimates vary by 10 to 20 %
COMM_COVERAGE_LOW = 0.99  # of collectives recorded; below it, communication times are incomplete
STRAGGLER_SCORE_HIGH = 0.05  # of a step that a rank is slower than the median rank
IMBALANCE_RATIO_HIGH = (
    0.10  # of a step spent waiting for later ranks; random variation alone costs some
)

DATA_RATIO_HIGH = 0.10  # data loading in a step's time; a loader that prefetches needs almost none

HOST_RATIO_HIGH = 0.10  # of a step that is neither device, communication nor data time

MEMORY_HEADROOM_LOW = 0.08  # of the limit that the next peak leaves free
MEMORY_HEADROOM_IDLE = 0.50  # above it, memory could be used for speed

OOM_RISK_HIGH = 0.50  # of running out within 50 steps: more likely than not
OOM_RISK_CRITICAL = 0.80  # the forecast alone is at most 0.87

REPLAY_RATIO_HIGH = 0.05  # of training time lost to replayed windows
RESTARTS_HIGH = 3  # within half an hour; more than by chance

# Below 16, fp16 gradients of the usual sizes underflow. A scale that was always so low, or for an
# hour, is not a collapse: it must have been halved four times.
LOSS_SCALE_LOW = 16.0
LOSS_SCALE_FALL = 1 / 16

WATCH_RATIO_HIGH = (
    0.02  # monitoring in a run's time; the goal is 0.004, tiny steps on CPU take 0.015
)

STEPS_TO_JUDGE = 10  # fewer in the long window are a warm-up, whose shares mean little
