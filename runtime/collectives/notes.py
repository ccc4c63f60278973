"""Notes each tapped call: what it is about before it runs, and when it ended.

This is the hot path of watching: it runs on the training thread for every collective.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..phase_clock import OTHER, PhaseClock
from .batch import Batch
from .call import Call
from .events import EventPool
from .groups import Groups, sequence_number
from .operations import Reader

BATCH_CALLS = 4096


class Notes:
    """The calls noted since the last `take`, in the order in which they returned.

    Attributes:
        groups: What is known of the process groups seen.
        events: The CUDA events to give back once read.
        dropped_calls: Calls lost because nobody took the batches.
        dropped_in_capture: Calls passed by because a CUDA graph was being captured.
    """

    def __init__(self) -> None:
        self.groups = Groups()
        self.events = EventPool()
        self.dropped_calls = 0
        self.dropped_in_capture = 0
        self._calls: list[Call] = []
        self._under_way: set[Call] = set()
        self._clock: PhaseClock | None = None
        self._take_batch: Callable[[Batch], None] | None = None
        # torch keeps this very dict for the life of the process; it is empty outside such blocks.
        self._coalescing: Mapping[dist.ProcessGroup, list[Any]] = c10d._world.pg_coalesce_state

    def connect(self, clock: PhaseClock | None, take_batch: Callable[[Batch], None] | None) -> None:
        """Tag calls with the clock's phase from now on, and hand full batches to `take_batch`."""
        self._clock = clock
        self._take_batch = take_batch

    def take(self) -> Batch:
        """Return the calls noted since the last time."""
        calls, self._calls = self._calls, []
        on_device = any(call.start_event is not None for call in calls)
        return Batch(calls, self.events.record() if on_device else None)

    def begin(
        self, reader: Reader, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Call] | None:
        """Read the arguments, before the original runs and may change them."""
        process_group = reader.group(args, kwargs)
        if process_group is None:
            process_group = c10d.GroupMember.WORLD
        group = self.groups.find(process_group)
        if group is None:
            return None  # this rank is no member, or the original will complain
        phase = OTHER if self._clock is None else self._clock.current
        calls = [Call(op, group, size, phase) for op, size in reader.payloads(args, kwargs)]
        if reader.operation.per_member:
            calls[0].payload_bytes *= group.size
        if self._coalescing and process_group in self._coalescing:
            self._note_coalesced(calls, process_group)
        elif reader.operation.counted_by_group:
            group.recorded -= sequence_number(process_group)
        else:
            group.recorded += 1
        if group.backend == "nccl" and not self._mark_start(calls):
            return None
        return calls

    def end(
        self, reader: Reader, calls: list[Call], work: Any, started_ns: int, ended_ns: int
    ) -> None:
        """Note when the calls ended, or arrange that it is noted."""
        if reader.operation.counted_by_group:
            group = calls[0].group
            process_group = group.reference()
            group.recorded += sequence_number(process_group) if process_group else 0
        asynchronous = work is not None and hasattr(work, "get_future")
        for call in calls:
            call.start_ns = started_ns
            if not asynchronous:
                self._mark_end(call, ended_ns)
            elif not reader.operation.has_future:
                call.timed = False
            elif call.timed:
                self._under_way.add(call)
                work.get_future().add_done_callback(lambda _, call=call: self._completed(call))
        self._calls.extend(calls)
        if len(self._calls) >= BATCH_CALLS:
            self._hand_over()

    def wait_for_completion(self, timeout_seconds: float) -> None:
        """Wait until no asynchronous call is under way, before the interpreter ends.

        A backend's thread that ran our callback after that would abort the process.
        """
        deadline = time.monotonic() + timeout_seconds
        while self._under_way and time.monotonic() < deadline:
            time.sleep(0.005)

    def _completed(self, call: Call) -> None:
        self._mark_end(call, perf_counter_ns())
        self._under_way.discard(call)

    def _note_coalesced(self, calls: list[Call], process_group: dist.ProcessGroup) -> None:
        """Note calls of a coalescing block: it is issued when it ends, and counts once."""
        if not self._coalescing[process_group]:
            calls[0].group.recorded += 1
        for call in calls:
            call.timed = False

    def _mark_start(self, calls: list[Call]) -> bool:
        """Record the start on the issuing stream, unless a CUDA graph is being captured there."""
        if torch.cuda.is_current_stream_capturing():
            self.dropped_in_capture += len(calls)
            return False
        for call in calls:
            call.timed = call.timed and not self.events.disabled
            call.start_event = self.events.record() if call.timed else None
        return True

    def _mark_end(self, call: Call, ended_ns: int) -> None:
        if call.start_event is not None:
            call.end_event = self.events.record()
        call.end_ns = ended_ns

    def _hand_over(self) -> None:
        batch = self.take()
        if self._take_batch is None:
            self.dropped_calls += len(batch.calls)
        else:
            self._take_batch(batch)
