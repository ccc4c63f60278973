"""Tests of the warning that all ranks are fed the same data."""

from __future__ import annotations

import logging
import math
import struct
import zlib

import numpy as np
import pytest

from zerowatch.metrics.catalog.across_ranks import RANKS_SAME_LOSS
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.cross_rank.rank_figures import (
    LOSS_HASH,
    LOSS_WINDOW,
    NUM_FIGURES,
    Figures,
)
from zerowatch.runtime.cross_rank.same_losses import WINDOW_STEPS, LossWindows, SameLosses


def windows_of(losses: list[float], first_step: int = 1) -> LossWindows:
    windows = LossWindows()
    for step, loss in enumerate(losses, first_step):
        windows.add(step, loss)
    return windows


def figures_of(windows: LossWindows) -> Figures:
    figures = np.full(NUM_FIGURES, np.nan, np.float32)
    figures[[LOSS_WINDOW, LOSS_HASH]] = windows.last
    return figures


def published(*ranks: LossWindows, world_size: int | None = None) -> float | None:
    recorder = Recorder()
    same = SameLosses(recorder, len(ranks) if world_size is None else world_size)
    same.publish({rank: figures_of(windows) for rank, windows in enumerate(ranks)})
    return recorder.snapshot().value(RANKS_SAME_LOSS)


def random_losses(seed: int, steps: int = 2 * WINDOW_STEPS) -> list[float]:
    return np.random.default_rng(seed).normal(3.0, 0.1, steps).tolist()


def test_equal_losses_of_all_ranks_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    same = SameLosses(Recorder(), 3)
    for steps in (2 * WINDOW_STEPS, 3 * WINDOW_STEPS):
        windows = windows_of(random_losses(1, steps))
        with caplog.at_level(logging.WARNING):
            same.publish(dict.fromkeys(range(3), figures_of(windows)))

    (record,) = caplog.records
    assert "all 3 data-parallel ranks" in record.getMessage()


def test_a_difference_in_the_last_digit_on_one_rank_is_a_difference() -> None:
    losses = random_losses(1)
    others = list(losses)
    others[WINDOW_STEPS + 7] = math.nextafter(others[WINDOW_STEPS + 7], 10)

    assert published(windows_of(losses), windows_of(losses)) == 1
    assert published(windows_of(losses), windows_of(losses), windows_of(others)) == 0


def test_losses_that_hardly_change_say_nothing() -> None:
    constant = windows_of([0.0] * 2 * WINDOW_STEPS)
    coarse = windows_of([round(2 + step / 100, 1) for step in range(2 * WINDOW_STEPS)])

    assert published(constant, constant) is None
    assert published(coarse, coarse) is None


def test_missing_and_nonfinite_losses_say_nothing() -> None:
    for bad in (math.nan, math.inf, None):
        windows = LossWindows()
        for step, loss in enumerate(random_losses(1)):
            windows.add(step, bad if step == WINDOW_STEPS + 3 else loss)
        assert published(windows, windows) is None


def test_one_rank_and_a_silent_rank_say_nothing() -> None:
    windows = windows_of(random_losses(1))

    assert published(windows) is None
    assert published(windows, windows, world_size=3) is None
    assert published(windows, LossWindows()) is None


def test_different_windows_are_not_compared() -> None:
    early = windows_of(random_losses(1, 2 * WINDOW_STEPS))
    late = windows_of(random_losses(1, 3 * WINDOW_STEPS))

    assert early.last[0] == 0 and late.last[0] == 1
    assert published(early, late) is None


def test_ranks_within_some_steps_of_each_other_have_the_same_last_window() -> None:
    """Windows are far apart late in a run, so reports at different moments can be compared."""
    losses = random_losses(1, 1000)

    seen = [windows_of(losses[:steps]).last for steps in range(64, 1000)]

    assert len(set(seen)) == len({window for window, _ in seen}) == 5
    assert [sum(window == last for window, _ in seen) for last in range(4)] == [32, 64, 128, 256]


@pytest.mark.parametrize("first_step", [1, 5000])
def test_a_resumed_run_begins_with_new_windows(first_step: int) -> None:
    losses = random_losses(1)

    assert windows_of(losses, first_step).last == windows_of(losses).last


@pytest.mark.parametrize("seed", range(20))
def test_different_data_in_low_precision_is_no_false_alarm(seed: int) -> None:
    """Losses in bf16 have two to three digits, so some steps are equal by chance."""
    trend = np.linspace(4.0, 3.5, 2 * WINDOW_STEPS)
    chance = np.random.default_rng(seed)

    def rank() -> LossWindows:
        noisy = trend + chance.normal(0, 0.01, len(trend))
        return windows_of((np.round(noisy * 64) / 64).tolist())

    assert published(rank(), rank()) in (0, None)


def test_a_hash_is_24_bits_of_the_checksum_of_32_losses() -> None:
    losses = random_losses(3, 64)

    window, hashed = windows_of(losses).last

    assert WINDOW_STEPS == 32
    assert window == 0
    assert hashed == zlib.crc32(struct.pack("32d", *losses[32:])) % 2**24


@pytest.mark.parametrize(("changes", "is_known"), [(15, False), (16, True)])
def test_half_of_the_losses_must_change(changes: int, is_known: bool) -> None:
    window = [float(min(number, changes)) for number in range(32)]

    _, hashed = windows_of([0.0] * 32 + window).last

    assert math.isfinite(hashed) is is_known


@pytest.mark.parametrize(
    ("steps", "window"), [(63, None), (64, 0), (95, 0), (96, 1), (159, 1), (160, 2), (288, 3)]
)
def test_windows_begin_at_32_64_128_and_256_steps(steps: int, window: int | None) -> None:
    last, _ = windows_of(random_losses(1, steps)).last

    assert (None if math.isnan(last) else last) == window


def test_a_rank_that_joined_within_a_window_has_no_hash() -> None:
    windows = LossWindows()
    for step in (0, *range(40, 64)):
        windows.add(step, float(step))

    assert windows.last[0] == 0
    assert math.isnan(windows.last[1])


def test_two_ranks_are_enough_and_the_warning_says_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    windows = windows_of(random_losses(1))

    assert published(windows, windows) == 1
    assert caplog.messages == [
        "the losses of all 2 data-parallel ranks are equal to the last digit over 32 steps, so the "
        "ranks are probably fed the same samples. Give each rank its own part of the data, such as "
        "by DistributedSampler. Ignore this if the loss is that of all ranks together, as a "
        "contrastive loss over gathered features, or in a test that trains on one batch."
    ]


def test_different_losses_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert published(windows_of(random_losses(1)), windows_of(random_losses(2))) == 0
    assert caplog.messages == []
