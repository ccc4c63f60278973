"""Metrics of the tuner: state, knobs, gains, symptoms and decisions; on rank 0 only."""

from __future__ import annotations

from .labels import KNOB
from .spec import EVERY_SERIES, Label, counter, gauge

TUNER_STATES = (
    "warmup",
    "observe",
    "propose",
    "preflight",
    "applied",
    "trial",
    "accept",
    "rollback",
    "cooldown",
    "safe_mode",
    "frozen",
)
# What can limit a job. The first four are the causes of exposed communication.
SYMPTOMS = (
    "comm_bandwidth",
    "comm_redundancy",
    "comm_latency",
    "comm_imbalance",
    "device_idle",
    "host_bound",
    "data_bound",
    "memory_pressure",
    "memory_idle",
    "straggler",
)

TUNER_STATE = gauge(
    "tuner_state",
    "1 for the current state of the tuner, 0 for the others.",
    Label(name="state", values=TUNER_STATES),
    lean=EVERY_SERIES,
    usual="Mostly `observe` and `cooldown`. `safe_mode` means that a change could not be "
    "undone: see the log.",
)
TUNER_KNOB_VALUE = gauge(
    "tuner_knob_value",
    "Current value of a knob.",
    KNOB,
    lean=EVERY_SERIES,
    usual="Changes only after a decision in the log.",
)
TUNER_GAIN = gauge(
    "tuner_gain_ratio",
    "Measured gain of the last change of a knob.",
    KNOB,
    lean=EVERY_SERIES,
    usual="0.01 to 0.3 for accepted changes.",
)
TUNER_GAIN_LOWER_BOUND = gauge(
    "tuner_gain_lower_bound_ratio",
    "Lower confidence bound of the gain of the last change of a knob.",
    KNOB,
    lean=EVERY_SERIES,
    usual="Above 0 for accepted changes.",
)
TUNER_SYMPTOM = gauge(
    "tuner_symptom_ratio",
    "Strength of each symptom, in the unit of its threshold.",
    Label(name="symptom", values=SYMPTOMS),
    lean=EVERY_SERIES,
    usual="Below the threshold of each symptom, except for the one that limits the job.",
)
TUNER_DECISIONS = counter(
    "tuner_decisions_total",
    "Decisions by verdict; not_undone: training continues with a change that was to be undone.",
    Label(
        name="verdict",
        values=("accepted", "rolled_back", "rejected", "interrupted", "not_undone", "advised"),
    ),
    lean=EVERY_SERIES,
    from_zero=True,
    usual="Some per hour at first, then none. Any `not_undone` deserves a look at the log.",
)
TUNER_EXPLORATION_SECONDS = counter(
    "tuner_exploration_seconds_total",
    "Seconds lost to trials and changes, compared with the configuration before.",
    lean=EVERY_SERIES,
    from_zero=True,
    usual="A rate below tuner.exploration_ratio.",
)
TUNER_DISCARDED_OBSERVATIONS = counter(
    "tuner_discarded_observations_total",
    "Observations that ended without a diagnosis, because step times changed.",
    lean=EVERY_SERIES,
    from_zero=True,
    usual="0, or few. Each begins again: a job whose step times change within each interval is not "
    "diagnosed.",
)

METRICS = (
    TUNER_STATE,
    TUNER_KNOB_VALUE,
    TUNER_GAIN,
    TUNER_GAIN_LOWER_BOUND,
    TUNER_SYMPTOM,
    TUNER_DECISIONS,
    TUNER_EXPLORATION_SECONDS,
    TUNER_DISCARDED_OBSERVATIONS,
)
