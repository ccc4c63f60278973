"""What was learned of memory under each configuration, so that going back forgets nothing. Pure."""

from __future__ import annotations

from collections.abc import Callable

from ...trainer.oom_recovery.sizing import GuardSchedule, MicroBatchLimits, MicroBatchPlanner
from ..policy.types import Configuration, Undo

# These change nothing about what fits; sizes of micro-batches are what a plan is about.
_MEMORY_NEUTRAL = frozenset({"micro_batch_samples", "python_gc", "timers.throughput.synchronized"})
MAX_KNOWN = 64

Key = tuple[tuple[str, object], ...]


class PlanCache:
    """Keeps a plan by configuration, the same on all ranks.

    A trial goes to and fro. If each change made the plan forget, the guard would be armed in every
    block, and be measured along.

    Args:
        plans: Returns that of the run.
    """

    def __init__(self, plans: Callable[[], MicroBatchPlanner]) -> None:
        self._plans = plans
        self._known: dict[Key, tuple[MicroBatchLimits, GuardSchedule]] = {}

    def move(self, before: Configuration, now: Configuration) -> Undo:
        """Go from what is known of one configuration to what is of another."""
        planner = self._plans()
        held = planner.limits, planner.guard_schedule
        left, entered = _key(before), _key(now)
        if left != entered:
            self._known.pop(left, None)  # the one left last is forgotten last
            self._known[left] = held
            if entered in self._known:
                planner.limits, planner.guard_schedule = self._known[entered]
            else:
                planner.invalidate()
            for key in list(self._known)[:-MAX_KNOWN]:
                del self._known[key]

        def undo() -> None:
            planner.limits, planner.guard_schedule = held

        return undo


def _key(configuration: Configuration) -> Key:
    return tuple(sorted(item for item in configuration.items() if item[0] not in _MEMORY_NEUTRAL))
