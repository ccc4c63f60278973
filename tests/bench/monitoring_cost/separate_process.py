"""What zerowatch's threads would still do if another process did all that needs no torch.

The watch thread still waits for the ends of collectives and for values on the device, and passes
each step on as bytes. Nothing else is left: no log, no metrics, no exchange, no forecasts, no hang
check. Another process receives the bytes (pickles, by a pipe) and ignores them. So it estimates
what moving the work out of the process would save, and is no monitoring.
"""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import pytest

from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.common.device_scalar import read
from zerowatch.runtime.entry_points import watch
from zerowatch.runtime.instrumentation.raw_step import RawStep
from zerowatch.runtime.monitor.comparison_monitor import ComparisonMonitor
from zerowatch.runtime.monitor.step_analysis import StepAnalysis
from zerowatch.runtime.monitor.watch_thread import WatchThread

SETTINGS = {"serve": {"enabled": False}, "run_log": {"enabled": False}}

_of_call = attrgetter(
    "op", "payload_bytes", "phase", "sequence", "start_ns", "end_ns", "issued_ns", "wait_ns",
    "timed", "is_bound", "is_lost", "group.size",
)  # fmt: skip
_of_step = attrgetter("step", "ended_at", "phase_ns", "coverage")
_of_counts = attrgetter("micro_batches", "samples", "tokens", "sequence_length", "skipped")


@contextmanager
def watched_from_outside(engine: Any) -> Iterator[Any]:
    """Watch an engine; its threads only pass on what they get.

    Raises:
        RuntimeError: A step was not passed on.
    """
    receiver = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert receiver.stdin is not None
    pipe, passed_on = receiver.stdin, []

    def pass_on_calls(analysis: StepAnalysis, batch: CallBatch) -> None:
        pipe.write(pickle.dumps([_of_call(call) for call in batch.calls]))

    def pass_on_step(analysis: StepAnalysis, raw: RawStep) -> None:
        scalars = (
            *map(read, (raw.gradient_norm, raw.learning_rate, raw.loss_scale)),
            raw.counts.loss(),
        )
        memory = None if raw.memory is None else (raw.memory.readings, raw.memory.shapes)
        pipe.write(pickle.dumps((_of_step(raw), _of_counts(raw.counts), scalars, memory)))
        passed_on.append(raw.step)

    def start(thread: WatchThread, tasks: object) -> None:
        thread._tasks = []
        thread._thread.start()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepAnalysis, "add_calls", pass_on_calls)
        patch.setattr(StepAnalysis, "add_step", pass_on_step)
        patch.setattr(StepAnalysis, "publish", lambda analysis: pipe.flush())
        patch.setattr(WatchThread, "start", start)
        patch.setattr(ComparisonMonitor, "start", lambda monitor: None)
        opened, first = watch(engine, SETTINGS), engine.global_steps + 1
        try:
            yield opened
        finally:
            opened.close()
            pipe.close()
            receiver.wait()
        if passed_on != list(range(first, engine.global_steps + 1)):
            raise RuntimeError(f"steps were lost: {opened.fail_open.failures}")
