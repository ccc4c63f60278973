"""Decides what a run changes after an out-of-memory error, in `EscalationPolicy.escalate`.

Micro-batches become smaller first. If not even one sample fits, memory savings are applied one
after the other, in `ESCALATION_ORDER`.

`memory.oom.predicted_savings` is another list, for the report of an out-of-memory error. That list
advises the user: it names changes that need a restart (allocator settings, shorter samples, offload
to NVMe), with the predicted bytes of each. `ESCALATION_ORDER` holds only changes that a run can
apply by itself, in order of cost, and that leave the result unchanged. A memory saving that is
added to one list may belong in the other list too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from ...common.ds_config import zero_stage
from ..engine_change import EngineChange
from ..window.window_agreement import LocalBatches
from .micro_batch_planner import MicroBatchPlanner

# Memory savings, cheapest first: each saving reduces throughput more than the one before it. The
# last saving stands for several rebuilds, in the order of `rebuild_changes`.
ESCALATION_ORDER = (
    EngineChange.ACTIVATION_CHECKPOINTING,
    EngineChange.MINIMAL_BUCKETS,
    EngineChange.OPTIMIZER_STATE_OFFLOAD,
    EngineChange.REBUILD,
)


def rebuild_changes(
    config: Mapping[str, Any], world_size: int, *, on_host: bool
) -> list[dict[str, Any]]:
    """Return the rebuilds of the escalation as changes to a ds config.

    Each rebuild needs less device memory than the rebuild before it. With one rank, a higher stage
    saves nothing. If training runs on the host, offloading saves nothing.
    """
    stage = zero_stage(config)
    stages = [higher for higher in (2, 3) if higher > stage and world_size > 1]
    changes: list[dict[str, Any]] = [{"zero_optimization": {"stage": one}} for one in stages]
    if not on_host:
        offload = {"device": "cpu", "pin_memory": True}
        changes.append({"zero_optimization": {"offload_optimizer": offload}})
        changes.append({"zero_optimization": {"stage": 3, "offload_param": offload}})
    return changes


class MemorySaving(Protocol):
    """Lowers the memory of a run by one change, which the run applies itself."""

    @property
    def change(self) -> EngineChange:
        """Kind of the memory saving, a member of `ESCALATION_ORDER`."""

    def apply(self) -> bool:
        """Apply the memory saving on this rank; all ranks call it together.

        Returns:
            Whether anything changed. A memory saving that is not possible on this engine returns
            False and does not raise.
        """


class EscalationPolicy:
    """Lowers the memory of the next attempt after an attempt ran out of memory.

    Args:
        savings: Memory savings of the run, in any order; each is applied once in a run.

    Attributes:
        applied: Kinds of the memory savings that had an effect, in order.
    """

    def __init__(self, savings: Iterable[MemorySaving] = ()) -> None:
        self._pending = sorted(savings, key=lambda each: ESCALATION_ORDER.index(each.change))
        self.applied: list[EngineChange] = []

    def escalate(
        self,
        planner: MicroBatchPlanner,
        local_batches: LocalBatches,
        *,
        failing_size: int,
        next_size: int,
        all_max: Callable[[int], int],
    ) -> str | None:
        """Make the micro-batches smaller, or apply the next memory saving, the same on all ranks.

        Args:
            planner: Planner of the micro-batches.
            local_batches: Sizes of the local batches of all ranks.
            failing_size: Samples of a micro-batch that ran out of memory.
            next_size: Samples to try next; 0 if not even one sample fits.
            all_max: Returns the maximum of a value over all ranks.

        Returns:
            Description of the change, for log lines; None if no memory saving is left.
        """
        if next_size:
            planner.on_out_of_memory(local_batches, failing_size, next_size)
            return f"micro-batches of {planner.limits.bound(local_batches.length)}"
        change = self.apply_next(all_max)
        if change is None:
            return None
        planner.invalidate()
        return change.value

    def apply_next(self, all_max: Callable[[int], int]) -> EngineChange | None:
        """Apply the next memory saving that has an effect on any rank, and return its kind.

        Returns None if no memory saving is left.

        Args:
            all_max: Returns the maximum of a value over all ranks.
        """
        while self._pending:
            saving = self._pending.pop(0)
            if all_max(int(saving.apply())):
                self.applied.append(saving.change)
                return saving.change
        return None
