"""Runs every n-th step under PyTorch's profiler: verifies the measured times, writes traces.

This is off by default. The first profiled step takes a second longer, the profiler slows every
profiled step, and on a device the end of the step waits for the device. A profile starts and ends
with a step, on the training thread. The watch thread reads the events of the profile.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch._C._autograd import _profiler_enabled
from torch.autograd import profiler as autograd_profiler
from torch.profiler import record_function

from ...metrics.catalog import communication
from ...metrics.recorder import Recorder
from ...metrics.step_record import StepRecord
from ..collectives.comm_time import Interval, IntervalUnion
from ..common import accelerator
from ..common.patching import PatchSet
from .trace_files import TraceFiles

# Profiles that wait to be read, each of some megabytes. With so many, no further step is profiled.
MAX_UNREAD = 8
# The name of the profiler event that spans the step.
MARK = "zerowatch: profiled step"
# Prefixes of events of the training thread that are not operators, such as waits.
_NOT_COMPUTE = ("autograd::", "c10d::", "profiler::")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCommOverlap:
    """The seconds of a step with only compute, only communication, both, or neither.

    The four parts add up to the length of the step. On CPU, compute is the time in operators on the
    training thread, and time in Python counts as idle.
    """

    compute: float
    comm: float
    overlap: float
    idle: float

    @property
    def seconds(self) -> float:
        """The length of the step."""
        return self.compute + self.comm + self.overlap + self.idle

    def ratios(self) -> dict[str, float]:
        """Return each part as a share of the step's length."""
        seconds = self.seconds
        if not seconds:
            return {}
        return {
            "compute": self.compute / seconds,
            "comm": self.comm / seconds,
            "overlap": self.overlap / seconds,
            "idle": self.idle / seconds,
        }


class ProfiledSteps:
    """Profiles each step whose number is a multiple of `every_steps`, unless another profile runs.

    Only one profile can run at a time, because a second profile silently empties the first. If the
    script starts a profile, the profile of this class therefore ends first.
    """

    def __init__(
        self,
        every_steps: int,
        recorder: Recorder,
        *,
        on_device: bool,
        traces: TraceFiles | None = None,
    ) -> None:
        self._every_steps, self._traces = every_steps, traces
        self._recorder = recorder
        self._on_device = on_device
        self._profile: Any = None
        self._mark: Any = None
        self._patches = PatchSet()
        self._finished: deque[tuple[int, Any]] = deque()  # read by the watch thread, once a second

    def on_step_end(self, step: int) -> None:
        """End the running profile, and start one if the next step is due. Training thread only."""
        if self._profile is not None:
            self._finished.append((step, self._stop()))
        is_due = (step + 1) % self._every_steps == 0 and len(self._finished) < MAX_UNREAD
        if is_due and not _another_profile_runs():
            self._start()

    def compare(self, record: StepRecord) -> None:
        """Publish the profile of this step, if the step was profiled. Watch thread only."""
        waiting = self._finished
        # After a checkpoint was loaded, steps have lower numbers than a profile from before.
        while waiting and (waiting[0][0] <= record.step or waiting[0][0] > waiting[-1][0]):
            step, results = waiting.popleft()
            try:
                if self._traces is not None:
                    self._traces.save(step, results)
            finally:
                if step == record.step:  # else its record was lost
                    self._publish(record, results)

    def _publish(self, record: StepRecord, results: Any) -> None:
        overlap = read_overlap(results.events(), on_device=self._on_device)
        if overlap is None:
            return
        with self._recorder.commit():
            for part, ratio in overlap.ratios().items():
                self._recorder.set(communication.STEP_TIME_RATIO, ratio, part)
            if record.comm_exposed_seconds is not None:
                error = abs(record.comm_exposed_seconds - overlap.comm) / overlap.seconds
                self._recorder.set(communication.COMM_EXPOSED_ERROR_RATIO, error)

    def close(self) -> None:
        """Discard the running profile, if any. Safe to call twice."""
        if self._profile is not None:
            self._stop()

    def close_after_fork(self) -> None:
        """Discard the running profile in a forked child, because it belongs to the parent."""
        self._profile = None
        self._patches.restore()
        atexit.unregister(self.close)

    def _start(self) -> None:
        profile: Any = autograd_profiler.profile(
            use_kineto=True, use_device=accelerator.current.kind if self._on_device else None
        )
        profile.__enter__()
        atexit.register(self.close)  # torch crashes if a profile outlives the interpreter
        self._profile, self._mark = profile, record_function(MARK)
        self._mark.__enter__()
        owner = autograd_profiler.profile
        for name in ("_prepare_trace", "__enter__"):
            self._patches.add(owner, name, self._close_first)

    def _stop(self) -> Any:
        profile, self._profile = self._profile, None
        self._patches.restore()
        self._mark.__exit__(None, None, None)
        profile.__exit__(None, None, None)
        atexit.unregister(self.close)
        return profile.kineto_results

    def _close_first(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def closing(*args: Any, **kwargs: Any) -> Any:
            self.close()
            return original(*args, **kwargs)

        return closing


def read_overlap(events: Iterable[Any], *, on_device: bool) -> ComputeCommOverlap | None:
    """Split the marked step by Kineto's events. Return None if the mark is missing.

    On a device all kernels count. Kernels of the collective backend are communication, the rest is
    compute. On CPU, compute is the time of operators on the training thread, and the prefix of
    gloo's events identifies communication.
    """
    events = list(events)
    marks = [event for event in events if event.name() == MARK and not _is_on_device(event)]
    if not marks:
        return None
    mark = marks[-1]
    compute: list[Interval] = []
    comm: list[Interval] = []
    for event in events:
        name = event.name()
        if on_device:
            if _is_on_device(event) and not event.is_user_annotation():
                is_comm = name.startswith(accelerator.current.collective_backend)
                (comm if is_comm else compute).append(_interval(event))
        elif name.startswith("gloo:"):
            comm.append(_interval(event))
        elif event.start_thread_id() == mark.start_thread_id() and _computes(name):
            compute.append(_interval(event))
    return split_step(_interval(mark), compute, comm)


def split_step(
    step: Interval, compute: Iterable[Interval], comm: Iterable[Interval]
) -> ComputeCommOverlap:
    """Split a step by its compute and communication, which may overlap or exceed the step."""
    computing, communicating = _within(step, compute), _within(step, comm)
    compute_ns, comm_ns = IntervalUnion().add_ns(computing), IntervalUnion().add_ns(communicating)
    busy_ns = IntervalUnion().add_ns(computing + communicating)
    return ComputeCommOverlap(
        compute=(busy_ns - comm_ns) / 1e9,
        comm=(busy_ns - compute_ns) / 1e9,
        overlap=(compute_ns + comm_ns - busy_ns) / 1e9,
        idle=(step[1] - step[0] - busy_ns) / 1e9,
    )


def _within(step: Interval, intervals: Iterable[Interval]) -> list[Interval]:
    """Clip intervals to a step."""
    clipped = ((max(start, step[0]), min(end, step[1])) for start, end in intervals)
    return [(start, end) for start, end in clipped if start < end]


def _computes(name: str) -> bool:
    return "::" in name and not name.startswith(_NOT_COMPUTE)


def _is_on_device(event: Any) -> bool:
    on_device: bool = event.device_type() == accelerator.current.profiler_device
    return on_device


def _interval(event: Any) -> Interval:
    start: int = event.start_ns()
    return start, start + event.duration_ns()


def _another_profile_runs() -> bool:
    return _profiler_enabled() or autograd_profiler._is_profiler_enabled
