"""The watch thread: settles what the hooks noted, publishes it, writes the log, samples devices.

It takes batches of calls and closed steps from the training thread in order, and waits for neither
the device nor other ranks. All our Python outside the hooks runs here, within a budget.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from ..metrics.catalog import devices as device_metrics
from ..metrics.catalog.spec import MetricSpec
from ..metrics.recorder import Recorder
from ..metrics.step_record import StepRecord
from .collectives.batch import Batch
from .collectives.events import EventPool, allow_queries_while_capturing
from .collectives.tally import StepComm, Tally
from .devices.probe import DeviceProbe
from .hooks import Hooks
from .memory.probe import MemoryProbe
from .publisher import ClosedStep, Publisher

Item = Batch | ClosedStep | None
Readings = dict[str, dict[str, float]]

TICK_SECONDS = 1.0
POLL_SECONDS = 0.005  # while a CUDA event or an asynchronous call has not ended
PATIENCE_SECONDS = 10.0
MAX_PENDING = 1024
# A reading costs 0.1 ms CPU where caches are cold, and our threads may take 3 ms a second. Peaks
# are kept by the kernel from one reading to the next, so that shorter steps lose none.
MEMORY_SECONDS = 0.1


class WatchThread:
    """Runs until `stop`, which publishes what has arrived by then.

    Attributes:
        dropped_steps: Steps lost because this thread could not keep up.
        untimed_calls: Calls whose end did not come in time.
        cpu_seconds: CPU time this thread has used.
    """

    def __init__(
        self,
        *,
        recorder: Recorder,
        publisher: Publisher,
        events: EventPool,
        hooks: Hooks,
        memory: list[MemoryProbe],
        devices: list[DeviceProbe],
        device_seconds: float,
        duties: dict[str, Callable[[], object]],
        listeners: list[Callable[[StepRecord], None]],
        on_cuda: bool,
    ) -> None:
        self.dropped_steps = 0
        self.untimed_calls = 0
        self.cpu_seconds = 0.0
        self._recorder = recorder
        self._publisher = publisher
        self._events = events
        self._memory = [(p.device, hooks.guard(f"memory {p.device}", p.read)) for p in memory]
        self._probes = devices
        self._devices = [(p.device, hooks.guard(f"device {p.device}", p.read)) for p in devices]
        self._device_seconds = device_seconds
        self._duties = [hooks.guard(name, duty) for name, duty in duties.items()]
        self._listeners = listeners
        self._on_cuda = on_cuda
        self._inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._pending: deque[Batch | ClosedStep] = deque()
        self._waiting_since = 0.0
        self._comm = StepComm()
        self._readings: Readings = {}
        self._memory_due = self._device_due = self._tick_due = 0.0
        self._settle = hooks.guard("settle", self._settle_pending)
        self._thread = threading.Thread(target=self._run, name="zerowatch-watch", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def give(self, item: Batch | ClosedStep) -> None:
        """Hand over a batch of calls or a closed step. Called by the training thread."""
        if self._inbox.qsize() > MAX_PENDING:
            self.dropped_steps += isinstance(item, ClosedStep)
        else:
            self._inbox.put(item)

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Publish what is there and end. Safe to call twice, and where the thread never ran."""
        self._inbox.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        if self._on_cuda and not allow_queries_while_capturing():
            self._events.disabled = True
        running = True
        while running:
            running = self._receive()
            self._settle(final=not running)
            self._work_through_tick(final=not running)
            self.cpu_seconds = time.thread_time()
        for probe in self._probes:
            probe.close()

    def _receive(self) -> bool:
        """Wait for something to do; return False once told to stop."""
        wait = POLL_SECONDS if self._pending else TICK_SECONDS
        try:
            item = self._inbox.get(timeout=wait)
            while True:
                if item is None:
                    return False
                self._pending.append(item)
                item = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _settle_pending(self, *, final: bool) -> None:
        """Publish, in order, everything whose end has come."""
        while self._pending:
            head = self._pending[0]
            if not head.settled():
                self._waiting_since = self._waiting_since or time.monotonic()
                if not final and time.monotonic() - self._waiting_since < PATIENCE_SECONDS:
                    return
                self.untimed_calls += _batch_of(head).give_up()
            self._waiting_since = 0.0
            self._pending.popleft()
            self._count(_batch_of(head))
            if isinstance(head, ClosedStep):
                self._close_step(head)

    def _count(self, batch: Batch) -> None:
        batch.resolve(self._events)
        tally = Tally(batch.calls)
        self._publisher.publish_communication(tally)
        self._comm.add(tally)

    def _close_step(self, closed: ClosedStep) -> None:
        comm, self._comm = self._comm, StepComm()
        record = self._publisher.publish(closed, comm, self._read_memory(), self._readings)
        for listener in self._listeners:
            listener(record)

    def _read_memory(self) -> Readings:
        now = time.monotonic()
        if now < self._memory_due:
            return {}
        self._memory_due = now + MEMORY_SECONDS
        readings = ((device, read()) for device, read in self._memory)
        return {device: dict(states) for device, states in readings if states}

    def _work_through_tick(self, *, final: bool) -> None:
        now = time.monotonic()
        if now >= self._device_due:
            self._device_due = now + self._device_seconds
            self._read_devices()
        if now >= self._tick_due or final:
            self._tick_due = now + TICK_SECONDS
            for duty in self._duties:
                duty()

    def _read_devices(self) -> None:
        readings = ((device, read()) for device, read in self._devices)
        self._readings = {device: dict(values) for device, values in readings if values}
        with self._recorder.commit():
            for device, values in self._readings.items():
                for reading, value in values.items():
                    spec, *labels = _READINGS[reading]
                    self._recorder.set(spec, value, device, *labels)


def _batch_of(item: Batch | ClosedStep) -> Batch:
    return item.batch if isinstance(item, ClosedStep) else item


_READINGS: dict[str, tuple[MetricSpec, *tuple[str, ...]]] = {
    "utilization_ratio": (device_metrics.DEVICE_UTILIZATION,),
    "sm_active_ratio": (device_metrics.DEVICE_SM_ACTIVE,),
    "power_watts": (device_metrics.DEVICE_POWER,),
    "temperature_celsius": (device_metrics.DEVICE_TEMPERATURE,),
    "clock_hertz": (device_metrics.DEVICE_CLOCK,),
    "energy_joules": (device_metrics.DEVICE_ENERGY,),
    "nvlink_sent_bytes": (device_metrics.DEVICE_LINK_BYTES, "nvlink", "sent"),
    "nvlink_received_bytes": (device_metrics.DEVICE_LINK_BYTES, "nvlink", "received"),
    "pcie_sent_bytes": (device_metrics.DEVICE_LINK_BYTES, "pcie", "sent"),
    "pcie_received_bytes": (device_metrics.DEVICE_LINK_BYTES, "pcie", "received"),
}
