"""The last lines of a rank's run log, of a process that can say no more."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..forecast.series import Shape

MAX_RECORDS = 20
# Some hundred lines; a line is about 1 KiB, more with many devices or collectives.
_TAIL_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LastRecord:
    """What one step's record says of the host's memory. None where it says nothing."""

    step: int
    ended_at_unix_seconds: float
    resident_bytes: float | None
    peak_bytes: float | None
    limit_bytes: float | None
    risk_ratio: float | None
    shapes: tuple[Shape, ...]

    @property
    def limit_ratio(self) -> float | None:
        """The peak over the limit."""
        peak = self.resident_bytes if self.peak_bytes is None else self.peak_bytes
        if peak is None or not self.limit_bytes or not math.isfinite(self.limit_bytes):
            return None
        return peak / self.limit_bytes


def last_records(folder: Path, rank: int, since_unix_seconds: float) -> list[LastRecord]:
    """Read the last records that a process which started then has left; none if it left none."""
    lines = _tail(folder / f"rank-{rank}.jsonl")
    if len(lines) < MAX_RECORDS:  # the log was just cut
        lines = _tail(folder / f"rank-{rank}.1.jsonl") + lines
    found = [record for record in _records(lines) if _ended_at(record) >= since_unix_seconds]
    return [_last_record(record) for record in found[-MAX_RECORDS:]]


def latest(records: Sequence[LastRecord], field: str) -> Any:
    """Return the last value of a field that some record tells; not every one reads memory."""
    values = (getattr(record, field) for record in reversed(records))
    return next((value for value in values if value is not None), None)


def _tail(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    return lines[1:] if size > _TAIL_BYTES else lines  # the first is cut


def _records(lines: Sequence[bytes]) -> Iterator[Mapping[str, Any]]:
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # the half line of a killed writer
            continue
        if isinstance(record, dict) and "step" in record:
            yield record


def _ended_at(record: Mapping[str, Any]) -> float:
    return float(record.get("ended_at_unix_seconds") or 0.0)


def _last_record(record: Mapping[str, Any]) -> LastRecord:
    host = (record.get("memory_bytes") or {}).get("cpu") or {}
    risks = (record.get("oom_risk_ratio") or {}).values()
    return LastRecord(
        step=int(record["step"]),
        ended_at_unix_seconds=_ended_at(record),
        resident_bytes=host.get("allocated"),
        peak_bytes=host.get("peak_allocated"),
        limit_bytes=host.get("limit"),
        risk_ratio=max((risk for risk in risks if risk is not None), default=None),
        shapes=tuple(Shape(*each) for each in record.get("micro_batch_shapes") or ()),
    )
