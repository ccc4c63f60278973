"""Tests of the start of a window: what the ranks exchange, and what they agree on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes.rank_threads import FakeHostGroup, on_ranks

from zerowatch.errors import BatchError
from zerowatch.runtime.trainer.window.micro_batches import Window
from zerowatch.runtime.trainer.window.window_agreement import (
    LocalBatches,
    TunerStatus,
    WindowAgreement,
    no_tuner_status,
    open_window,
)

SAMPLES = (3, 5, 11)
LENGTHS = (7, 13, 2)
MICRO_BATCH_SAMPLES = (2, 9, 4)


def opened(**by_rank: list[Any]) -> list[WindowAgreement]:
    """Open a window on three ranks, with an option's values by rank."""

    def open_on(host_group: FakeHostGroup) -> WindowAgreement:
        rank = host_group.rank
        return open_window(
            host_group,
            torch.zeros(SAMPLES[rank], LENGTHS[rank]),
            micro_batch_samples=MICRO_BATCH_SAMPLES[rank],
            exponent=-3,
            **{name: values[rank] for name, values in by_rank.items()},
        )

    return on_ranks(3, open_on)


def test_all_ranks_agree_on_the_sizes_and_each_has_its_own_part() -> None:
    agreements = opened()

    for rank, agreement in enumerate(agreements):
        assert agreement == WindowAgreement(
            window=Window(
                batch=agreement.window.batch,
                num_samples=SAMPLES[rank],
                total_samples=19,
                world_size=3,
                exponent=-3,
                longest=13,
            ),
            local_batches=LocalBatches(
                samples=[3, 5, 11], micro_batch_samples=[2, 9, 4], length=13
            ),
            guard_requested=False,
            records_agree=True,
            records_missing=False,
            tuner_statuses=[],
        )
        assert agreement.window.batch.shape == (SAMPLES[rank], LENGTHS[rank])


def test_a_window_without_exponent_divides_by_its_samples() -> None:
    (agreement,) = on_ranks(
        1, lambda group: open_window(group, torch.zeros(6, 2), micro_batch_samples=6)
    )

    assert agreement.window.exponent == 0
    assert agreement.window.divisor == 6.0
    assert agreement.records_agree
    assert not agreement.records_missing
    assert not agreement.guard_requested


def test_one_rank_that_requests_the_guard_gets_it_on_all() -> None:
    agreements = opened(requests_guard=[False, False, True])

    assert [each.guard_requested for each in agreements] == [True] * 3


@pytest.mark.parametrize(
    ("records", "agree", "missing"),
    [
        ([2**53 - 1] * 3, [True] * 3, False),
        ([8, 8, 7], [False] * 3, False),
        ([8, 8, -1], [False] * 3, True),
        ([-1, -1, -1], [True] * 3, True),
        ([0, 0, 0], [True] * 3, False),
    ],
)
def test_records_agree_if_all_ranks_have_the_same_and_are_missing_if_one_has_none(
    records: list[int], agree: list[bool], missing: bool
) -> None:
    agreements = opened(records=records)

    assert [each.records_agree for each in agreements] == agree
    assert [each.records_missing for each in agreements] == [missing] * 3


def test_all_ranks_get_the_status_of_each_ranks_tuner() -> None:
    statuses = [
        TunerStatus(exchanges_switch_request=True, oom_risk=0.25, is_on_trial=False),
        TunerStatus(exchanges_switch_request=False, oom_risk=0.5, is_on_trial=True),
        TunerStatus(exchanges_switch_request=False, oom_risk=0.125, is_on_trial=False),
    ]

    for agreement in opened(tuner_status=statuses):
        assert agreement.tuner_statuses == statuses
        assert agreement.local_batches.samples == [3, 5, 11]


def test_a_run_without_a_tuner_has_no_status() -> None:
    assert no_tuner_status() is None


def test_an_unusable_batch_is_an_error_on_all_ranks_that_names_the_rank() -> None:
    batches = [torch.zeros(2, 3), torch.zeros(0, 3), torch.zeros(2, 3), {"text": "words"}]

    def problem(host_group: FakeHostGroup) -> str:
        with pytest.raises(BatchError) as raised:
            open_window(host_group, batches[host_group.rank], micro_batch_samples=1)
        return str(raised.value)

    first, empty, third, words = on_ranks(4, problem)

    expected = "the local batch of rank 1, 3 cannot be trained on; see its error"
    assert first == third == expected
    assert "local batch is empty" in empty
    assert "got dict without any" in words


@pytest.mark.parametrize(("micro_batches", "largest"), [(1, [3, 5, 11]), (2, [2, 3, 6])])
def test_the_largest_micro_batch_of_each_rank_is_rounded_up(
    micro_batches: int, largest: list[int]
) -> None:
    batches = LocalBatches(samples=SAMPLES, micro_batch_samples=MICRO_BATCH_SAMPLES, length=13)

    assert batches.largest(micro_batches) == largest
