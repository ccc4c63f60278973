"""Tests of wrong arguments: an error names them before the engine is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zerowatch
from zerowatch.runtime import training_run
from zerowatch.runtime.monitor.watch import NullWatch
from zerowatch.runtime.trainer.data.training_data import TrainingData


def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    mean: torch.Tensor = model(batch).mean()
    return mean


@pytest.mark.parametrize(
    ("arguments", "kind", "parts"),
    [
        ({"model": None}, TypeError, ("model", "torch.nn.Module", "None")),
        ({"model": torch.nn.Linear}, TypeError, ("model", "torch.nn.Module", "Linear")),
        ({"loss": "mse"}, TypeError, ("loss", "loss(model, micro_batch)", "'mse'")),
        ({"balance": "yes"}, TypeError, ("balance", "True or False", "'yes'")),
        ({"loss_decomposable": 1}, TypeError, ("loss_decomposable", "True or False", "1")),
        ({"compression": "bf8"}, ValueError, ("compression", "bf16, fp16, int8, fp8", "'bf8'")),
        ({"activation_checkpointing": 7}, TypeError, ("activation_checkpointing", "class", "7")),
        ({"settings": "port=3"}, zerowatch.SettingsError, ("settings", "'port=3'")),
        (
            {"settings": "port=3", "tuner": "auto"},
            zerowatch.SettingsError,
            ("settings", "'port=3'"),
        ),
        (
            {"settings": {"tuner": "auto"}, "numerics": "bitwise"},
            zerowatch.SettingsError,
            ("tuner", "'auto'"),
        ),
    ],
)
def test_a_wrong_argument_is_named_before_the_engine_is_built(
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    kind: type[Exception],
    parts: tuple[str, ...],
) -> None:
    monkeypatch.setattr(training_run, "prepare_engine", engine_was_built)
    monkeypatch.setattr("zerowatch.runtime.entry_points._original", lambda: engine_was_built)
    right = {
        "model": torch.nn.Linear(1, 1),
        "config": {"train_micro_batch_size_per_gpu": 1},
        "loss": loss,
    }

    with pytest.raises(kind) as caught:
        zerowatch.TrainingRun(**{**right, **arguments})

    assert all(part in str(caught.value) for part in parts), caught.value


def engine_was_built(*args: Any, config: Any = None, **options: Any) -> None:
    raise AssertionError("the engine was built")


class Group:
    """Stand-in for the host group of two ranks."""

    rank, world_size = 0, 2


@pytest.mark.parametrize("size", [2.5, "4", None, True, 0, -2, 1])
def test_a_size_of_batches_that_is_no_count_is_an_error(size: Any) -> None:
    holder = SimpleNamespace(engine=SimpleNamespace(watch=NullWatch()))
    data = TrainingData(Group(), holder, balance=True)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="batch_samples") as caught:
        data.loader(list(range(8)), batch_samples=size)

    assert repr(size) in str(caught.value)
    assert "2 ranks" in str(caught.value)
