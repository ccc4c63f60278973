"""One step in so many under PyTorch's profiler, to check what is measured on the others.

It is off by default: the first profiled step takes a second longer, each is slowed by the profiler,
and on CUDA its end waits for the device. It begins and ends with steps, on the training thread;
what the profiler saw is read on the watch thread.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable
from typing import Any

from torch._C._autograd import _profiler_enabled
from torch.autograd import profiler as autograd_profiler
from torch.profiler import record_function

from ...metrics.catalog import communication
from ...metrics.recorder import Recorder
from ...metrics.step_record import StepRecord
from ..collectives.comm_time import Interval
from ..common import accelerator
from ..common.patching import AttributePatch
from .compute_comm_overlap import ComputeCommOverlap, step_shares

MARK = "zerowatch: profiled step"
# What the training thread runs between operators, waits included.
_NOT_COMPUTE = ("autograd::", "c10d::", "profiler::")


class ProfiledSteps:
    """Profiles each step whose number is a multiple of `every_steps`, unless another profile runs.

    Only one profile can run: a second silently empties the first. One that begins within ours ends
    it.
    """

    def __init__(self, every_steps: int, recorder: Recorder, *, on_device: bool) -> None:
        self._every_steps = every_steps
        self._recorder = recorder
        self._on_device = on_device
        self._profile: Any = None
        self._mark: Any = None
        self._wraps: list[AttributePatch] = []
        self._finished: tuple[int, Any] | None = None

    def step_ended(self, step: int) -> None:
        """End the profile under way, and begin one if the next step is due. Training thread."""
        if self._profile is not None:
            self._finished = step, self._stop()
        if (step + 1) % self._every_steps == 0 and not _another_runs():
            self._start()

    def compare(self, record: StepRecord) -> None:
        """Publish what the profiler saw of this step, if it did. Watch thread."""
        finished = self._finished
        if finished is None or finished[0] > record.step:
            return
        self._finished = None
        if finished[0] < record.step:  # its record was lost
            return
        shares = read_shares(finished[1].events(), on_device=self._on_device)
        if shares is None:
            return
        with self._recorder.commit():
            for part, ratio in shares.ratios().items():
                self._recorder.set(communication.STEP_TIME_RATIO, ratio, part)
            if record.comm_exposed_seconds is not None:
                off = abs(record.comm_exposed_seconds - shares.comm) / shares.seconds
                self._recorder.set(communication.COMM_EXPOSED_ERROR_RATIO, off)

    def close(self) -> None:
        """Drop the profile under way, if there is one. Safe to call twice."""
        if self._profile is not None:
            self._stop()

    def forget(self) -> None:
        """In a forked child: let go of the profile under way, which is the parent's."""
        self._profile = None
        for wrap in reversed(self._wraps):
            wrap.restore()
        self._wraps.clear()
        atexit.unregister(self.close)

    def _start(self) -> None:
        profile: Any = autograd_profiler.profile(
            use_kineto=True, use_device=accelerator.current.kind if self._on_device else None
        )
        profile.__enter__()
        atexit.register(self.close)  # torch crashes where a profile outlives the interpreter
        self._profile, self._mark = profile, record_function(MARK)
        self._mark.__enter__()
        owner = autograd_profiler.profile
        self._wraps = [
            AttributePatch(owner, name, self._make_way) for name in ("_prepare_trace", "__enter__")
        ]

    def _stop(self) -> Any:
        profile, self._profile = self._profile, None
        for wrap in reversed(self._wraps):
            wrap.restore()
        self._wraps.clear()
        self._mark.__exit__(None, None, None)
        profile.__exit__(None, None, None)
        atexit.unregister(self.close)
        return profile.kineto_results

    def _make_way(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def starts(*args: Any, **kwargs: Any) -> Any:
            self.close()
            return original(*args, **kwargs)

        return starts


def read_shares(events: Iterable[Any], *, on_device: bool) -> ComputeCommOverlap | None:
    """Split the marked step by kineto's events; None where the mark is missing.

    On CUDA what runs on the device counts, and a kernel of NCCL is communication. On CPU compute is
    what operators run on the training thread, and gloo names its own.
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
    return step_shares(_interval(mark), compute, comm)


def _computes(name: str) -> bool:
    return "::" in name and not name.startswith(_NOT_COMPUTE)


def _is_on_device(event: Any) -> bool:
    on_device: bool = event.device_type() == accelerator.current.profiler_device
    return on_device


def _interval(event: Any) -> Interval:
    start: int = event.start_ns()
    return start, start + event.duration_ns()


def _another_runs() -> bool:
    return _profiler_enabled() or autograd_profiler._is_profiler_enabled
