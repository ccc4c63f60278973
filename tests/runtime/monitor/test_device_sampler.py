"""Tests of the sampler of devices: closing it closes each probe."""

from __future__ import annotations

from types import SimpleNamespace

from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.monitor.device_sampler import DeviceSampler


def test_a_probe_that_cannot_be_closed_keeps_no_other_open() -> None:
    closed: list[str] = []

    def fail() -> None:
        raise RuntimeError("the driver is gone")

    probes = [
        SimpleNamespace(device=name, read=dict, health=dict, close=close)
        for name, close in (("cuda:0", fail), ("cpu", lambda: closed.append("cpu")))
    ]
    fail_open = FailOpen()

    DeviceSampler(Recorder(), fail_open, probes, device_interval_seconds=1.0).close()

    assert closed == ["cpu"]
    assert fail_open.failures == {"devices": 1}
