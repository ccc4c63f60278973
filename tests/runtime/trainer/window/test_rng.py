"""Tests of `rng.py`: after a restore, each generator draws the same numbers again."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from zerowatch.runtime.common import accelerator
from zerowatch.runtime.trainer.window.rng import RngState


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_a_restored_state_draws_the_same_numbers_again() -> None:
    state = RngState.capture()
    first = drawn()

    state.restore()

    assert drawn() == first


@pytest.mark.parametrize("is_initialized", [True, False])
def test_the_generator_of_a_device_is_saved_only_if_the_device_is_in_use(
    monkeypatch: pytest.MonkeyPatch, is_initialized: bool
) -> None:
    taken, restored = torch.tensor([7], dtype=torch.uint8), []
    device = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: is_initialized,
        get_rng_state=lambda: taken,
        set_rng_state=restored.append,
    )
    monkeypatch.setattr(accelerator, "current", device)

    RngState.capture().restore()

    assert restored == ([taken] if is_initialized else [])
