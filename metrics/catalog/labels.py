"""Defines the labels that several metrics share, and the values that each label may have."""

from __future__ import annotations

from .spec import Label

OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "reduce",
    "broadcast",
    "all_to_all",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
)
# The name of the group of zerowatch's own collectives: votes and exchanges of a TrainingRun.
OWN_GROUP = "zerowatch"
GROUPS = ("dp", "tp", "pp", "ep", "sp", "world", "other", OWN_GROUP)
# What the ranks of a group train on together, by the role of the group: the slices of a model and
# of a sequence share both. Only the first stage of a pipeline records tokens.
WORK_SHARED_BY = {"tp": ("samples", "tokens"), "sp": ("samples", "tokens"), "pp": ("samples",)}
PHASES = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "eval",
    "generate",
    "checkpoint",
    "other",
)
# Their time is no training time: ratios leave it out.
NON_TRAINING_PHASES = ("eval", "checkpoint")

OP = Label(name="op", values=OPS)
GROUP = Label(name="group", values=GROUPS)
PHASE = Label(name="phase", values=PHASES)
# The phases in which ranks are compared to find stragglers. Not evaluation, generation and
# checkpoints: these take time in few steps, and often on some ranks only.
COMPARED_PHASES = ("data", "forward", "backward", "optimizer", "other")
DEVICE = Label(name="device")
CAUSE = Label(name="cause", values=("latency", "bandwidth", "imbalance", "redundancy"))
KNOB = Label(name="knob")
