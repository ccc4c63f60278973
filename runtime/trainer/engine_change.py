"""Defines the kinds of changes that a run makes to its engine."""

from __future__ import annotations

from enum import Enum


class EngineChange(Enum):
    """Kind of a change, on the live engine or by a rebuild; the value is its name in log lines.

    `EngineHolder` keeps at most one attachment for each kind. The kinds that are listed in
    `oom_recovery.escalation.ESCALATION_ORDER` are memory savings.
    """

    ACTIVATION_CHECKPOINTING = "activation checkpointing on"
    MINIMAL_BUCKETS = "smaller buckets and less prefetching"
    OPTIMIZER_STATE_OFFLOAD = "optimizer states offloaded to the host"
    REBUILD = "engine rebuilt with a higher ZeRO stage or offloading"
    GRADIENT_COMPRESSION = "gradient compression"
    LEARNING_RATE = "learning rate scaled with the batch size"
