"""Steps as the training thread hands them on, without collectives."""

from __future__ import annotations

from typing import Any

from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.instrumentation.raw_step import RawStep, StepCounts


def raw_step(number: int, **changed: Any) -> RawStep:
    """A step of half a second of forward, which ended at 1000 s plus its number."""
    fields: dict[str, Any] = {
        "step": number,
        "ended_at": 1000.0 + number,
        "phase_ns": [500_000_000 * (phase == "forward") for phase in PHASES],
        "intervals": (),
        "counts": StepCounts(micro_batches=2, samples=8, tokens=64, losses=[1.0, 2.0]),
        "gradient_norm": 0.5,
        "learning_rate": 0.001,
        "loss_scale": None,
        "coverage": None,
        "trace": None,
        "memory": None,
        "batch": CallBatch([]),
    }
    return RawStep(**{**fields, **changed})
