"""What to give up, step by step, when not even a micro-batch of one sample fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# In this order: each costs more speed than the one before.
STEPS = (
    "activation checkpointing on",
    "smaller buckets and less prefetching",
    "optimizer states asleep on the host",
    "engine rebuilt with a higher ZeRO stage or offloading",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Escalation:
    """A way to need less memory.

    Attributes:
        name: One of `STEPS`.
        apply: Does it on this rank, with all ranks calling it alike; returns whether it changed
            anything. It must not raise: what cannot be done here is False.
    """

    name: str
    apply: Callable[[], bool]


class Ladder:
    """Escalations in the order of `STEPS`, each taken once in a run.

    Attributes:
        taken: Names of those that changed something, in order.
    """

    def __init__(self, escalations: Sequence[Escalation] = ()) -> None:
        self._left = sorted(escalations, key=lambda each: STEPS.index(each.name))
        self.taken: list[str] = []

    def climb(self, highest: Callable[[int], int]) -> str | None:
        """Take the next step that changes anything on any rank; None when there is none left.

        Args:
            highest: Returns the highest value of any rank.
        """
        while self._left:
            step = self._left.pop(0)
            if highest(int(step.apply())):
                self.taken.append(step.name)
                return step.name
        return None
