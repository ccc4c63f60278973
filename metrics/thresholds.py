"""From which value on a measurement is a problem. Advice, dashboards and alerts read it here.

Rules of thumb, not laws: where to start looking. The first two are from practical guides to
DeepSpeed's hybrid engine, which tune a job until it meets them.
"""

COMM_RATIO_HIGH = 0.20  # communication in a step's time; above it, tune communication first
DEVICE_UTILIZATION_LOW = 0.70  # a device's busy share; below it, it waits for something else

LINK_BANDWIDTH_LOW = 0.50  # of the best this link kept up; estimates vary by a tenth or two
COMM_COVERAGE_LOW = 0.99  # of collectives recorded; below it, times of communication miss some
STRAGGLER_SCORE_HIGH = 0.05  # of a step that a rank is slower than the median rank
IMBALANCE_RATIO_HIGH = 0.10  # of a step spent waiting for later ranks; chance alone costs some

DATA_RATIO_HIGH = (
    0.10  # loading data in a step's time; a loader that keeps ahead needs next to none
)

HOST_RATIO_HIGH = 0.10  # of a step that neither device, nor link, nor data account for

MEMORY_HEADROOM_LOW = 0.08  # of the limit that the next peak leaves free
MEMORY_HEADROOM_IDLE = 0.50  # above it, memory could buy speed

OOM_RISK_HIGH = 0.50  # of running out within 50 steps: more likely than not
OOM_RISK_CRITICAL = 0.80  # the forecast alone never says more than 0.87: that much it is trusted

REPLAY_RATIO_HIGH = 0.05  # of training time lost to windows that had to be done again
RESTARTS_HIGH = 3  # within half an hour; more than chance takes ranks away

# Below 16, fp16 gradients of the usual sizes vanish. A scale that always was so low, or that has
# been there for an hour, is no collapse: it must have lost four halvings.
LOSS_SCALE_LOW = 16.0
LOSS_SCALE_FALL = 1 / 16

WATCH_RATIO_HIGH = 0.02  # watching in a run's time; the goal is 0.004, tiny steps on CPU take 0.015

STEPS_TO_JUDGE = 10  # fewer in the long window are a warm-up, and shares of it mean little
