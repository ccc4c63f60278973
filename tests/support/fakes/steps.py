"""Step records for tests: a plain step, whose fields a test can replace."""

from __future__ import annotations

from collections.abc import Mapping

from zerowatch.metrics.step_record import CollectiveTotals, StepRecord


def collective(*, calls: int, seconds: float | None) -> CollectiveTotals:
    """Calls of 1000 bytes each, half of which go over the wire."""
    return CollectiveTotals(
        calls=calls, payload_bytes=1000 * calls, wire_bytes=500.0 * calls, seconds=seconds
    )


def step(
    number: int,
    *,
    seconds: float = 1.0,
    phases: Mapping[str, float] | None = None,
    loss: float | None = 5.0,
    samples: int | None = 8,
    comm: float | None = 0.0,
    exposed: float | None = None,
    peak: float | None = 1e6,
    busy: float | None = 0.5,
    device: str = "cpu",
    **collectives: CollectiveTotals,
) -> StepRecord:
    """One step, by default half forward and half backward, of which no communication overlaps."""
    memory = {} if peak is None else {device: {"peak_allocated": peak}}
    return StepRecord(
        step=number,
        ended_at_unix_seconds=1000.0 + number,
        seconds=seconds,
        phase_seconds=phases or {"forward": seconds / 2, "backward": seconds / 2},
        micro_batches=1,
        samples=samples,
        tokens=None,
        loss=loss,
        nonfinite_loss=False,
        gradient_norm=None,
        learning_rate=None,
        loss_scale=None,
        skipped=False,
        collectives=collectives,
        comm_seconds=comm,
        comm_exposed_seconds=comm if exposed is None else exposed,
        memory_bytes=memory,
        device_readings={} if busy is None else {device: {"utilization_ratio": busy}},
    )
