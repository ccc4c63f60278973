"""One collective as the tap saw it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .groups import Group

if TYPE_CHECKING:
    import torch


class Call:
    """A collective's facts and its interval.

    Times are of `time.perf_counter_ns`; `end_ns` is 0 while the operation is under way. On CUDA the
    interval is that between two events instead. `timed` is False where no end can be had.
    """

    __slots__ = (
        "end_event",
        "end_ns",
        "group",
        "op",
        "payload_bytes",
        "phase",
        "start_event",
        "start_ns",
        "timed",
    )

    def __init__(self, op: int, group: Group, payload_bytes: int, phase: int) -> None:
        self.op = op
        self.group = group
        self.payload_bytes = payload_bytes
        self.phase = phase
        self.end_ns = 0
        self.timed = True
        self.start_event: torch.cuda.Event | None = None
        self.end_event: torch.cuda.Event | None = None
        # `start_ns` is set when the call returns: this constructor is on the hot path.
        self.start_ns: int
