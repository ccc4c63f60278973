"""The auto-tuner: its state, what it changed and what that gained. On rank 0 only."""

from __future__ import annotations

from .labels import KNOB
from .spec import Label, counter, gauge

TUNER_STATES = (
    "warmup",
    "observe",
    "propose",
    "preflight",
    "probation",
    "ab",
    "accept",
    "rollback",
    "soak",
    "safe_mode",
    "frozen",
)

TUNER_STATE = gauge(
    "tuner_state",
    "1 for the state the tuner is in, 0 for the others.",
    Label(name="state", values=TUNER_STATES),
)
TUNER_KNOB_VALUE = gauge("tuner_knob_value", "Value of a knob now.", KNOB)
TUNER_GAIN = gauge("tuner_gain_ratio", "Measured gain of the last change of a knob.", KNOB)
TUNER_DECISIONS = counter(
    "tuner_decisions_total",
    "Decisions by verdict.",
    Label(name="verdict", values=("accepted", "rolled_back", "rejected", "advised")),
)
TUNER_EXPLORATION_SECONDS = counter(
    "tuner_exploration_seconds_total", "Training seconds spent on trials."
)

METRICS = (TUNER_STATE, TUNER_KNOB_VALUE, TUNER_GAIN, TUNER_DECISIONS, TUNER_EXPLORATION_SECONDS)
