"""Tests that the callbacks are what their frameworks accept; `tests/examples/` trains with them.

They cover transformers_callback.py, accelerate_tracker.py and lightning_callback.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import deepspeed
import pytest
from accelerate.tracking import GeneralTracker
from transformers import TrainerCallback

import zerowatch
from zerowatch.runtime.instrumentation.engine_hooks import is_divided_by_lightning
from zerowatch.runtime.monitor.watch import NullWatch


@pytest.fixture(autouse=True)
def initialize(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(deepspeed, "initialize", deepspeed.initialize)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("TransformersCallback", TrainerCallback),
        ("AccelerateTracker", GeneralTracker),
    ],
)
def test_a_callback_is_of_the_class_that_its_framework_accepts(name: str, base: type) -> None:
    assert isinstance(getattr(zerowatch, name)(), base)


def test_a_tracker_without_an_engine_accepts_all_calls() -> None:
    tracker = zerowatch.AccelerateTracker()

    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 1.0}, step=1)
    tracker.finish()

    assert isinstance(tracker.tracker, NullWatch)


def test_lightnings_callback_is_of_the_class_that_lightning_accepts() -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs the extra lightning")

    assert isinstance(zerowatch.LightningCallback(), lightning.Callback)


def test_lightning_divides_losses_unless_a_module_optimizes_by_itself() -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs the extra lightning")
    automatic, manual = lightning.LightningModule(), lightning.LightningModule()
    manual.automatic_optimization = False

    divided = [is_divided_by_lightning(module) for module in (automatic, manual, object())]

    assert divided == [True, False, False]
