"""Changes that reduce memory use when not even a micro-batch of one sample fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Protocol


class EngineChange(Enum):
    """A change to a running engine; the value is its name in log lines."""

    ACTIVATION_CHECKPOINTING = "activation checkpointing on"
    MINIMAL_BUCKETS = "smaller buckets and less prefetching"
    OPTIMIZER_STATE_OFFLOAD = "optimizer states offloaded to the host"
    REBUILD = "engine rebuilt with a higher ZeRO stage or offloading"
    GRADIENT_COMPRESSION = "gradient compression"
    LEARNING_RATE = "learning rate scaled with the batch size"


# Cheapest first: each costs more speed than the one before.
ESCALATION_ORDER = (
    EngineChange.ACTIVATION_CHECKPOINTING,
    EngineChange.MINIMAL_BUCKETS,
    EngineChange.OPTIMIZER_STATE_OFFLOAD,
    EngineChange.REBUILD,
)


class Escalation(Protocol):
    """A change that may reduce memory use."""

    @property
    def change(self) -> EngineChange:
        """One of `ESCALATION_ORDER`."""

    def apply(self) -> bool:
        """Make the change on this rank, with all ranks alike; return whether anything changed.

        Does not raise: what is not possible here is False.
        """


class EscalationPolicy:
    """Escalations in `ESCALATION_ORDER`, each applied once in a run.

    Attributes:
        applied: The changes that had an effect, in order.
    """

    def __init__(self, escalations: Iterable[Escalation] = ()) -> None:
        self._pending = sorted(escalations, key=lambda each: ESCALATION_ORDER.index(each.change))
        self.applied: list[EngineChange] = []

    def apply_next(self, all_max: Callable[[int], int]) -> EngineChange | None:
        """Apply the next escalation that changes anything on any rank; None if none is left.

        Args:
            all_max: Returns the maximum of a value over all ranks.
        """
        while self._pending:
            escalation = self._pending.pop(0)
            if all_max(int(escalation.apply())):
                self.applied.append(escalation.change)
                return escalation.change
        return None
