"""The plan of one step: collectives, bytes, memory, and what is to be said of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ...metrics.step_record import CollectiveTotals
from ..collectives.wire_bytes import wire_factor
from .memory import MemoryPlan
from .shapes import BYTES_OF


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """Calls of one operation on one group for one purpose, in one step of one rank.

    Payload bytes follow nccl-tests, as those of the tap do; wire bytes are what this rank sends.
    For rooted operations, which differ by rank, they are the average over the ranks.
    """

    op: str
    group: str
    group_size: int
    dtype: str
    purpose: str
    calls: int
    payload_bytes: int
    wire_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one optimizer step will cost a rank once training has settled (from step 4 on).

    Attributes:
        stage: ZeRO stage.
        collectives: What DeepSpeed issues.
        least_wire_bytes: What a perfect implementation of the stage would send.
        memory: Bytes that the rank holds.
        exact: Whether calls and payload bytes are DeepSpeed's own, to the byte, provided that the
            assumptions hold. Otherwise a remark says what is not known.
        assumptions: What the configuration and the model's shape cannot tell, in words.
        remarks: What is worth knowing of the plan, in words.
    """

    stage: int
    collectives: tuple[PlannedCollective, ...]
    least_wire_bytes: float
    memory: MemoryPlan
    exact: bool
    assumptions: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def wire_bytes(self) -> float:
        """Bytes that this rank sends in a step."""
        return sum(collective.wire_bytes for collective in self.collectives)

    @property
    def volume_ratio(self) -> float | None:
        """Wire bytes over the least possible; None where nothing need be sent."""
        return self.wire_bytes / self.least_wire_bytes if self.least_wire_bytes else None

    def totals(self) -> Mapping[str, CollectiveTotals]:
        """Return the sums by operation, in the form in which a step's record holds them."""
        totals: dict[str, CollectiveTotals] = {}
        for collective in self.collectives:
            sums = totals.get(collective.op, _NOTHING)
            totals[collective.op] = replace(
                sums,
                calls=sums.calls + collective.calls,
                payload_bytes=sums.payload_bytes + collective.payload_bytes,
                wire_bytes=sums.wire_bytes + collective.wire_bytes,
            )
        return totals


_NOTHING = CollectiveTotals(calls=0, payload_bytes=0, wire_bytes=0.0, seconds=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call that DeepSpeed will issue. `elements` is the payload's, by nccl-tests."""

    op: str
    elements: int
    dtype: str
    purpose: str
    group: str = "dp"
    group_size: int


def sum_calls(calls: Iterable[Call], backend: str) -> tuple[PlannedCollective, ...]:
    """Add up calls that are alike, in the order in which the first of each is issued."""
    sums: dict[tuple[str, str, int, str, str], list[float]] = {}
    for call in calls:
        key = (call.op, call.group, call.group_size, call.dtype, call.purpose)
        payload_bytes = call.elements * BYTES_OF[call.dtype]
        factor = wire_factor(call.op, backend, call.group_size, payload_bytes)
        entry = sums.setdefault(key, [0, 0, 0.0])
        entry[0] += 1
        entry[1] += payload_bytes
        entry[2] += payload_bytes * factor
    return tuple(
        PlannedCollective(
            op=op,
            group=group,
            group_size=size,
            dtype=dtype,
            purpose=purpose,
            calls=int(num_calls),
            payload_bytes=int(payload),
            wire_bytes=wire_bytes,
        )
        for (op, group, size, dtype, purpose), (num_calls, payload, wire_bytes) in sums.items()
    )
