"""Tests of `ExposedTimeCauses`: the split of exposed time, against values computed by hand."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest
from fakes.rank_sets import FakeGroup

from zerowatch.metrics.catalog import communication
from zerowatch.metrics.recorder import Recorder
from zerowatch.runtime.cross_rank.accounting.comm_costs import (
    CostTotals,
    ExposedTimeCauses,
    bus_bandwidth,
)


def split(**changed: float | None) -> ExposedTimeCauses:
    """Split 10 ms, all exposed, with 4 ms of waiting, 1 ms of latency and a volume ratio of 1.5.

    Arguments replace these values.
    """
    arguments = {
        "exposed": 0.010,
        "duration": 0.010,
        "wait": 0.004,
        "base_latency": 0.001,
        "volume_ratio": 1.5,
    }
    causes = ExposedTimeCauses()
    causes.add(**{**arguments, **changed})  # type: ignore[arg-type]
    return causes


def check(causes: ExposedTimeCauses, *expected: float) -> None:
    assert astuple(causes) == pytest.approx(expected, abs=1e-12)


def test_exposed_time_is_split_into_all_four_causes() -> None:
    check(split(), 0.004, 0.001, 0.005 / 3, 0.010 / 3)


def test_a_hidden_wait_is_no_imbalance() -> None:
    check(split(exposed=0.003, volume_ratio=None), 0.0, 0.001, 0.0, 0.002)


def test_time_exposed_beyond_the_transfer_is_imbalance() -> None:
    check(split(exposed=0.020, volume_ratio=None), 0.014, 0.001, 0.0, 0.005)


def test_a_short_transfer_is_all_latency() -> None:
    check(split(base_latency=0.5), 0.004, 0.006, 0.0, 0.0)


@pytest.mark.parametrize("volume_ratio", [None, 1.0, 0.7, 0.0])
def test_without_an_excess_nothing_is_redundant(volume_ratio: float | None) -> None:
    check(split(volume_ratio=volume_ratio), 0.004, 0.001, 0.0, 0.005)


def test_where_no_data_move_nothing_is_redundant_and_nothing_bandwidth() -> None:
    check(split(moves_data=False), 0.004, 0.006, 0.0, 0.0)


def test_nothing_exposed_has_no_cause() -> None:
    check(split(exposed=0.0), 0.0, 0.0, 0.0, 0.0)


def test_causes_are_never_negative_and_add_up_to_what_was_exposed(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(500):
        duration = chance.expovariate(100)
        causes = split(
            exposed=chance.choice((duration, duration * chance.random(), 2 * duration)),
            duration=duration,
            wait=duration * chance.choice((0.0, 1.0, chance.random())),
            base_latency=chance.expovariate(1000),
            volume_ratio=chance.choice((None, chance.uniform(0, 3))),
            moves_data=chance.choice((True, False)),
        )
        exposed = sum(astuple(causes))

        assert min(astuple(causes)) >= 0

        again = split(exposed=exposed, duration=0.0, wait=0.0)
        assert sum(astuple(again)) == pytest.approx(exposed, rel=1e-12)


@pytest.mark.parametrize(
    ("calls", "bandwidth"),
    [
        ([], None),
        ([(0.0, 0.5)], None),
        ([(100.0, 0.0)], None),
        ([(100.0, 0.5)], 200.0),
        ([(100.0, 0.5), (50.0, 1.0), (49.0, 1e-3)], 125.0),  # of 200 and 50
        ([(100.0, 0.5), (100.0, 0.0), (100.0, 1.0), (80.0, 0.1)], 200.0),
    ],
)
def test_the_bus_bandwidth_is_the_median_rate_of_calls_of_at_least_half_the_largest_size(
    calls: list[tuple[float, float]], bandwidth: float | None
) -> None:
    assert bus_bandwidth(calls) == bandwidth


def test_exposed_time_is_summed_by_role_and_our_own_by_phase() -> None:
    totals, recorder = CostTotals(), Recorder()
    dp, own = FakeGroup((0, 1)), FakeGroup((0, 1), role="zerowatch")
    totals.add_exposed(dp.run(ms=20, exposed_ms=11))
    totals.add_exposed(dp.run(ms=20, exposed_ms=5))
    totals.add_exposed(dp.run(ms=20, phase="eval"))  # blocks no training
    totals.add_exposed(dp.run(ms=20, phase="checkpoint"))
    totals.add_exposed(own.run(ms=3, phase="optimizer"))
    totals.add_exposed(own.run(ms=7, phase="other"))

    totals.publish(recorder)

    values = recorder.snapshot().values
    assert values[communication.COMM_EXPOSED_SECONDS] == pytest.approx(
        {("dp",): 0.016, ("zerowatch",): 0.010}
    )
    assert values[communication.COMM_OWN_EXPOSED_SECONDS] == pytest.approx(
        {("optimizer",): 0.003, ("other",): 0.007}
    )
    assert communication.COMM_CAUSE_SECONDS not in values  # without a wait they are unknown


def test_waits_transfers_and_causes_are_published_under_their_names() -> None:
    totals, recorder = CostTotals(), Recorder()
    totals.wait["dp"] = 3.0
    totals.transfer["tp"] = 5.0
    totals.causes = ExposedTimeCauses(imbalance=1, latency=2, redundancy=4, bandwidth=8)

    totals.publish(recorder)

    values = recorder.snapshot().values
    assert values[communication.COMM_WAIT_SECONDS] == {("dp",): 3.0}
    assert values[communication.COMM_TRANSFER_SECONDS] == {("tp",): 5.0}
    assert values[communication.COMM_CAUSE_SECONDS] == {
        ("imbalance",): 1,
        ("latency",): 2,
        ("redundancy",): 4,
        ("bandwidth",): 8,
    }
