"""Tests of `LinkEstimate`: fits to durations of a link with known latency and bandwidth."""

from __future__ import annotations

import random

import pytest

from zerowatch.runtime.cross_rank.accounting.link_estimate import (
    DURATIONS_PER_SIZE,
    MAX_SIZES,
    MAX_TINY_CALLS,
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


def fitted(*calls: tuple[int, float]) -> Link:
    made = LinkEstimate()
    for size, seconds in calls:
        made.add(size, seconds)
    link = made.fit()
    assert link is not None
    return link


def test_the_latency_is_the_intercept_where_there_are_few_tiny_calls() -> None:
    link = fitted((16_384, 0.5), *[(16_384, 0.3)] * 3, (100_000, 0.3), (200_000, 0.5))

    # The slope is 2 us a byte over the pair with the larger sizes, and less over the two others.
    slope = 0.2 / (200_000 - 16_384)
    assert link == Link(
        latency=pytest.approx(0.3 - 16_384 * slope),  # type: ignore[arg-type]
        bandwidth=pytest.approx(1 / slope),  # type: ignore[arg-type]
        largest_bytes=200_000,
    )


@pytest.mark.parametrize(
    ("num_tiny", "size", "latency"),
    [(4, 16_384, 0.1), (5, 16_384, 0.7 - 16_384 * 1e-6), (5, 16_385, 0.1)],
)
def test_five_calls_of_at_most_16_kib_show_the_latency(
    num_tiny: int, size: int, latency: float
) -> None:
    made = LinkEstimate()
    for _ in range(num_tiny):
        made.add(size, 0.7)
    for number in range(1, MAX_SIZES + 1):  # they drop the tiny size from the fit
        made.add(number * 100_000, 0.1 + number * 0.1)

    link = made.fit()

    assert link is not None
    assert link.bandwidth == pytest.approx(1e6)
    assert link.latency == pytest.approx(latency)


def test_two_sizes_are_compared_if_one_is_twice_the_other() -> None:
    assert fitted((100_000, 0.1), (200_000, 0.3)).bandwidth == pytest.approx(5e5)
    assert fitted((100_000, 0.1), (199_999, 0.3)).bandwidth is None


def test_larger_calls_that_take_no_longer_show_no_bandwidth_and_the_smallest_the_latency() -> None:
    link = fitted((400_000, 0.2), (100_000, 0.3), (200_000, 0.25))

    assert link == Link(latency=0.3, bandwidth=None, largest_bytes=400_000)


def test_distant_sizes_weigh_more_in_the_slope() -> None:
    # Slopes: 5 us a byte at a distance of 100 kB, 1 us at 300 kB and a third of it at 200 kB.
    link = fitted((100_000, 0.1), (200_000, 0.6), (400_000, 0.4))

    assert link.bandwidth == pytest.approx(1e6)
    # What is left of the three is 0.0, 0.4 and 0.0 s; only for the second it is most of the time.
    assert link.latency == pytest.approx(0.4)


def test_of_each_size_the_last_64_durations_count() -> None:
    calls = [(100_000, 9.0)] * 200 + [(100_000, 0.2)] * 33 + [(100_000, 9.0)] * 31

    assert fitted(*calls).latency == 0.2
    assert DURATIONS_PER_SIZE == 33 + 31


def test_of_tiny_calls_the_last_256_count() -> None:
    half = MAX_TINY_CALLS // 2
    calls = [(100, 9.0)] * 1000 + [(100, 0.2)] * (half + 1) + [(100, 9.0)] * (half - 1)

    assert fitted(*calls).latency == 0.2


def test_the_best_bandwidth_is_the_least_of_three_fits_in_a_row_and_the_highest_so_far() -> None:
    made = LinkEstimate()
    made.add(1_000, 1e-3)
    best = []
    for seconds in (1.0, 0.5, 0.8, 0.25, 0.2, 0.1, 2.0, 2.0, 2.0):
        for _ in range(DURATIONS_PER_SIZE):
            made.add(1_001_000, 1e-3 + seconds)
        made.fit()
        best.append(made.best_bandwidth)

    assert best[:2] == [None, None]
    assert best[2:] == pytest.approx([1e6, 1.25e6, 1.25e6, 4e6, 4e6, 4e6, 4e6])


def test_of_the_sizes_the_32_that_were_used_last_are_kept() -> None:
    made, largest = LinkEstimate(), []
    made.add(100_000, 0.1)
    made.add(10**9, 0.1)
    for number in range(2, MAX_SIZES):
        made.add(100_000 + number, 0.1)
    made.add(100_000, 0.1)  # used again
    for size in (100_100, 100_200):
        link = made.fit()
        assert link is not None
        largest.append(link.largest_bytes)
        made.add(size, 0.1)

    assert largest == [10**9, 100_100]
    assert MAX_SIZES == 32
