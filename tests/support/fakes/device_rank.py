"""A rank whose collectives run on the streams of a fake device."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from fakes.cuda_streams import DeviceTensor, FakeCuda
from fakes.sleeping_collectives import ManualClock, add_up, instrumentation_over

from zerowatch.runtime.collectives.comm_time import CommTime
from zerowatch.runtime.collectives.totals import PeriodTotals, StepCommTotals
from zerowatch.runtime.common.phase_timer import PhaseTimer


class DeviceRank:
    """A rank that trains on one fake device; `cuda.current` is its compute stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = ManualClock()
        self.cuda = FakeCuda(self.host)
        self.cuda.patch(monkeypatch)
        self.places = [
            *((self.cuda.Stream, name) for name in ("wait_stream", "synchronize")),
            *((self.cuda.Event, name) for name in ("record", "wait", "synchronize")),
            (self.cuda, "synchronize"),
        ]
        self.before = self.standing()
        self.instrumentation = instrumentation_over(
            monkeypatch, self.cuda.all_reduce, self.host, "nccl"
        )
        self.recorder = self.instrumentation.call_recorder
        self.phases = PhaseTimer(self.host)
        self.recorder.connect(self.phases, None)
        self.compute, self.side = self.cuda.current, self.cuda.new_stream()
        self.batches = []

    @property
    def failures(self) -> Counter[str]:
        """The failures of the hooks, by name."""
        return self.instrumentation.fail_open.failures

    def standing(self) -> list[object]:
        return [vars(owner).get(name, "absent") for owner, name in self.places]

    def reduce(self, milliseconds: float, **options: object):
        return dist.all_reduce(torch.tensor([milliseconds]).as_subclass(DeviceTensor), **options)

    def begin(self, milliseconds: float, **options: object):
        return self.reduce(milliseconds, async_op=True, **options)

    def on_side(self):
        return self.cuda.stream(self.side)

    def end_step(self) -> None:
        self.batches.append(self.recorder.drain())

    def steps(self) -> list[StepCommTotals]:
        """Close the last step, let all of it end, and add each up."""
        self.end_step()
        self.host.elapse(1000)
        return add_up(self.batches, self.instrumentation)

    def period(self) -> PeriodTotals:
        """Return the sums over the calls of all steps, which were added up."""
        totals = PeriodTotals()
        for batch in self.batches:
            totals.add(batch.calls, CommTime(0.0, {}))
        return totals
