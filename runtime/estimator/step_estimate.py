"""Defines the estimated collectives, bytes and memory of one step, and the reference bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ...metrics.step_record import CollectiveTotals
from ..collectives.collective_table import wire_factor
from .model_memory import MemoryEstimate
from .model_shape import BYTES_OF


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedCollective:
    """All calls in one step of one rank of one operation on one group for one purpose.

    Payload bytes follow nccl-tests, as the recorded ones do. Wire bytes are those that this rank
    sends; for rooted operations, which differ by rank, the average over the ranks.
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
class StepEstimate:
    """The communication and memory of one rank in one optimizer step, from step 4 on.

    Attributes:
        stage: ZeRO stage.
        collectives: The collectives that DeepSpeed issues.
        reference_wire_bytes: Reference: the bytes that this stage sends in the ZeRO paper.
        memory: Bytes of the rank, by category.
        exact: Whether calls and payload bytes equal DeepSpeed's if the assumptions hold. If not, a
            remark names the reason.
        assumptions: Facts that configuration and model shape do not determine, as clauses.
        remarks: Sentences about the estimate.
    """

    stage: int
    collectives: tuple[EstimatedCollective, ...]
    reference_wire_bytes: float
    memory: MemoryEstimate
    exact: bool
    assumptions: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def wire_bytes(self) -> float:
        """The bytes that this rank sends in a step."""
        return sum(collective.wire_bytes for collective in self.collectives)

    @property
    def volume_ratio(self) -> float | None:
        """The wire bytes as a ratio of the reference; None if nothing has to be sent."""
        return self.wire_bytes / self.reference_wire_bytes if self.reference_wire_bytes else None

    def totals(self) -> Mapping[str, CollectiveTotals]:
        """Return the estimated totals by operation, in the form of a `StepRecord`."""
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
class EstimatedCall:
    """An estimated call of a collective, made `times` times in a step.

    Attributes:
        elements: Payload of one call, counted as in nccl-tests.
    """

    op: str
    elements: int
    dtype: str
    purpose: str
    group: str = "dp"
    group_size: int
    times: int = 1


def sum_calls(calls: Iterable[EstimatedCall], backend: str) -> tuple[EstimatedCollective, ...]:
    """Add up calls of the same kind, in the order of the first call of each kind."""
    sums: dict[tuple[str, str, int, str, str], list[float]] = {}
    for call in calls:
        key = (call.op, call.group, call.group_size, call.dtype, call.purpose)
        payload_bytes = call.elements * BYTES_OF[call.dtype]
        factor = wire_factor(call.op, backend, call.group_size, payload_bytes)
        entry = sums.setdefault(key, [0, 0, 0.0])
        entry[0] += call.times
        entry[1] += call.times * payload_bytes
        entry[2] += call.times * payload_bytes * factor
    return tuple(
        EstimatedCollective(
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


def reference_wire_bytes(
    stage: int, *, gradient_bytes: int, parameter_bytes: int, micro_batches: int, num_ranks: int
) -> float:
    """Return the bytes that one rank sends in one step of the ZeRO paper: the ratio's denominator.

    Where stage 3 keeps parameters gathered, less is sent.

    Source: section 7 of the ZeRO paper (arXiv 1910.02054), with rings. With f = (n-1)/n, a
    reduce-scatter or an all-gather sends f of its payload. Stage 0 needs both for the gradients,
    stage 1 one for the gradients and one for the parameters. From stage 2 on gradients are
    partitioned, so each micro-batch reduce-scatters its own. In stage 3 each micro-batch also
    gathers the parameters twice.

    Args:
        stage: ZeRO stage.
        gradient_bytes: All gradients, in the dtype in which they are sent.
        parameter_bytes: All parameters that are sent, in the dtype in which they are sent.
        micro_batches: Micro-batches of one step on one rank.
        num_ranks: Data-parallel ranks.
    """
    sent_ratio = wire_factor("all_gather", "nccl", num_ranks)  # f, also of a reduce-scatter
    if stage == 0:
        return 2 * sent_ratio * gradient_bytes
    if stage == 1:
        return sent_ratio * (gradient_bytes + parameter_bytes)
    if stage == 2:
        return sent_ratio * (micro_batches * gradient_bytes + parameter_bytes)
    return micro_batches * sent_ratio * (2 * parameter_bytes + gradient_bytes)
