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


def test_new_ranks_that_get_the_state_of_another_rank_draw_different_numbers(seed: int) -> None:
    """Each generator differs between the new ranks, and repeats for the same rank and state."""
    torch.manual_seed(seed)
    state = RngState.capture()
    drawn_by: list[tuple[float, float, float]] = []
    for rank in (4, 5, 4):
        state.restore_for_new_rank(rank)
        drawn_by.append(drawn())
    torch.manual_seed(seed + 1)
    RngState.capture().restore_for_new_rank(4)
    of_another_state = drawn()

    first, second, again = drawn_by
    assert first == again
    assert all(one != other for one, other in zip(first, second, strict=True))
    assert all(one != other for one, other in zip(first, of_another_state, strict=True))


def test_the_generators_of_new_ranks_are_seeded_for_every_state() -> None:
    """The seed of numpy's generator is below 2**32."""
    for seed in range(20):
        torch.manual_seed(seed)
        RngState.capture().restore_for_new_rank(2**20)
