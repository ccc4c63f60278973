"""Tests of the accelerator of this process: whether it is in use, and whether it has failed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from fakes.cuda_streams import FakeCuda
from fakes.sleeping_collectives import ManualClock

from zerowatch.runtime.common import accelerator


def test_a_device_whose_kernel_has_failed_is_recognized_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    device.current.run(20)
    started_ns = device.host.now_ns

    before = accelerator.has_failed()
    device.is_broken = True

    assert (before, accelerator.has_failed()) == (False, True)
    assert device.host.now_ns == started_ns


def test_a_device_that_is_not_in_use_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    device.is_broken = True
    monkeypatch.setattr(device, "is_initialized", lambda: False)

    assert not accelerator.has_failed()


@pytest.mark.parametrize(("kind", "index"), [("cuda", 1), ("cpu", None)])
def test_training_is_on_the_device_that_deepspeed_chose(
    monkeypatch: pytest.MonkeyPatch, kind: str, index: int | None
) -> None:
    device = FakeCuda(ManualClock())
    device.patch(monkeypatch)
    monkeypatch.setattr(device, "current_device", lambda: 1)
    chosen = SimpleNamespace(device_name=lambda: kind)
    deepspeed = SimpleNamespace(get_accelerator=lambda: chosen)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", deepspeed)

    assert accelerator.training_device_index() == index
