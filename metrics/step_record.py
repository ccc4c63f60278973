"""The record of one step: what the run log holds and what listeners get.

The schema of `runs/<run_id>/rank-<r>.jsonl` is this file. A change that an older reader would
misread raises SCHEMA_VERSION.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTotals:
    """One operation's calls in a step; seconds are issue to completion, summed over calls.

    `seconds` is None where no call of the step could be timed.
    """

    calls: int
    payload_bytes: int
    wire_bytes: float
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step of one rank. What is not known is None, or absent from its mapping.

    `seconds` is the wall time since the step before, all phases included; `phase_seconds` adds up
    to it. `memory_bytes` and `device_readings` are keyed by device, then by state or reading
    (units in the keys' catalog metrics). `comm_seconds` is the length of the union of all
    collectives' intervals.
    """

    step: int
    ended_at_unix_seconds: float
    seconds: float
    phase_seconds: Mapping[str, float]
    micro_batches: int
    samples: int | None
    tokens: int | None
    loss: float | None
    gradient_norm: float | None
    learning_rate: float | None
    loss_scale: float | None
    skipped: bool
    collectives: Mapping[str, CollectiveTotals]
    comm_seconds: float | None
    memory_bytes: Mapping[str, Mapping[str, float]]
    device_readings: Mapping[str, Mapping[str, float]]

    @property
    def training_seconds(self) -> float:
        """Wall time of the step without evaluation and checkpoints."""
        away = self.phase_seconds.get("eval", 0.0) + self.phase_seconds.get("checkpoint", 0.0)
        return self.seconds - away


def to_line(record: StepRecord, identity: Mapping[str, Any]) -> str:
    """Write one record as a line of JSON, newline included.

    Args:
        record: The step.
        identity: What tells this log from others: rank, host, attempt, world_size.
    """
    # Not dataclasses.asdict, whose deep copy takes three times as long as the rest: this runs for
    # every step.
    line = {"schema": SCHEMA_VERSION, **identity}
    for name in _RECORD_FIELDS:
        line[name] = getattr(record, name)
    line["collectives"] = {op: _plain(totals) for op, totals in record.collectives.items()}
    try:
        return _encode(line) + "\n"
    except ValueError:  # JSON has no nan or inf; a diverged loss is worth keeping all the same
        return _encode(_without_nonfinite(line)) + "\n"


_RECORD_FIELDS = tuple(field.name for field in fields(StepRecord))
_TOTALS_FIELDS = tuple(field.name for field in fields(CollectiveTotals))
_encode = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":")).encode


def _plain(totals: CollectiveTotals) -> dict[str, Any]:
    return {name: getattr(totals, name) for name in _TOTALS_FIELDS}


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nonfinite(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
