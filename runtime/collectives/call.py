"""One collective as the tap saw it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .groups import Group

if TYPE_CHECKING:
    import torch


class StreamWait:
    """A moment on the compute stream from which on it waited for calls.

    `num_calls` says for how many, of those whose times were not read yet.
    """

    __slots__ = ("event", "num_calls")

    def __init__(self, event: torch.cuda.Event, num_calls: int) -> None:
        self.event = event
        self.num_calls = num_calls


class CollectiveCall:
    """A collective's facts, its interval, and how long training was blocked by it.

    Times are of `time.perf_counter_ns`. `end_ns` is 0 while the operation is under way, `issued_ns`
    the time at which the call returned to a training thread that it had blocked since `start_ns`,
    and `wait_ns` that of the first `wait()`, 0 if there was none. On CUDA all of these are read
    from events, and it is the compute stream that is blocked or waits. `timed` is False where no
    end can be had.

    `sequence` numbers the calls of a rank set that all its members issue, from 1 on; 0 is a
    point-to-point call, or one from a thread with an order of its own. `settle` sets what is
    derived: `settled`, `duration_ns`, `exposed_ns`, `wait_exposed_ns`.
    """

    __slots__ = (
        "dtype",
        "duration_ns",
        "end_event",
        "end_ns",
        "exposed_ns",
        "group",
        "issued_ns",
        "join",
        "op",
        "payload_bytes",
        "phase",
        "sequence",
        "settled",
        "start_event",
        "start_ns",
        "timed",
        "wait_exposed_ns",
        "wait_ns",
        "wait_phase",
    )

    def __init__(
        self, op: int, group: Group, payload_bytes: int, dtype: torch.dtype | None, phase: int
    ) -> None:
        self.op = op
        self.group = group
        self.payload_bytes = payload_bytes
        self.dtype = dtype
        self.phase = phase
        self.sequence = 0
        self.start_ns = 0
        self.end_ns = 0
        self.wait_ns = 0
        self.timed = True
        self.settled = False
        self.start_event: torch.cuda.Event | None = None
        self.end_event: torch.cuda.Event | None = None
        self.join: StreamWait | None = None
        # The rest is set when the call returns or settles: this constructor is on the hot path.
        self.issued_ns: int
        self.wait_phase: int
        self.duration_ns: int
        self.exposed_ns: int
        self.wait_exposed_ns: int

    def settle(self) -> None:
        """Work out how long it took and for how much of that training was blocked.

        `duration_ns` runs from the issue, or from the end of the group's call before if that came
        later: a group does one after the other. `wait_exposed_ns` is the part of `exposed_ns` that
        passed in `wait()`.
        """
        self.duration_ns = self.exposed_ns = self.wait_exposed_ns = 0
        if self.timed:
            end_ns, group = self.end_ns, self.group
            self.duration_ns = max(0, end_ns - max(self.start_ns, group.busy_until_ns))
            group.busy_until_ns = max(end_ns, group.busy_until_ns)
            issued_ns = min(self.issued_ns, end_ns)
            if self.wait_ns:
                self.wait_exposed_ns = max(0, end_ns - max(self.wait_ns, issued_ns))
            self.exposed_ns = issued_ns - self.start_ns + self.wait_exposed_ns
        self.settled = True
