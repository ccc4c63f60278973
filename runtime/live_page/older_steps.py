"""Reads steps of a run log that are older than those in memory: evenly spaced single steps.

A log has any number of lines, so a few hundred positions are read instead of the whole file. The
positions are evenly spaced in bytes, which is nearly evenly spaced in steps.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson

from .step_history import Point, empty_point

# Longest line that is read: a step with some thousand entries.
MAX_LINE_BYTES = 256 * 1024
_CHUNK_BYTES = 16 * 1024


def sample_steps(
    folder: Path, rank: int, before_unix_seconds: float, max_steps: int
) -> list[Point]:
    """Return at most `max_steps` steps of a rank that ended before a time, from the oldest on.

    Each point is a single step. Lines that are truncated or no records are left out.

    Args:
        folder: The run folder.
        rank: The rank of the log.
        before_unix_seconds: Steps that ended at this time or later are left out.
        max_steps: The largest number of steps.

    Raises:
        OSError: A file cannot be read.
    """
    with ExitStack() as files:
        log = _Log.open(segments(folder, rank), files)
        end = bisect.bisect_left(
            range(log.size), True, key=lambda at: log.is_from(at, before_unix_seconds)
        )
        if max_steps < 1 or not end:
            return []
        spacing = math.ceil(end / max_steps)
        points: dict[float, Point] = {}
        for position in range(0, end, spacing):
            line = log.line_from(position)
            point = None if line is None else _point_or_none(line)
            if point is not None and point.ended_at < before_unix_seconds:
                points[point.ended_at] = point
        return [points[ended_at] for ended_at in sorted(points)]


def segments(folder: Path, rank: int) -> list[Path]:
    """Return the files of a rank's log, from the oldest on."""
    rotated = {}
    for file in folder.glob(f"rank-{rank}.*.jsonl"):
        age = file.name.split(".")[1]
        if age.isdigit():
            rotated[int(age)] = file
    current = folder / f"rank-{rank}.jsonl"
    newest_last = [rotated[age] for age in sorted(rotated, reverse=True)]
    return [*newest_last, *([current] if current.exists() else ())]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """The open segments of a log as one file. A position counts bytes from the oldest segment."""

    descriptors: Sequence[int]
    ends: Sequence[int]

    @classmethod
    def open(cls, paths: Sequence[Path], files: ExitStack) -> _Log:
        descriptors = []
        for path in paths:
            with suppress(FileNotFoundError):  # it was rotated meanwhile
                descriptors.append(files.enter_context(path.open("rb")).fileno())
        sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
        return cls(descriptors=descriptors, ends=list(accumulate(sizes)))

    @property
    def size(self) -> int:
        return self.ends[-1] if self.ends else 0

    def line_from(self, position: int) -> Mapping[str, Any] | None:
        """Return the first whole record that begins at a position or after it."""
        return next(self._records(position), None)

    def is_from(self, position: int, unix_seconds: float) -> bool:
        """Whether the first record after a position ended at a time or later."""
        record = self.line_from(position)
        if record is None:
            return True
        ended_at = record["ended_at_unix_seconds"]
        return isinstance(ended_at, int | float) and ended_at >= unix_seconds

    def _records(self, position: int) -> Iterator[Mapping[str, Any]]:
        index = bisect.bisect_right(self.ends, position)
        while index < len(self.descriptors):
            start = self.ends[index - 1] if index else 0
            offset = max(0, position - start)
            # The line that contains the byte before the position is left out, unless it ends there.
            skip = 1 if offset else 0
            yield from _records_of(self.descriptors[index], offset - skip, skip=bool(skip))
            index += 1


def _records_of(descriptor: int, offset: int, *, skip: bool) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a segment from an offset on; of a long file only the first few."""
    size = _CHUNK_BYTES
    while True:
        data = os.pread(descriptor, size, offset)
        lines = data.split(b"\n")[int(skip) : -1]
        if lines or len(data) < size or size >= MAX_LINE_BYTES:
            break
        size *= 4
    for line in lines:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(record, dict) and record.keys() >= _REQUIRED:
            yield record


_REQUIRED = {"step", "ended_at_unix_seconds", "seconds", "phase_seconds"}


def _point_or_none(record: Mapping[str, Any]) -> Point | None:
    """Return the step of a record; None if a value of it has another type."""
    try:
        return _point(record)
    except (AttributeError, TypeError, ValueError):
        return None


def _point(record: Mapping[str, Any]) -> Point:
    point = empty_point()
    point.add_step(
        step=int(record["step"]),
        ended_at=float(record["ended_at_unix_seconds"]),
        seconds=float(record["seconds"]),
        phase_seconds=_floats(record["phase_seconds"]),
        exposed_seconds=_float(record.get("comm_exposed_seconds")),
        exposed_phase_seconds=_floats(record.get("comm_exposed_phase_seconds", {})),
        loss=_float(record.get("loss")),
        nonfinite_loss=bool(record.get("nonfinite_loss")),
        samples=_int(record.get("samples")),
        tokens=_int(record.get("tokens")),
        memory_bytes={
            device: _floats(states) for device, states in record.get("memory_bytes", {}).items()
        },
    )
    return point


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if value is not None}


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _int(value: Any) -> int | None:
    return None if value is None else int(value)
