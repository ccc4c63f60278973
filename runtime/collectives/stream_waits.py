"""Finds which collectives the compute stream waits for, and when that wait begins.

A call may be issued or waited for on a stream other than the compute stream. Such a call does not
block the compute stream by itself. The other stream carries the call until the compute stream or
the host waits for that stream.
`StreamWaitTracker` records which stream carries which calls. `StreamHooks` wraps the functions by
which streams and the host wait.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Protocol

import torch

from ..common import accelerator
from ..common.accelerator import Event, Stream
from ..common.fail_open import FailOpen
from ..common.patching import PatchSet
from ..common.phase_timer import OTHER, PhaseTimer
from ..common.tracing import flags, is_traced, run_untraced
from .event_pool import EventPool
from .groups import CollectiveCall, Group, StreamWait

# Maximum number of calls that a stream carries. Older calls have probably ended.
MAX_CARRIED = 512
# Maximum number of events behind which a stream carries calls. Nothing waits for older ones.
MAX_EVENTS = 512
_NO_CALLS: Counter[Group] = Counter()


class StreamWaitTracker:
    """Records an event on the compute stream at each point where it begins to wait for calls.

    Attributes:
        dropped_in_capture: Number of calls and waits that were left out because a graph was being
            captured.
        replayed_calls: Number of calls in replays of captured graphs.
        training_thread: Identifier of the training thread.
        device_index: The device on which events are recorded; None until the device is initialized.
    """

    def __init__(self, events: EventPool) -> None:
        self.dropped_in_capture = self.replayed_calls = 0
        self._events = events
        self._accelerator = accelerator.current
        self._current_device = self._accelerator.current_device
        self._current_stream = self._accelerator.current_stream
        self._is_capturing = self._accelerator.is_capturing
        self._handle_of = self._accelerator.stream_handle
        self._phase_timer: PhaseTimer | None = None
        self.training_thread = get_ident()
        self.device_index: int | None = None
        self._compute: Stream | None = None
        # The graph that is being captured, and the calls in each captured graph, by group.
        self._capturing: Any = None
        self._captured: weakref.WeakKeyDictionary[Any, Counter[Group]] = weakref.WeakKeyDictionary()
        self._carried: dict[int | None, deque[CollectiveCall]] = {}
        # In the order in which they were recorded. No weak references: those to events of CUDA
        # outlive their event in torch 2.10 to 2.12, and end the process when they are read.
        self._recorded: OrderedDict[Event, tuple[CollectiveCall, ...]] = OrderedDict()

    def connect(self, phase_timer: PhaseTimer | None) -> None:
        """Make the current stream the compute stream, and tag waits with the timer's phase.

        This thread becomes the training thread.
        """
        self._phase_timer = phase_timer
        self.training_thread = get_ident()
        self.device_index = self._compute = None
        self._events.clear()
        if self._accelerator.is_initialized():
            self.device_index = self._accelerator.current_device()
            self._compute = self._current_stream()
        self._carried.clear()
        self._recorded.clear()

    def is_on_device(self, device_index: int | None) -> bool:
        """Return whether this thread's current device is this one and the one of the events.

        Events can be recorded only on streams of their own device. Asking for the current stream of
        another device would create a context there, with some hundred MiB.
        """
        if device_index is None:
            return False
        if self.device_index is None and self._accelerator.is_initialized():
            self.device_index = device_index
        return device_index == self.device_index == self._current_device()

    def drops_in_capture(self, num_calls: int, group: Group | None = None) -> bool:
        """Return whether the current stream captures a graph. If so, count the calls as dropped.

        Args:
            num_calls: The number of calls or waits.
            group: The group of calls that become part of the graph.
        """
        capturing = self._is_capturing()
        if capturing:
            self.dropped_in_capture += num_calls
            if group is not None and self._capturing is not None:
                self._captured[self._capturing][group] += num_calls
        return capturing

    def on_capture_begin(self, graph: Any) -> None:
        """Record that the calls from now on become part of a graph."""
        self._capturing, self._captured[graph] = graph, Counter()

    def on_capture_end(self) -> None:
        """Record that a graph is complete."""
        graph, self._capturing = self._capturing, None
        if graph is not None:
            self._accelerator.captured_graphs[id(graph)] = graph

    def on_graph_reset(self, graph: Any) -> None:
        """Forget a graph that releases what it has captured. It may capture again."""
        self._accelerator.captured_graphs.pop(id(graph), None)
        self._captured.pop(graph, None)

    def on_replay(self, graph: Any) -> None:
        """Count the calls of a graph that runs: neither Python nor their groups see them.

        If the graph is a whole step, its replay is the only sign of progress.
        """
        if self._phase_timer is not None and is_training_thread(self.training_thread):
            self._phase_timer.mark_replay()
        for group, num_calls in self._captured.get(graph, _NO_CALLS).items():
            group.replayed += num_calls
            self.replayed_calls += num_calls

    def blocks_compute(self, calls: Iterable[CollectiveCall]) -> bool:
        """Return whether synchronous calls block the compute stream.

        Calls that are issued on the compute stream block it. If the current stream is another
        stream, that stream carries the calls.
        """
        stream = self._current_stream()
        if self._compute is None:
            self._compute = stream
        if stream == self._compute:
            return True
        self._carry(stream, calls)
        return False

    def on_call_wait(self, call: CollectiveCall) -> None:
        """Record that the current stream is about to wait for an asynchronous call."""
        self._awaited(self._current_stream(), (call,))

    def on_stream_wait(self, waiting: Stream, stream: Stream) -> None:
        """Record that a stream is about to wait for all work queued on another stream."""
        carried = self._carried.get(self._handle_of(stream))
        if carried:
            self._awaited(waiting, carried)
            if waiting == self._compute:
                carried.clear()

    def on_event_record(self, event: Event, stream: Stream | None = None) -> None:
        """Record that an event marks this moment on a stream, by default the current stream."""
        if not self._carried:
            return
        carried = self._carried.get(self._handle_of(stream or self._current_stream()))
        self._recorded.pop(event, None)
        calls = _forget_done(carried) if carried else ()
        if calls:
            self._recorded[event] = calls
            if len(self._recorded) > MAX_EVENTS:
                self._recorded.popitem(last=False)  # in one step, as other threads record events

    def on_event_wait(self, event: Event, stream: Stream | None = None) -> None:
        """Record that a stream is about to wait for an event."""
        carried = self._recorded.get(event)
        if carried:
            self._awaited(stream or self._current_stream(), carried)
            if not any(map(_may_block, carried)):
                self._recorded.pop(event, None)

    def on_stream_sync(self, stream: Stream) -> None:
        """Record that the host is about to wait for a stream.

        Only a wait on the training thread holds training. That thread does not queue any compute
        while it waits. An event is recorded on the compute stream, and the device reaches the event
        once the compute stream has run out of work.
        """
        carried = self._carried.get(self._handle_of(stream))
        if carried and stream != self._compute and is_training_thread(self.training_thread):
            self._mark_wait(carried)
            carried.clear()

    def on_event_sync(self, event: Event) -> None:
        """Record that the host is about to wait for an event."""
        if is_training_thread(self.training_thread):
            self._mark_wait(self._recorded.pop(event, ()))

    def on_device_sync(self) -> None:
        """Record that the host is about to wait for all streams."""
        if not is_training_thread(self.training_thread):
            return
        for carried in list(self._carried.values()):
            self._mark_wait(carried)
            carried.clear()

    def _awaited(self, waiting: Stream, calls: Iterable[CollectiveCall]) -> None:
        if waiting == self._compute:
            self._mark_wait(calls)
        else:
            self._carry(waiting, calls)

    def _carry(self, stream: Stream, calls: Iterable[CollectiveCall]) -> None:
        carried = self._carried.setdefault(self._handle_of(stream), deque(maxlen=MAX_CARRIED))
        carried.extend(filter(_may_block, list(calls)))  # a copy: other threads may add calls

    def _mark_wait(self, calls: Iterable[CollectiveCall]) -> None:
        """Mark this moment on the compute stream for the calls that it has not waited for yet."""
        blocking = list(filter(_may_block, list(calls)))  # a copy: other threads may add calls
        if not blocking or self._compute is None or self.drops_in_capture(len(blocking)):
            return
        wait = StreamWait(self._events.record(self._compute), len(blocking))
        phase = OTHER if self._phase_timer is None else self._phase_timer.current
        for call in blocking:
            call.wait_phase = phase
            call.stream_wait = wait


def _may_block(call: CollectiveCall) -> bool:
    """Return whether the compute stream may still have to wait for a call.

    Settled calls ended long before this moment.
    """
    return call.stream_wait is None and not call.settled and call.start_event is not None


def _forget_done(carried: deque[CollectiveCall]) -> tuple[CollectiveCall, ...]:
    """Remove the first calls if the compute stream has waited for them, and return the others.

    Otherwise the calls of a stream that others wait for by events only would add up.
    """
    calls = tuple(carried)
    for index, call in enumerate(calls):
        if _may_block(call):
            return calls[index:]
        with suppress(ValueError):  # another thread has removed it
            carried.remove(call)
    return ()


def is_training_thread(training_thread: int) -> bool:
    """Return whether this is the training thread or a thread of autograd, which works for training.

    All ranks issue the calls of these threads in the same order. Python did not start the threads
    of autograd. Threads of the script, such as asynchronous checkpointing, may interleave
    collectives in any order, and their waits do not hold training.

    Args:
        training_thread: The identifier of the training thread.
    """
    return get_ident() == training_thread or isinstance(
        threading.current_thread(), threading._DummyThread
    )


class ReentryFlag(Protocol):
    """Holds, for each thread, whether the thread is inside a wrapped function."""

    value: bool


class StreamHooks:
    """Wraps the functions by which streams and the host wait, from `open` until `close`.

    The replays of captured graphs are counted too, because they may contain collectives.

    `open` does nothing if torch was built without the accelerator. Waits and events from C++ or
    from `torch.accelerator` are not seen. While the hooks are closed, or inside another wrapped
    function, a wrapper just calls the original function.

    Attributes:
        cost_ns: Nanoseconds that recording took.
    """

    def __init__(self, fail_open: FailOpen, waits: StreamWaitTracker, inside: ReentryFlag) -> None:
        self.cost_ns = 0
        self._inside = inside
        self._open = False
        self._patches = PatchSet()
        self._accelerator = accelerator.current
        device = self._accelerator
        # torch 2.13 has a class for the graphs of any accelerator, too.
        graphs = dict.fromkeys((device.Graph, getattr(torch.accelerator, "Graph", device.Graph)))
        of_graphs: tuple[tuple[str, Callable[..., Any]], ...] = (
            ("capture_begin", lambda graph, *_, **__: waits.on_capture_begin(graph)),
            ("capture_end", lambda *_: waits.on_capture_end()),
            ("replay", waits.on_replay),
            ("reset", waits.on_graph_reset),
        )
        # `Stream.wait_event` calls `Event.wait`, and `Stream.record_event` calls `Event.record`.
        hooks: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
            (device.Stream, "wait_stream", waits.on_stream_wait),
            (device.Stream, "synchronize", waits.on_stream_sync),
            (device.Event, "record", waits.on_event_record),
            (device.Event, "wait", waits.on_event_wait),
            (device.Event, "synchronize", waits.on_event_sync),
            (device.module, "synchronize", lambda *_, **__: waits.on_device_sync()),
            *((graph, name, hook) for graph in graphs for name, hook in of_graphs),
        )
        self._hooks = [
            (owner, name, fail_open.wrap("streams", hook)) for owner, name, hook in hooks
        ]

    def open(self) -> None:
        """Wrap the functions, unless they are wrapped already."""
        if self._open or not self._accelerator.is_built():
            return
        self._open = True
        for owner, name, hook in self._hooks:
            self._patches.add(owner, name, self._wrapper(hook))

    def close(self) -> None:
        """Restore the functions."""
        self._open = False
        self._patches.restore()

    def _wrapper(self, hook: Callable[..., Any]) -> Callable[[Any], Any]:
        inside = self._inside

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def hooked(*args: Any, **kwargs: Any) -> Any:
                is_compiled = is_traced() or flags._is_compiling_flag
                if is_compiled or not self._open or inside.value:
                    return original(*args, **kwargs)
                inside.value = True
                try:
                    entered_ns = perf_counter_ns()
                    hook(*args, **kwargs)
                    self.cost_ns += perf_counter_ns() - entered_ns
                    return original(*args, **kwargs)
                finally:
                    inside.value = False

            return run_untraced(hooked)

        return make
