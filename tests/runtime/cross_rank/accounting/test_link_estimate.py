"""Tests of `LinkEstimate`: fits to durations of a link with known latency and bandwidth."""

from __future__ import annotations

import random

import pytest

from zerowatch.runtime.cross_rank.accounting.link_estimate import (
    MAX_SIZES,
    SUSTAINED_FITS,
    Link,
    LinkEstimate,
)

SIZES = (1_000, 20_000, 400_000, 8_000_000)
REPEATS = 40


def estimate(
    seed: int,
    latency: float,
    bandwidth: float,
    *,
    sizes: tuple[int, ...] = SIZES,
    wild_share: float = 0.0,
    noise: float = 0.02,
) -> LinkEstimate:
    """Feed collectives of all sizes in a random order; some take up to 30 times as long."""
    chance = random.Random(seed)
    made = LinkEstimate()
    drawn = [size for size in sizes for _ in range(REPEATS)]
    chance.shuffle(drawn)
    for size in drawn:
        seconds = (latency + size / bandwidth) * chance.uniform(1 - noise, 1 + noise)
        if chance.random() < wild_share:
            seconds *= chance.uniform(2, 30)
        made.add(size, seconds)
    return made


def test_latency_and_bandwidth_are_found_with_a_quarter_of_outliers(seed: int) -> None:
    link = estimate(seed, 200e-6, 1e9, wild_share=0.25).fit()

    assert link is not None
    assert link.latency == pytest.approx(200e-6, rel=0.05)
    assert link.bandwidth == pytest.approx(1e9, rel=0.05)


def test_the_latency_is_found_though_nearly_all_time_goes_to_moving_data(seed: int) -> None:
    link = estimate(seed, 50e-6, 1e8).fit()

    assert link is not None
    assert link.latency == pytest.approx(50e-6, rel=0.1)
    assert link.bandwidth == pytest.approx(1e8, rel=0.05)


def test_the_latency_is_found_where_it_is_nearly_all_of_the_time(seed: int) -> None:
    link = estimate(seed, 5e-3, 50e9).fit()

    assert link is not None
    assert link.latency == pytest.approx(5e-3, rel=0.05)


def test_sizes_may_come_in_any_order() -> None:
    link = LinkEstimate()
    for size in (400, 100, 300, 200):
        link.add(size, 1e-3 + size * 1e-6)

    assert link.fit() == Link(
        latency=pytest.approx(1e-3, rel=1e-6),  # type: ignore[arg-type]
        bandwidth=pytest.approx(1e6, rel=1e-6),  # type: ignore[arg-type]
        largest_bytes=400,
    )


def test_of_one_size_only_all_is_latency_and_the_bandwidth_is_unknown(seed: int) -> None:
    link = estimate(seed, 1e-3, 1e9, sizes=(1_000_000,), noise=0.0).fit()

    assert link is not None
    assert link.latency == pytest.approx(2e-3)
    assert link.bandwidth is None
    assert link.largest_bytes == 1_000_000


def test_two_sizes_nearly_alike_show_no_bandwidth() -> None:
    link = LinkEstimate()
    link.add(1000, 1e-3)
    link.add(1001, 9e-3)

    fit = link.fit()

    assert fit is not None and fit.bandwidth is None


def test_nothing_is_known_before_the_first_collective() -> None:
    assert LinkEstimate().fit() is None


def test_a_link_predicts_how_long_a_collective_takes() -> None:
    link = Link(latency=1e-3, bandwidth=1e6, largest_bytes=100)

    assert link.transfer_seconds(500) == pytest.approx(1.5e-3)


def test_without_a_bandwidth_nothing_is_predicted_far_above_the_measured_sizes() -> None:
    link = Link(latency=1e-3, bandwidth=None, largest_bytes=250)

    assert link.transfer_seconds(500) == pytest.approx(1e-3)
    assert link.transfer_seconds(501) is None


def test_the_best_bandwidth_is_one_that_was_sustained(seed: int) -> None:
    made = estimate(seed, 50e-6, 1e8)

    seen = []
    for _ in range(SUSTAINED_FITS):
        made.fit()
        seen.append(made.best_bandwidth)

    assert seen[:-1] == [None] * (SUSTAINED_FITS - 1)
    assert seen[-1] == pytest.approx(1e8, rel=0.05)


def test_noise_around_a_high_latency_is_no_best_bandwidth() -> None:
    made = LinkEstimate()
    made.add(1000, 5e-3)
    made.add(1_000_000, 5.000001e-3)

    for _ in range(2 * SUSTAINED_FITS):
        made.fit()

    assert made.best_bandwidth is None


def test_new_sizes_evict_the_oldest() -> None:
    made = LinkEstimate()
    made.add(1, 100.0)
    for size in range(1000, 1000 + MAX_SIZES * 1000, 1000):
        made.add(size, 1e-3 + size / 1e9)

    link = made.fit()

    assert link is not None
    assert link.latency == pytest.approx(1e-3, rel=0.01)
    assert link.bandwidth == pytest.approx(1e9, rel=0.01)
