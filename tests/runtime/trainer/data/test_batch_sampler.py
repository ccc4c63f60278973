"""Tests of the order of global batches: where each batch starts, also after changes of size."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from zerowatch.runtime.trainer.data.batch_sampler import BatchStart, GlobalBatchSampler


def sampler(
    num_samples: int = 22, batch_samples: int = 6, *, drop_last: bool = True, **options: Any
) -> GlobalBatchSampler:
    return GlobalBatchSampler(
        num_samples, batch_samples, **{"seed": 0, "shuffle": False, **options}, drop_last=drop_last
    )


@pytest.mark.parametrize(
    ("drop_last", "index", "start"),
    [
        (True, 0, BatchStart(0, 0, 0, 6)),
        (True, 2, BatchStart(2, 0, 12, 6)),
        (True, 3, BatchStart(3, 1, 0, 6)),
        (True, 7, BatchStart(7, 2, 6, 6)),
        (False, 3, BatchStart(3, 0, 18, 6)),
        (False, 4, BatchStart(4, 1, 0, 6)),
        (False, 11, BatchStart(11, 2, 18, 6)),
    ],
)
def test_a_batch_starts_after_the_batches_of_its_epoch(
    drop_last: bool, index: int, start: BatchStart
) -> None:
    assert sampler(drop_last=drop_last).start_of(index) == start


@pytest.mark.parametrize(
    ("index", "start"),
    [
        (1, BatchStart(1, 0, 6, 6)),
        (2, BatchStart(2, 0, 12, 4)),
        (3, BatchStart(3, 0, 16, 4)),
        (4, BatchStart(4, 1, 0, 4)),
        (8, BatchStart(8, 1, 16, 4)),
        (9, BatchStart(9, 2, 0, 4)),
        (11, BatchStart(11, 2, 8, 4)),
    ],
)
def test_after_a_change_batches_of_the_new_size_follow_the_samples_before(
    index: int, start: BatchStart
) -> None:
    changed = sampler()
    changed.resize(2, 4)

    assert changed.start_of(index) == start
    assert (changed.latest_samples, changed.batches_per_epoch) == (4, 5)


def test_the_last_batch_of_an_epoch_has_the_rest_of_the_samples() -> None:
    whole = sampler(drop_last=False)

    assert [whole.samples(index) for index in (3, 4)] == [[18, 19, 20, 21], [0, 1, 2, 3, 4, 5]]


def test_an_epoch_is_shuffled_once_also_if_its_batches_are_read_in_another_order() -> None:
    forth, back = sampler(shuffle=True, drop_last=False), sampler(shuffle=True, drop_last=False)

    epoch = [forth.samples(index) for index in range(8)]

    assert [back.samples(index) for index in reversed(range(8))] == epoch[::-1]
    for batches in (epoch[:4], epoch[4:]):
        assert sorted(chain(*batches)) == list(range(22))


@pytest.mark.parametrize(
    ("num_samples", "drop_last", "batches", "smallest"),
    [(22, True, 3, 6), (22, False, 4, 4), (24, False, 4, 6), (24, True, 4, 6), (5, True, 0, 6)],
)
def test_an_incomplete_batch_counts_unless_it_is_dropped(
    num_samples: int, drop_last: bool, batches: int, smallest: int
) -> None:
    each = sampler(num_samples, drop_last=drop_last)

    assert (each.batches_per_epoch, each.smallest_batch_samples) == (batches, smallest)


def test_only_batches_that_were_not_read_can_change() -> None:
    read = sampler()
    read.samples(4)
    read.samples(1)

    assert read.next_index == 5
    with pytest.raises(ValueError, match="batch 4 is made already; from batch 5 on its size can"):
        read.resize(4, 3)
    assert not read.has_changed
    read.resize(5, 3)
    assert read.has_changed


@pytest.mark.parametrize("size", [0, -3, 23])
def test_a_batch_has_samples_and_no_more_than_an_epoch(size: int) -> None:
    with pytest.raises(ValueError, match=f"a batch of {size} cannot be made of 22 samples"):
        sampler().resize(0, size)


def test_a_batch_may_be_an_epoch() -> None:
    whole = sampler()

    whole.resize(1, 22)

    assert len(whole.samples(1)) == 22


def test_a_change_replaces_changes_that_are_not_in_effect_yet() -> None:
    changed = sampler(60)

    changed.resize(3, 12)
    changed.resize(5, 24)
    changed.resize(3, 9)

    assert changed.state_dict() == [[0, 0, 0, 6], [3, 0, 18, 9]]


def test_the_last_64_changes_are_kept() -> None:
    changed = sampler(6000)

    for index in range(1, 100):
        changed.resize(index, 5 + index % 2)

    state = changed.state_dict()
    assert len(state) == 64
    assert [state[0][0], state[-1][0]] == [36, 99]


def test_loaded_changes_continue_at_the_position() -> None:
    saved, loaded = sampler(), sampler()
    saved.resize(2, 4)

    loaded.load_state_dict(saved.state_dict(), 7)

    assert loaded.state_dict() == [[0, 0, 0, 6], [2, 0, 12, 4]]
    assert loaded.next_index == 7
    assert loaded.start_of(8) == saved.start_of(8)
