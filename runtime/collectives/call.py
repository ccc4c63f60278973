"""One recorded collective: what it is about, when it ran, how long it blocked training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .groups import Group

if TYPE_CHECKING:
    import torch

    from ..common.accelerator import Event


class StreamWait:
    """A mark on the compute stream from which on it waits for calls.

    Attributes:
        event: The mark.
        num_calls: Calls that it waits for and whose times were not read yet.
    """

    __slots__ = ("event", "num_calls")

    def __init__(self, event: Event, num_calls: int) -> None:
        self.event = event
        self.num_calls = num_calls


class CollectiveCall:
    """One collective on one rank.

    Times are of `time.perf_counter_ns`; with events they are nanoseconds before the batch's anchor,
    and it is the compute stream that is blocked or waits.

    Attributes:
        op: Its place in OPS.
        group: The process group.
        payload_bytes: Bytes by nccl-tests' convention; see `ops.Operation`.
        dtype: Of the payload; None without one.
        phase: The phase, by place in PHASES, in which it was issued.
        sequence: Its number, from 1 on, among the calls that all members of the rank set issue. 0:
            point-to-point, or from a thread whose order differs between ranks.
        start_ns: When it was issued.
        end_ns: When it ended; 0 until then.
        issued_ns: When the call returned to a training thread that it blocked, else `start_ns`.
        wait_ns: When training first waited for it; 0 if it did not.
        wait_phase: The phase of that wait.
        timed: Whether its end can be read.
        start_event: With `end_event` its interval, where it runs on a stream.
        stream_wait: Where the compute stream began to wait for it.
        settled: Whether `settle` has set `duration_ns`, `exposed_ns` and `wait_exposed_ns`.
    """

    __slots__ = (
        "dtype",
        "duration_ns",
        "end_event",
        "end_ns",
        "exposed_ns",
        "group",
        "issued_ns",
        "op",
        "payload_bytes",
        "phase",
        "sequence",
        "settled",
        "start_event",
        "start_ns",
        "stream_wait",
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
        self.start_event: Event | None = None
        self.end_event: Event | None = None
        self.stream_wait: StreamWait | None = None
        # The rest is set when the call returns or settles: this constructor is on the hot path.
        self.issued_ns: int
        self.wait_phase: int
        self.duration_ns: int
        self.exposed_ns: int
        self.wait_exposed_ns: int

    def settle(self) -> None:
        """Compute how long it took and for how much of that training was blocked.

        `duration_ns` runs from the issue, or from the end of the group's previous call if that is
        later: a group runs one call after the other. `wait_exposed_ns` is the part of `exposed_ns`
        that passed in `wait()`.
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
