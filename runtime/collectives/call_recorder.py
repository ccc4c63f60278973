"""Records the group, payload, dtype and times of each collective.

This is the hot path of monitoring, because it runs on the training thread for every collective.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..common import accelerator
from ..common.accelerator import Event, Stream
from ..common.hot_path import RecorderFields, constructor
from ..common.phase_timer import OTHER, PhaseTimer
from .call_batch import MESSAGE_ENDS, CallBatch
from .call_reader import ON_CPU, CallReader
from .event_pool import EventPool
from .groups import CollectiveCall, Group, Groups
from .stream_waits import StreamWaitTracker, is_training_thread

# Number of calls after which a batch is passed on, even if the step has not ended.
BATCH_CALLS = 4096
_GOLDEN_RATIO = 0x9E3779B1  # times 2**32
_new_batch = constructor(CallBatch)
_NO_WORK: tuple[Callable[[], Any], None] = (lambda: None, None)


class CallRecorder(RecorderFields):
    """Records the calls of the process, and keeps those since the last `drain`.

    Attributes:
        groups: The process groups seen so far.
        events: The pool of timing events. Events that were read are released to this pool.
        stream_waits: Tracks the calls that the compute stream waits for.
        dropped_calls: Number of calls that were lost because nothing received their batch.
        is_sampled: Whether the ends of asynchronous calls on a device are exact now. An exact end
            costs a few microseconds on the training thread. The allocator reuses the outputs of
            the call only after all calls that the group issued before the outputs were freed.
        sample_interval: Ends are exact in one of this many steps. 0 for no step.
    """

    stream_waits: StreamWaitTracker

    def __init__(self) -> None:
        self.groups = Groups()
        self._known_groups, self._new_batch = self.groups.by_id, _new_batch
        self.events = EventPool()
        self.stream_waits = StreamWaitTracker(self.events)
        self.dropped_calls = 0
        self.is_sampled = True
        self.sample_interval = 1
        self._accelerator = accelerator.current
        # By group and device: the calls of one group end in the order in which they are issued.
        self._private_streams: dict[tuple[Group, int | None], Stream | None] = {}
        self._making_streams = threading.Lock()
        self._left_out = 0  # calls that could not be recorded completely
        self._num_gaps = 0  # calls and waits left out until the last drain
        self._sees_device = False  # whether any call so far was on a device
        self._unwaited: list[CollectiveCall] = []  # of the last batch, without an end so far
        self._calls: list[CollectiveCall] = []
        # Two threads must not drain the same calls. The training thread takes the lock only while
        # `_is_draining`, because a lock takes 3 us with cold caches.
        self._draining = threading.RLock()
        self._is_draining = False
        self._under_way: set[CollectiveCall] = set()
        self._phase_timer: PhaseTimer | None = None
        self._on_batch: Callable[[CallBatch], None] | None = None
        self._on_failed: Callable[[CollectiveCall], None] | None = None
        self._training_thread = get_ident()
        # The call of each asynchronous handle that has not ended, by the handle's id.
        self._works: dict[int, tuple[Callable[[], Any], CollectiveCall | None]] = {}
        # The calls of each handle without a future, by the handle's id. One such handle may stand
        # for several messages.
        self._messages: dict[int, list[CollectiveCall]] = {}
        # torch keeps this dict object for the life of the process. The dict is empty unless a
        # coalescing block is open.
        self._coalescing: Mapping[dist.ProcessGroup, list[Any]] = c10d._world.pg_coalesce_state

    @property
    def dropped_in_capture(self) -> int:
        """Number of calls and waits that were left out because a graph was being captured."""
        return self.stream_waits.dropped_in_capture

    def connect(
        self,
        phase_timer: PhaseTimer | None,
        on_batch: Callable[[CallBatch], None] | None,
        on_failed: Callable[[CollectiveCall], None] | None = None,
    ) -> None:
        """Tag calls with the timer's phase from now on. This thread becomes the training thread.

        Args:
            phase_timer: The phases of training.
            on_batch: Called with each full batch.
            on_failed: Called with a call that raised, before the exception reaches the caller.
        """
        self._on_failed = on_failed
        self._phase_timer = phase_timer
        self._on_batch = on_batch
        self._training_thread = get_ident()
        self._works.clear()
        self._messages.clear()
        self.stream_waits.connect(phase_timer)

    def follow_thread(self) -> None:
        """Make the calling thread the training thread."""
        self._training_thread = self.stream_waits.training_thread = get_ident()

    def begin_step(self, step: int) -> None:
        """Choose whether the next step is sampled. All ranks sample the same steps.

        Args:
            step: Number of the step. The multiples of the golden ratio pick the steps evenly, but
                without a period that something in the training could share.
        """
        interval = self.sample_interval
        self.is_sampled = interval > 0 and step * _GOLDEN_RATIO % 2**32 < 2**32 // interval

    def _drain(self) -> CallBatch:
        calls = self._take_calls()
        if calls is None:  # the watch thread takes calls, and must enqueue them before these
            with self._draining:
                calls, self._calls = self._calls, []
        waits = self.stream_waits
        num_gaps = waits.dropped_in_capture + waits.replayed_calls + self._left_out
        batch = _new_batch(calls, is_complete=num_gaps == self._num_gaps)
        self._num_gaps = num_gaps
        if not self._sees_device:
            return batch
        for call in self._unwaited:
            call.timed = call.timed and call.end_event is not None
        self._unwaited = [call for call in calls if call.is_bound and call.end_event is None]
        if any(call.start_event is not None for call in calls):
            try:
                batch.anchor = self._new_anchor(calls)
            except RuntimeError as error:
                self.events.disable(error)
            if batch.anchor is None:
                batch.lose()
        return batch

    def _new_anchor(self, calls: list[CollectiveCall]) -> Event | None:
        """Return an event of about now; None if there is none.

        While a graph is captured, an event would be recorded into the graph, and to query it would
        invalidate the capture.
        """
        return _last_end(calls) if self._accelerator.is_capturing() else self.events.record()

    def pass_on_between_steps(self) -> None:
        """Pass on the calls since the last step if there is an evaluation or a checkpoint.

        Called on the watch thread. Otherwise such calls would wait for the end of the next step.
        Without an evaluation or a checkpoint they do: they block the training of the next step, if
        there is one. Within a step nothing is passed on: the times of overlapping calls are
        measured together.
        """
        timer = self._phase_timer
        if timer is None or not (timer.is_between_steps() and timer.was_outside_training()):
            return
        with self._draining:
            self._is_draining = True
            try:
                calls = list(itertools.takewhile(_is_marked, self._calls))
                del self._calls[: len(calls)]  # the issuing thread may have added further calls
                if calls and self._on_batch is not None:
                    # No event may be recorded on this thread: a graph may be captured on the stream
                    self._on_batch(CallBatch(calls, _last_end(calls)))
            finally:
                self._is_draining = False

    def on_call(
        self, reader: CallReader, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[CollectiveCall] | None:
        """Read the arguments of a call, before the original function runs and may change them."""
        process_group = reader.group(args, kwargs)
        if process_group is None:
            process_group = c10d.GroupMember.WORLD
        group = self.groups.find(process_group, point_to_point=reader.point_to_point)
        if group is None:
            return None  # this rank is not a member, or the original function will raise
        device_index = reader.device_index(args, kwargs) if group.on_device else ON_CPU
        if group.on_device and device_index == ON_CPU:
            group = self.groups.host_record(group)  # a second backend, for tensors in host memory
        phase = OTHER if self._phase_timer is None else self._phase_timer.current
        calls = [
            CollectiveCall(op, group, size, dtype, phase)
            for op, size, dtype in reader.payloads(args, kwargs)
        ]
        if reader.payload_times_group_size:
            calls[0].payload_bytes *= group.size
        is_marked = is_captured = False
        try:
            if self._coalescing and process_group in self._coalescing:
                self._record_coalesced(calls, process_group)
            elif not reader.use_group_sequence:
                group.recorded += 1
            elif group.counts_calls:
                group.begin_count(calls, process_group)
            is_marked = device_index == ON_CPU or self._mark_start(calls, device_index)
            is_captured = not is_marked
        finally:
            self._number(calls, reader, is_captured=is_captured)
            if not is_marked:
                self._leave_out(calls)
                if reader.use_group_sequence:
                    group.end_count(calls)
        return calls if is_marked else None

    def on_return(
        self,
        reader: CallReader,
        calls: list[CollectiveCall],
        work: Any,
        started_ns: int,
        ended_ns: int,
    ) -> None:
        """Record the end of the calls. For asynchronous calls, arrange to record their end."""
        if reader.use_group_sequence:
            calls[0].group.end_count(calls)
        try:
            if reader.has_future:
                self._record_end(calls, work, started_ns, ended_ns)
            else:
                self._keep_handles(calls, work, started_ns)
        except BaseException:
            self._under_way.difference_update(calls)
            self._leave_out(calls)
            raise

    def _number(
        self, calls: list[CollectiveCall], reader: CallReader, *, is_captured: bool
    ) -> None:
        """Add calls to their rank set, with a number if all members issue them in this order.

        A call that becomes part of a graph does not run, and ranks may capture graphs differently
        often.
        """
        rank_set = calls[0].group.rank_set
        if not (is_captured or reader.point_to_point) and (
            get_ident() == self._training_thread or self._is_training_thread()
        ):
            rank_set.issued += 1
            calls[0].sequence = rank_set.issued
        rank_set.recent.extend(calls)

    def _is_training_thread(self) -> bool:
        return is_training_thread(self._training_thread)

    def _record_end(
        self, calls: list[CollectiveCall], work: Any, started_ns: int, ended_ns: int
    ) -> None:
        asynchronous = work is not None and hasattr(work, "get_future")
        on_device = calls[0].start_event is not None
        future = None
        if asynchronous and not on_device and calls[0].timed:
            try:
                future = work.get_future()
            except RuntimeError:  # gloo's reduce_scatter has no future
                self._keep_handles(calls, work, started_ns)
                return
        if on_device:
            blocks = not asynchronous and self.stream_waits.blocks_compute(calls)
        else:
            blocks = get_ident() == self._training_thread
        for call in calls:
            call.start_ns = started_ns
            call.issued_ns = ended_ns if blocks else started_ns
            if not asynchronous:
                self._mark_end(call, ended_ns)
            elif on_device:
                self._find_end_on_device(call, work)
            elif future is not None:
                self._under_way.add(call)
                key = id(work)
                self._works[key] = (weakref.ref(work), call)
                future.add_done_callback(
                    lambda _, call=call, key=key: self._on_completed(call, key)
                )
        self._add(calls)

    def on_wait_start(self, work: Any) -> CollectiveCall | None:
        """Record that this thread begins to wait for an asynchronous call.

        Returns:
            The call; None if the call is unknown.
        """
        for message in self._messages.get(id(work), ()):
            self._record_wait(message)
        reference, call = self._works.pop(id(work), _NO_WORK)
        if call is None or reference() is not work:
            return None
        self._record_wait(call)
        return call

    def on_wait_end(self, work: Any, call: CollectiveCall | None = None) -> None:
        """Record the end of a wait, which is when a handle without a future is known to end.

        Args:
            work: The handle.
            call: What `on_wait_start` returned.
        """
        if call is not None and call.is_bound and not call.settled:
            self._mark_bound(call)
        messages = self._messages.pop(id(work), None)
        if messages:
            with MESSAGE_ENDS:
                self._mark_message_ends(messages)

    def on_error(self, call: CollectiveCall, error: BaseException | None) -> None:
        """Report a call that raised, unless the group refused the call before it was issued.

        A call that was interrupted by Ctrl-C or by the end of the script is not reported, because
        no other rank has failed.

        Args:
            call: The call.
            error: What it has raised.
        """
        group = call.group
        issued = group.num_issued()
        if issued is not None and issued < group.recorded:
            group.recorded = issued  # the arguments were wrong, so the group never saw the call
            if call.sequence and call.sequence == group.rank_set.issued:
                group.rank_set.issued -= 1
            call.sequence = 0
        elif self._on_failed is not None and call.sequence and isinstance(error, Exception):
            self._on_failed(call)

    def lose(self, call: CollectiveCall, error: BaseException) -> None:
        """Give up a call whose end could not be recorded, and raise the reason.

        Raises:
            BaseException: `error`, always.
        """
        self._under_way.discard(call)
        self._leave_out([call])
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame

    def wait_for_completion(self, timeout_seconds: float) -> None:
        """Wait until all asynchronous calls have ended, before the interpreter ends.

        If a backend's thread ran our callback after the interpreter has ended, the process would
        abort.
        """
        deadline = time.monotonic() + timeout_seconds
        while self._under_way and time.monotonic() < deadline:
            time.sleep(0.005)

    def _leave_out(self, calls: list[CollectiveCall]) -> None:
        """Give up calls that were not recorded completely, so that nothing waits for them."""
        self._left_out += 1
        CallBatch(calls).discard()

    def _mark_message_ends(self, messages: list[CollectiveCall]) -> None:
        on_device = any(call.start_event is not None for call in messages)
        if on_device and not self._may_record(len(messages)):
            return  # the messages stay untimed
        before: CollectiveCall | None = None
        for call in messages:
            if call.settled or call.is_lost:
                continue
            if before is not None and call.wait_ns:
                call.wait_ns = before.end_ns  # each instant of the wait counts for one call only
            self._mark_end(call, perf_counter_ns())
            call.timed = True
            before = call

    def _find_end_on_device(self, call: CollectiveCall, work: Any) -> None:
        """Record the end of an asynchronous call in a sampled step, else prepare for its wait.

        The future of a call on a device is complete at once. Waiting for it makes the current
        stream wait, so that no stream of the script may be the current one. A callback would run on
        the next stream of torch's pool, which somebody may use. Waiting for the handle itself would
        release the tensors that it keeps alive for the script.
        """
        key = id(work)
        self._works[key] = (weakref.ref(work, partial(self._forget, key, call)), call)
        stream = self._private_stream(call.group) if self.is_sampled else None
        if stream is None:
            call.is_bound = True
            return
        with self._accelerator.on_stream(stream):
            work.get_future().wait()
        call.end_event = self.events.record(stream)

    def _private_stream(self, group: Group) -> Stream | None:
        """Return the stream that waits for the calls of a group. Groups that ended leave theirs."""
        streams, device = self._private_streams, self.stream_waits.device_index
        if (group, device) not in streams:
            with self._making_streams:
                self._make_private_stream(group, device)
        return streams[group, device]

    def _make_private_stream(self, group: Group, device: int | None) -> None:
        streams = self._private_streams
        ended = (key for key in streams if key[1] == device and key[0].reference() is None)
        unused = next(ended, None)
        streams[group, device] = (
            self._accelerator.private_stream() if unused is None else streams.pop(unused)
        )

    def _mark_bound(self, call: CollectiveCall) -> None:
        """Mark that the current stream has waited for a call, which has ended before."""
        if self._may_record(1):
            call.end_event = self.events.record()
        else:
            call.timed, call.is_lost = False, True

    def _may_record(self, num_waits: int) -> bool:
        """Return whether events may be recorded on the current stream.

        If the stream captures a graph, the waits are counted as dropped.
        """
        waits = self.stream_waits
        return not waits.drops_in_capture(num_waits) and waits.is_on_device(
            self._accelerator.current_device()
        )

    def _record_wait(self, call: CollectiveCall) -> None:
        if call.start_event is not None:
            self.stream_waits.on_call_wait(call)
        elif get_ident() == self._training_thread and not call.end_ns:
            call.wait_phase = OTHER if self._phase_timer is None else self._phase_timer.current
            call.wait_ns = perf_counter_ns()

    def _keep_handles(self, calls: list[CollectiveCall], works: Any, started_ns: int) -> None:
        """Record calls without a future: a wait within the step is all that shows their end."""
        for call in calls:
            call.start_ns = call.issued_ns = started_ns
            call.timed = False
        handles = works if isinstance(works, list) else [works]
        # A batch returns one handle for each message, or one handle for all messages.
        calls_of = [[call] for call in calls] if len(handles) == len(calls) else [calls]
        for handle, messages in zip(handles, calls_of, strict=False):
            if hasattr(handle, "wait"):
                key = id(handle)
                self._messages[key] = messages
                weakref.finalize(handle, self._messages.pop, key, None).atexit = False
        self._add(calls)

    def _add(self, calls: list[CollectiveCall]) -> None:
        self._sees_device = self._sees_device or calls[0].start_event is not None
        self._calls.extend(calls)
        if len(self._calls) >= BATCH_CALLS:
            self._pass_batch_on()

    def _pass_batch_on(self) -> None:
        batch = self.drain()
        if self._on_batch is None:
            self.dropped_calls += batch.discard()
        else:
            self._on_batch(batch)

    def _on_completed(self, call: CollectiveCall, key: int) -> None:
        self._mark_end(call, perf_counter_ns())
        self._under_way.discard(call)
        if self._works.get(key, _NO_WORK)[1] is call:
            self._works.pop(key, None)

    def _forget(self, key: int, call: CollectiveCall, _: object) -> None:
        """Forget a call on a device, because nothing can wait for it by its handle any more."""
        self._works.pop(key, None)
        call.timed = call.timed and call.end_event is not None

    def _record_coalesced(
        self, calls: list[CollectiveCall], process_group: dist.ProcessGroup
    ) -> None:
        """Record calls of a coalescing block.

        torch issues the whole block when it ends, and the group counts the block as one call.
        """
        if not self._coalescing[process_group]:
            calls[0].group.recorded += 1
        for call in calls:
            call.timed = False

    def _mark_start(self, calls: list[CollectiveCall], device_index: int | None) -> bool:
        """Mark the start of the calls on the current stream.

        The times of the calls are lost if events cannot be read, or if this thread's current device
        is not the device of the payload: the current stream is not a stream of that device then.

        Returns:
            False if the stream is capturing a graph, so that the calls cannot be timed.
        """
        if device_index is None:
            device_index = calls[0].group.device_index
        if device_index is None:  # a barrier: on the current device, or the host waits for it
            device_index = self.stream_waits.device_index
        on_device = self.stream_waits.is_on_device(device_index)
        if on_device and self.stream_waits.drops_in_capture(len(calls), calls[0].group):
            return False
        is_lost = not on_device or self.events.disabled
        for call in calls:
            if not call.timed:  # in a coalescing block
                continue
            if is_lost:
                call.timed, call.is_lost = False, True
            else:
                call.start_event = self.events.record()
        return True

    def _mark_end(self, call: CollectiveCall, ended_ns: int) -> None:
        if call.start_event is not None:
            call.end_event = self.events.record()
        call.end_ns = ended_ns


def _is_marked(call: CollectiveCall) -> bool:
    """Return whether both ends of a call are marked, as far as events mark them."""
    return call.start_event is None or call.end_event is not None or not call.timed


def _last_end(calls: list[CollectiveCall]) -> Event | None:
    """Return the last event at the end of one of the calls; None if no end is marked."""
    return next((call.end_event for call in reversed(calls) if call.end_event is not None), None)
