"""Runs the watch thread, which waits for the measurements of steps and passes them on in order.

The training thread enqueues batches of calls and raw steps. `StepAnalysis` gets them once their
measurements are complete: it writes the run log and publishes metrics.
The watch thread waits neither for other ranks nor, except a little at the end, for the device. It
takes the queue once a second and does all of its work then, because Python code with cold CPU
caches takes several times as long. Steps in between survive a kill in the ring of the run folder. A
step that would not, or whose memory sample may explain a kill, wakes the thread at once.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from ..collectives.call_batch import CallBatch
from ..collectives.call_recorder import CallRecorder
from ..collectives.unseen_calls import FlightRecorder
from ..common import accelerator
from ..common.fail_open import FailOpen
from ..common.gil_pauses import WORK_SECONDS, let_training_run
from ..common.hot_path import InboxFields
from ..instrumentation.device_phases import DevicePhases
from ..instrumentation.raw_step import RawStep
from ..memory.oom.killed_ranks import is_near_host_limit
from ..memory.step_sample import StepMemorySample
from .device_sampler import DeviceSampler
from .run_folder import RunFolder
from .step_analysis import StepAnalysis

logger = logging.getLogger(__name__)

# Time between two publications. In between, only an item that must be in the log soon wakes the
# thread.
TICK_SECONDS = 1.0
# Time between two queries of whether a CUDA event has passed or an asynchronous call has ended,
# while such an item waits. It doubles after each query, from the first to the last value.
FIRST_POLL_SECONDS = 0.005
LAST_POLL_SECONDS = 0.25
# Longest wait for the end of a step's calls and for the step's values on the device, in seconds and
# in steps: the host may be far ahead of the device.
PATIENCE_SECONDS = 60.0
PATIENCE_STEPS = 3
# Number of steps of which the slowest counts for PATIENCE_STEPS.
RECENT_STEPS = 64
# Number of steps that are processed between two writes to the run log.
STEPS_PER_WRITE = 64
# Maximum number of batches and steps in the queue. Further ones are dropped and counted.
MAX_PENDING = 1024
# Number of batches and steps in the queue from which on each wakes the thread. It is far below
# MAX_PENDING and the number of steps in the ring.
WAKING_ITEMS = 128
# Number of batches and steps in the queue above which the oldest step does not wait for the Flight
# Recorder, which may be read less than once a minute. The rest is for the steps of a second.
MAX_WAITING = MAX_PENDING // 2
# Number of batches whose measurements cannot be read, after which collectives are not timed.
MAX_LOST = 2
# Longest wait for the thread to end.
STOP_SECONDS = 5.0
# Longest part of it that the thread waits for the device, which may still run the last steps.
LAST_STEPS_SECONDS = 2.0


class WatchThread(InboxFields):
    """Completes the steps of one watch and passes them on, from `start` until `stop`.

    Args:
        analysis: Gets the complete steps, and publishes them once a second.
        sampler: Reads the devices.
        folder: Its ring gets each step.
        calls: Records the calls. Once a second it passes on those between steps; its pool gets the
            device events that were read.
        fail_open: Wraps all calls to the parts.
        device_phases: Measures the phases on the accelerator. None on CPU.
        device_index: torch's index of the accelerator that this rank trains on. None on CPU.
        flight_recorder: Finds calls that no wrapper has recorded. None with a DeepSpeed engine.
        work_seconds: CPU time after which it lets training run.

    Attributes:
        dropped_steps: Steps lost because this thread was too slow.
        dropped_calls: Calls lost because this thread was too slow.
        untimed_calls: Calls without a duration, because their end was not marked or not read in
            time.
        cpu_seconds: CPU time that this thread has used.
    """

    def __init__(
        self,
        *,
        analysis: StepAnalysis,
        sampler: DeviceSampler,
        folder: RunFolder,
        calls: CallRecorder,
        fail_open: FailOpen,
        device_phases: DevicePhases | None,
        device_index: int | None = None,
        flight_recorder: FlightRecorder | None = None,
        work_seconds: float = WORK_SECONDS,
    ) -> None:
        self.dropped_steps = self.dropped_calls = self.untimed_calls = 0
        self.cpu_seconds = 0.0
        self._analysis = analysis
        self._events = calls.events
        self._pass_on_calls = fail_open.wrap("collectives", calls.pass_on_between_steps)
        self._device_index, self._device_phases = device_index, device_phases
        self._may_query = True
        self._read_phases = (
            None
            if device_phases is None
            else fail_open.wrap("device phases", device_phases.read, is_kept=True)
        )
        self._is_logged, ring = folder.is_logged, folder.ring
        self._write_ring = None if ring is None else fail_open.wrap("step ring", ring.write)
        self._inbox: deque[CallBatch | RawStep] = deque()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._pending: deque[CallBatch | RawStep] = deque()
        self._max_pending, self._waking_items = MAX_PENDING, WAKING_ITEMS
        self._step_type = RawStep
        self._rest: CallBatch | None = None
        self._waiting_since = 0.0
        self._device_seconds = 0.0
        self._poll_seconds = FIRST_POLL_SECONDS
        self._tick_due = 0.0
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self.num_steps = 0
        self._fail_open = fail_open
        self._num_lost = 0
        self._flight_recorder = flight_recorder
        self._is_settled = fail_open.wrap("step measurements", _is_settled, is_kept=True)
        self._expired_calls = fail_open.wrap("step measurements", _expired_calls, is_kept=True)
        self._read_events = fail_open.wrap("collective times", self._read_batch, is_kept=True)
        self._finish = fail_open.wrap("step records", self._finish_pending)
        self._close = fail_open.wrap("devices", sampler.close)
        self._tasks: list[Callable[[], object]] = [fail_open.wrap("devices", sampler.read_devices)]
        self._is_stopping = self._is_abandoned = self._has_unwritten = False
        self._was_rung = False
        self._num_hurried = 0  # items at the head of the queue for which the thread was woken
        self._waiting_for_pass: list[threading.Event] = []
        self._thread = fail_open.thread("watch", self._run, work_seconds=work_seconds)

    def start(self, tasks: Mapping[str, Callable[[], object]]) -> None:
        """Start the thread.

        Args:
            tasks: Functions to call every second. The key is the name under which a failure of the
                function is counted.
        """
        self._tasks += [self._fail_open.wrap(name, task) for name, task in tasks.items()]
        self._thread.start()

    def _enqueue(self, item: CallBatch | RawStep) -> None:
        if isinstance(item, RawStep):
            self.num_steps += 1
        if len(self._inbox) + len(self._pending) >= MAX_PENDING:
            self.dropped_steps += isinstance(item, RawStep)
            self.dropped_calls += _batch_of(item).discard()
            return
        can_wait = len(self._inbox) < WAKING_ITEMS
        if self._is_logged and isinstance(item, RawStep):
            is_recoverable = self._write_ring is not None and self._write_ring(item) is True
            can_wait = is_recoverable and can_wait
            can_wait = can_wait and (item.memory is None or not self._may_explain_kill(item.memory))
        self._inbox.append(item)
        if not can_wait:
            self._bell.put(None)

    def enqueue_rest(self, batch: CallBatch) -> None:
        """Add the calls since the last step to the queue, when monitoring ends.

        If there were steps before, they do not count as exposed: the step that they blocked has not
        ended.
        """
        self._rest = batch
        self.enqueue(batch)

    def catch_up(self, timeout_seconds: float) -> None:
        """Wait until the thread has taken what is in the queue now, for a report on an error.

        Called on the training thread. What still runs on the device is not waited for.
        """
        ended = threading.Event()
        self._waiting_for_pass.append(ended)
        self._bell.put(None)
        if self._thread.is_alive():
            ended.wait(timeout_seconds)

    def _may_explain_kill(self, sample: StepMemorySample) -> bool:
        """Whether the next start needs this sample to explain why the kernel killed this process.

        The ring has no samples, so the log must have it soon.
        """
        return self._analysis.is_risky or is_near_host_limit(sample.readings.get("cpu", {}))

    def stop(
        self, timeout_seconds: float = STOP_SECONDS, *, waits_for_device: bool = False
    ) -> None:
        """Publish all queued steps and calls, then end the thread.

        Safe to call twice, and if the thread never ran. Steps that are not published in time, for
        example because a disk does not respond, are counted as dropped.

        Args:
            timeout_seconds: Longest wait for the thread to end.
            waits_for_device: Whether to wait for the steps that the device still runs, at most
                LAST_STEPS_SECONDS. What has not arrived by then is left out of them.
        """
        self._device_seconds = LAST_STEPS_SECONDS if waits_for_device else 0.0
        self._is_stopping = True
        self._bell.put(None)
        if not self._thread.was_started:
            self._close()
        elif self._is_abandoned:
            return
        elif not self._thread.join(timeout_seconds):
            self._is_abandoned = True
            logger.warning(
                "the watch thread did not end within %g s; %d step(s) may be neither in the run "
                "log nor in the metrics. Check whether the disk of run_log.folder responds.",
                timeout_seconds,
                self._drop_rest(),
            )
        elif num_lost := self._drop_rest():  # the thread, or its work on steps, had ended before
            logger.warning("%d step(s) are neither in the run log nor in the metrics", num_lost)

    @property
    def has_stepped(self) -> bool:
        """Whether a step has ended."""
        return bool(self._step_seconds)

    @property
    def is_abandoned(self) -> bool:
        """Whether the thread did not end in time, so that it may still be in a call."""
        return self._is_abandoned

    @property
    def is_complete(self) -> bool:
        """Whether the run log has all steps, so that nothing need be recovered from the ring."""
        return not (self._is_abandoned or self._has_unwritten or self._analysis.has_unwritten)

    def _drop_rest(self) -> int:
        """Count the steps that were not written as dropped, and return their number."""
        num_lost = sum(isinstance(item, RawStep) for item in [*self._pending, *self._inbox])
        num_lost += self._analysis.num_unlogged
        self._inbox.clear()
        self.dropped_steps += num_lost
        self._has_unwritten = self._has_unwritten or num_lost > 0
        return num_lost

    def _run(self) -> None:
        self._prepare_device()
        running = True
        while running and not self._is_abandoned:
            self._wait()
            running = not self._is_stopping  # all items before `stop` are in the queue by now
            waiting, self._waiting_for_pass = self._waiting_for_pass, []
            self._take_queue()
            now = time.monotonic()
            is_due = now >= self._tick_due or not running
            if is_due and running:
                self._pass_on_calls()  # into the queue
                self._take_queue()
                let_training_run()
            if running:
                self._finish()
            else:
                self._finish_last()
            if waiting or not (is_due and self._analysis.publishes_log):
                self._analysis.write_log()
            for ended in waiting:
                ended.set()
            let_training_run()
            if is_due:
                self._tick_due = now + TICK_SECONDS
                self.cpu_seconds = time.thread_time()
                self._analysis.publish()
                for task in self._tasks:
                    let_training_run()
                    task()
        self._close()

    def _prepare_device(self) -> None:
        """Prepare this thread for its queries of events, before the first one.

        If that fails, the thread makes none, and what it would read by them is lost.
        """
        index, prepare = self._device_index, accelerator.current.prepare_thread
        if index is None or self._fail_open.call("device of the watch thread", prepare, index):
            return
        self._may_query, self._flight_recorder = False, None  # its dump queries events, too
        self._events.disable(
            "the watch thread cannot query the device, so the loss on it is unknown, too"
        )
        if self._device_phases is not None:
            self._device_phases.give_up()

    def _wait(self) -> None:
        """Wait until a publication is due, or an item wakes the thread.

        While such an item, or one before it, waits for its measurements, the thread looks again and
        again.
        """
        seconds = max(0.0, self._tick_due - time.monotonic())
        if self._num_hurried:
            seconds = min(seconds, self._poll_seconds)
        try:
            self._bell.get(timeout=seconds)
            self._was_rung = True
            while not self._bell.empty():
                self._bell.get_nowait()
        except queue.Empty:
            if self._num_hurried:
                self._poll_seconds = min(2 * self._poll_seconds, LAST_POLL_SECONDS)

    def _take_queue(self) -> None:
        """Take all batches and steps from the queue. The thread hurries for them if it was rung."""
        while self._inbox:
            self._pending.append(self._inbox.popleft())
        if self._was_rung:
            self._was_rung, self._num_hurried = False, len(self._pending)

    def _finish_last(self) -> None:
        """Process the whole queue at the end, and wait a little for what the device still runs."""
        began, poll_seconds = time.monotonic(), FIRST_POLL_SECONDS
        while (left := began + self._device_seconds - time.monotonic()) > 0:
            if not self._finish(final=True, gives_up=False):
                return
            time.sleep(min(poll_seconds, left))
            poll_seconds = min(2 * poll_seconds, LAST_POLL_SECONDS)
        self._finish(final=True, gives_up=True)

    def _finish_pending(self, *, final: bool = False, gives_up: bool = False) -> bool:
        """Process the queue in order, up to the first item that still waits for measurements.

        An item whose measurements cannot be read loses them, and only them.

        Args:
            final: Whether monitoring ends. The Flight Recorder is then read at once.
            gives_up: Whether no item waits any longer.

        Returns:
            Whether an item waits.
        """
        if self._read_phases is not None:
            self._read_phases()
        while self._pending and not self._is_abandoned:
            head = self._pending[0]
            if not self._may_query:
                self._lose_events(head)
            is_settled = self._is_settled(head)
            if is_settled is None:
                self._lose(head)
            elif not is_settled:
                self._waiting_since = self._waiting_since or time.monotonic()
                waited_seconds = time.monotonic() - self._waiting_since
                if not gives_up and waited_seconds < self._patience_seconds():
                    return True
                self._expire(head)
            if self._waits_for_flight_recorder(head, at_once=final):
                return True
            self._waiting_since, self._poll_seconds = 0.0, FIRST_POLL_SECONDS
            self._pending.popleft()
            self._num_hurried = max(0, self._num_hurried - 1)
            if self._flight_recorder is not None:
                self._fail_open.call("flight recorder", self._add_unseen_calls, head)
            batch = _batch_of(head)
            self._take_calls(batch, step_ended=batch is not self._rest or not self._step_seconds)
            let_training_run()
            if isinstance(head, RawStep):
                self._take_step(head)
            if self._analysis.num_unlogged >= STEPS_PER_WRITE:
                self._analysis.write_log()
            let_training_run()
        return False

    def _waits_for_flight_recorder(self, item: CallBatch | RawStep, *, at_once: bool) -> bool:
        """Read the Flight Recorder if it is time. Return whether the step waits for that.

        If many others are in the queue, it does not wait, and its unseen calls are left out.
        """
        recorder, unseen = self._flight_recorder, getattr(item, "unseen", None)
        if recorder is None or unseen is None:
            return False
        is_read = self._fail_open.call("flight recorder", recorder.read_for, unseen, at_once)
        return is_read is False and len(self._pending) <= MAX_WAITING

    def _add_unseen_calls(self, item: CallBatch | RawStep) -> None:
        """Add the calls of a step that no wrapper has recorded, as far as they can be identified.

        Other calls are noted, because the Flight Recorder has them too.
        """
        recorder = self._flight_recorder
        assert recorder is not None
        batch = _batch_of(item)
        recorder.add_recorded(batch.calls)
        if isinstance(item, RawStep):
            batch.calls.extend(recorder.end_step(item.unseen))

    def _patience_seconds(self) -> float:
        return max(PATIENCE_SECONDS, PATIENCE_STEPS * max(self._step_seconds, default=0.0))

    def _expire(self, item: CallBatch | RawStep) -> None:
        """Give up the measurements of an item that are not complete yet."""
        if self._expired_calls(item) is None:
            self._lose(item)

    def _lose(self, item: CallBatch | RawStep) -> None:
        """Give up the measurements of an item that the device refuses to return.

        If this happens twice, collectives are no longer timed.
        """
        item.lose()
        self._num_lost += 1
        if self._num_lost >= MAX_LOST:
            self._events.disable(f"the measurements of {MAX_LOST} steps could not be read")

    def _lose_events(self, item: CallBatch | RawStep) -> None:
        """Give up what is read by events, which this thread must not query."""
        batch = _batch_of(item)
        if batch.anchor is not None:
            batch.lose()
        if isinstance(item, RawStep):
            item.lose_scalars()

    def _take_calls(self, batch: CallBatch, *, step_ended: bool) -> None:
        if not batch.is_read():
            if self._read_events(batch) is None:
                self._lose(batch)
            self.untimed_calls += sum(call.is_lost for call in batch.calls)
        if not step_ended:
            batch.take_out_of_training()
        self._analysis.add_calls(batch)

    def _read_batch(self, batch: CallBatch) -> bool:
        """Read the events of a batch; return True, because None means that this has failed."""
        batch.read_events(self._events)
        return True

    def _take_step(self, raw: RawStep) -> None:
        self._step_seconds.append(sum(raw.phase_ns) / 1e9)
        raw.use_device_phases()
        self._analysis.add_step(raw)


def _is_settled(item: CallBatch | RawStep) -> bool:
    return item.settled()


def _expired_calls(item: CallBatch | RawStep) -> int:
    return item.expire()


def _batch_of(item: CallBatch | RawStep) -> CallBatch:
    return item.batch if isinstance(item, RawStep) else item
