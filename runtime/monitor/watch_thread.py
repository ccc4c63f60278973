"""The watch thread: settles what the hooks noted, writes the log at once, publishes each second.

It takes batches of calls and closed steps from the training thread in order, and waits for neither
the device nor other ranks. A step costs it little, because with cold caches each line of Python
costs several times its usual price; the metrics of a second are cheaper worked out together.
"""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ...metrics.step_record import StepRecord
from ..collectives.batch import Batch
from ..collectives.call import CollectiveCall
from ..collectives.comm_time import CommTimeCounter
from ..collectives.events import EventPool
from ..collectives.totals import PeriodTotals, StepCommTotals
from ..common import accelerator
from ..common.fail_open import FailOpen
from ..instrumentation.raw_step import RawStep
from .device_sampler import DeviceSampler
from .step_metrics import Step, StepMetrics

Listener = Callable[[StepRecord], object]

TICK_SECONDS = 1.0
# How often to look whether a CUDA event or an asynchronous call has ended: less and less often.
FIRST_POLL_SECONDS, LAST_POLL_SECONDS = 0.005, 0.25
PATIENCE_SECONDS = 10.0
MAX_PENDING = 1024
# Of a step's calls, for its trace; of more than that the longest.
MAX_KEPT_CALLS, LONGEST_CALLS = 16384, 512


class WatchThread:
    """Runs until `stop`, which publishes what has arrived by then.

    Args:
        publisher: Turns steps into metrics.
        sampler: Reads the devices.
        take_memory: Takes what each step read of memory; returns the risk by device.
        events: Takes back the CUDA events that were read.
        fail_open: Guards what is called here.
        append: Writes a step's record to disk; called for each as soon as it is whole.
        keep_pace: Takes each step's nanoseconds by phase, and those of them that were blocked.
        listeners: Get the records of each second; the sequence may grow.
        trace: Gets the steps of each second, with their calls; None if no traces are made.
        duties: What else is to be done each second, by the name under which it may fail.
        on_device: Whether calls are timed by events of the accelerator.

    Attributes:
        dropped_steps: Steps lost because this thread could not keep up.
        dropped_calls: Calls lost likewise.
        untimed_calls: Calls whose end did not come in time.
        cpu_seconds: CPU time this thread has used.
    """

    def __init__(
        self,
        *,
        publisher: StepMetrics,
        sampler: DeviceSampler,
        take_memory: Callable[[RawStep], Mapping[str, float]],
        events: EventPool,
        fail_open: FailOpen,
        append: Listener,
        keep_pace: Callable[[Sequence[int], Sequence[int]], object],
        listeners: Sequence[Listener],
        trace: Callable[[Sequence[Step]], object] | None,
        duties: Mapping[str, Callable[[], object]],
        on_device: bool,
    ) -> None:
        self.dropped_steps = self.dropped_calls = self.untimed_calls = 0
        self.cpu_seconds = 0.0
        self._sampler = sampler
        self._take_memory = fail_open.wrap("memory", take_memory)
        self._events = events
        self._append = fail_open.wrap("run log", append)
        self._keep_pace = fail_open.wrap("step times", keep_pace)
        self._listeners = listeners
        self._trace = None if trace is None else fail_open.wrap("traces", trace)
        self._on_device = on_device
        self._inbox: queue.SimpleQueue[Batch | RawStep | None] = queue.SimpleQueue()
        self._pending: deque[Batch | RawStep] = deque()
        self._waiting_since = 0.0
        self._poll_seconds = FIRST_POLL_SECONDS
        self._tick_due = 0.0
        self._clock, self._comm, self._tally = CommTimeCounter(), StepCommTotals(), PeriodTotals()
        self._steps: list[Step] = []
        self._calls: list[CollectiveCall] = []
        self._settle = fail_open.wrap("step records", self._settle_pending)
        self._publish = fail_open.wrap("publish", publisher.publish)
        self._close = fail_open.wrap("devices", sampler.close)
        all_duties = {"devices": sampler.read_devices, **duties}
        self._duties = [fail_open.wrap(name, duty) for name, duty in all_duties.items()]
        self._thread = threading.Thread(target=self._run, name="zerowatch-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def enqueue(self, item: Batch | RawStep) -> None:
        """Hand over a batch of calls or a closed step. Called by the training thread."""
        if self._inbox.qsize() + len(self._pending) < MAX_PENDING:
            self._inbox.put(item)
        else:
            self.dropped_steps += isinstance(item, RawStep)
            self.dropped_calls += _batch_of(item).discard()

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Publish what is there and end. Safe to call twice, and where the thread never ran."""
        self._inbox.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        if self._on_device and not accelerator.current.allow_queries_while_capturing():
            self._events.disabled = True
        running = True
        while running:
            running = self._drain()
            self._settle(final=not running)
            now = time.monotonic()
            if now >= self._tick_due or not running:
                self._tick_due = now + TICK_SECONDS
                self.cpu_seconds = time.thread_time()
                self._publish_second()
                for duty in self._duties:
                    duty()
        self._close()

    def _drain(self) -> bool:
        """Wait for something to do; return False once told to stop."""
        try:
            item = self._inbox.get(timeout=self._poll_seconds if self._pending else TICK_SECONDS)
        except queue.Empty:
            self._poll_seconds = min(2 * self._poll_seconds, LAST_POLL_SECONDS)
            return True
        while item is not None:
            self._pending.append(item)
            if self._inbox.empty():
                return True
            item = self._inbox.get_nowait()
        return False

    def _settle_pending(self, *, final: bool) -> None:
        """Take, in order, everything whose end has come."""
        while self._pending:
            head = self._pending[0]
            if not head.settled():
                self._waiting_since = self._waiting_since or time.monotonic()
                if not final and time.monotonic() - self._waiting_since < PATIENCE_SECONDS:
                    return
                self.untimed_calls += _batch_of(head).expire()
            self._waiting_since, self._poll_seconds = 0.0, FIRST_POLL_SECONDS
            self._pending.popleft()
            self._take_calls(_batch_of(head))
            if isinstance(head, RawStep):
                self._take_step(head)

    def _take_calls(self, batch: Batch) -> None:
        batch.read_events(self._events)
        time_taken = self._clock.measure(batch)
        self._comm.add(batch.calls, time_taken)
        self._tally.add(batch.calls, time_taken)
        if self._trace is not None:
            self._calls.extend(batch.calls)
            if len(self._calls) > MAX_KEPT_CALLS:
                self._calls = heapq.nlargest(LONGEST_CALLS, self._calls, _duration)

    def _take_step(self, closed: RawStep) -> None:
        comm, self._comm = self._comm, StepCommTotals()
        calls, self._calls = self._calls, []
        risks = self._take_memory(closed) or {}
        record = closed.record(comm, self._sampler.device_readings, risks)
        self._keep_pace(closed.phase_ns, comm.blocked_ns)
        self._append(record)
        self._steps.append(Step(record, closed, calls))

    def _publish_second(self) -> None:
        """Publish what has come since the last time, and tell the listeners."""
        steps, self._steps = self._steps, []
        tally, self._tally = self._tally, PeriodTotals()
        self._publish(steps, tally)
        if self._trace is not None:
            self._trace(steps)
        for step in steps:
            for listener in self._listeners:
                listener(step.record)


def _batch_of(item: Batch | RawStep) -> Batch:
    return item.batch if isinstance(item, RawStep) else item


def _duration(call: CollectiveCall) -> int:
    return call.duration_ns
