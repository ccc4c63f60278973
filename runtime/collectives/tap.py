"""The communication tap: sees every collective that Python code issues, and notes it.

It wraps the functions of `torch.distributed` and, for what these do not show, methods of
DeepSpeed's backend object. A nested call counts once. It knows nothing of steps or metrics.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..hooks import Hooks
from ..phase_clock import OTHER, PhaseClock
from ..wrap import Wrap
from .batch import Batch
from .call import Call
from .events import EventPool
from .groups import Groups, sequence_number
from .operations import BACKEND_METHODS, OPERATIONS, Operation, Reader, reader_for

BATCH_CALLS = 4096

Arguments = Mapping[str, Any]


class _Inside(threading.local):
    """Whether this thread is inside a wrapped call already."""

    value = False


class CommTap:
    """Wraps, notes and restores. Opening twice does nothing; closing restores every name.

    Attributes:
        groups: What is known of the process groups seen.
        events: The CUDA events to give back once read.
        cost_ns: Nanoseconds spent noting calls, on whatever thread issued them.
        dropped_calls: Calls lost because nobody took the batches.
        dropped_in_capture: Calls passed by because a CUDA graph was being captured.
    """

    def __init__(self, hooks: Hooks) -> None:
        self.groups = Groups()
        self.events = EventPool()
        self.cost_ns = 0
        self.dropped_calls = 0
        self.dropped_in_capture = 0
        self._open = False
        self._wraps: list[Wrap] = []
        self._wrappers: set[Callable[..., Any]] = set()
        self._backend: Any = None
        self._inside = _Inside()
        self._calls: list[Call] = []
        self._clock: PhaseClock | None = None
        self._take_batch: Callable[[Batch], None] | None = None
        self._begin = hooks.guard("tap", self._note_begin)
        self._end = hooks.guard("tap", self._note_end)

    def open(self) -> None:
        """Wrap torch's functions, under both names by which callers reach them."""
        if self._open:
            return
        self._open = True
        for name, operation in OPERATIONS.items():
            self._wrap_function(name, operation)

    def open_backend(self, backend: Any) -> None:
        """Wrap the methods of DeepSpeed's backend object; another one replaces the first."""
        if backend is self._backend or not self._open:
            return
        self._backend = backend
        for name, (operation, parameters) in BACKEND_METHODS.items():
            if hasattr(backend, name):
                reader = reader_for(operation, parameters)
                self._wraps.append(Wrap(backend, name, partial(self._wrapper, reader)))

    def connect(self, clock: PhaseClock, take_batch: Callable[[Batch], None]) -> None:
        """Tag calls with the clock's phase from now on, and hand full batches to `take_batch`."""
        self._clock = clock
        self._take_batch = take_batch

    def close(self) -> None:
        """Restore every name; wrappers that others hold on to become pass-throughs."""
        self._open = False
        for wrap in reversed(self._wraps):
            wrap.restore()
        self._wraps.clear()
        self._release_captured()
        self._wrappers.clear()
        self._backend = self._clock = self._take_batch = None

    def take(self) -> Batch:
        """Return the calls noted since the last time, in the order in which they ended."""
        calls, self._calls = self._calls, []
        on_device = any(call.start_event is not None for call in calls)
        return Batch(calls, self.events.record() if on_device else None)

    def _release_captured(self) -> None:
        """Give DeepSpeed's backend back the functions it captured when it was made."""
        for name in ("all_gather_function", "reduce_scatter_function"):
            captured = getattr(self._backend, name, None)
            if captured in self._wrappers:
                setattr(self._backend, name, captured.__wrapped__)

    def _wrap_function(self, name: str, operation: Operation) -> None:
        original = getattr(c10d, name, None)
        if original is not None:
            reader = reader_for(operation, list(inspect.signature(original).parameters))
            self._wrap_modules(name, self._wrapper(reader, original))

    def _wrap_modules(self, name: str, wrapper: Callable[..., Any]) -> None:
        self._wrappers.add(wrapper)
        for module in (dist, c10d):
            if hasattr(module, name):
                self._wraps.append(Wrap(module, name, lambda original: wrapper))

    def _wrapper(self, reader: Reader, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling = torch.compiler.is_compiling
        inside, begin, end = self._inside, self._begin, self._end

        def tapped(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # must come first: else torch.compile(fullgraph=True) breaks
                return original(*args, **kwargs)
            if inside.value or not self._open:
                return original(*args, **kwargs)
            entered_ns = perf_counter_ns()
            calls = begin(reader, args, kwargs)
            inside.value = True
            work = None
            started_ns = perf_counter_ns()
            try:
                work = original(*args, **kwargs)
            finally:
                ended_ns = perf_counter_ns()
                inside.value = False
                if calls:
                    end(reader, calls, work, started_ns, ended_ns)
                self.cost_ns += perf_counter_ns() - ended_ns + started_ns - entered_ns
            return work

        return tapped

    def _note_begin(
        self, reader: Reader, args: tuple[Any, ...], kwargs: Arguments
    ) -> list[Call] | None:
        """Read the arguments, before the original runs and may change them."""
        given = reader.group(args, kwargs)
        process_group = c10d.GroupMember.WORLD if given is None else given
        if not isinstance(process_group, dist.ProcessGroup):
            return None  # this rank is no member, or the original will complain
        group = self.groups.find(process_group)
        block = _coalescing_block(process_group)
        if reader.operation.counted_by_group:
            group.recorded -= sequence_number(process_group)
        elif not block:
            group.recorded += 1  # a coalescing block counts once, however many calls it holds
        clock = self._clock
        phase = OTHER if clock is None else clock.current
        calls = [
            Call(op, group, size * (group.size if reader.operation.per_member else 1), phase)
            for op, size in reader.payloads(args, kwargs)
        ]
        if block is not None:  # issued when the block ends, by nobody we see
            for call in calls:
                call.timed = False
        elif group.backend == "nccl" and not self._mark_start(calls):
            return None
        return calls

    def _mark_start(self, calls: list[Call]) -> bool:
        """Record the start on the issuing stream, unless a CUDA graph is being captured there."""
        if torch.cuda.is_current_stream_capturing():
            self.dropped_in_capture += len(calls)
            return False
        for call in calls:
            call.timed = not self.events.disabled
            call.start_event = self.events.record() if call.timed else None
        return True

    def _note_end(
        self, reader: Reader, calls: list[Call], work: Any, started_ns: int, ended_ns: int
    ) -> None:
        """Note when the calls ended, or arrange that it is noted."""
        group = calls[0].group
        if reader.operation.counted_by_group:
            process_group = group.reference()
            group.recorded += sequence_number(process_group) if process_group else 0
        asynchronous = work is not None and hasattr(work, "get_future")
        for call in calls:
            call.start_ns = started_ns
            if not call.timed:
                continue
            if not asynchronous:
                self._mark_end(call, ended_ns)
            elif reader.operation.has_future:
                work.get_future().then(lambda _, call=call: self._mark_end(call, perf_counter_ns()))
            else:
                call.timed = False
        self._calls.extend(calls)
        if len(self._calls) >= BATCH_CALLS:
            self._hand_over()

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


def _coalescing_block(process_group: dist.ProcessGroup) -> list[Any] | None:
    """Return the operations collected so far where a coalescing block is open on the group."""
    blocks = c10d._world.pg_coalesce_state
    return blocks.get(process_group) if blocks else None
