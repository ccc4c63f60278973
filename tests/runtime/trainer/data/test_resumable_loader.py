"""Tests of the loader: each sample once, in an order independent of ranks and workers."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Sequence
from copy import deepcopy
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from zerowatch.errors import CheckpointError
from zerowatch.runtime.trainer.data.batch_sampler import GlobalBatchSampler
from zerowatch.runtime.trainer.data.batch_split import SplitSchedule
from zerowatch.runtime.trainer.data.resumable_loader import (
    ResumableLoader,
    StreamLoader,
    resumable_loader,
)
from zerowatch.runtime.trainer.window.rng import RngState

SAMPLES, BATCH = 22, 6  # four samples are left over
BATCHES = SAMPLES // BATCH


class Numbers(Dataset[int]):
    """Dataset whose samples are their indices."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Breaking(Numbers):
    """Dataset with a temporary read error."""

    broken = False

    def __getitem__(self, index: int) -> int:
        if self.broken:
            raise OSError("the disk is gone")
        return index


def loader(dataset=None, *, rank=0, world_size=1, **options):
    return resumable_loader(
        dataset or Numbers(),
        **{"batch_samples": BATCH, **options},
        rank=rank,
        world_size=world_size,
    )


def batches(of, count: int) -> list[list[int]]:
    return [batch.tolist() for batch in islice(of.forever(), count)]


def global_batches(count: int, **options) -> list[list[int]]:
    """Return the global batches, as loaded by one rank without workers."""
    return batches(loader(**options), count)


def together(splits: Sequence[list[list[int]]]) -> list[list[int]]:
    """Concatenate the ranks' parts of each batch."""
    return [[*chain(*parts)] for parts in zip(*splits, strict=True)]


class ChangingSplits:
    """Source of splits that repeat in a cycle."""

    def __init__(self, *splits: tuple[int, ...]) -> None:
        self.splits = splits

    def split_at(self, index: int) -> tuple[int, ...]:
        return self.splits[index % len(self.splits)]


CHANGING = ChangingSplits((2, 2, 2), (4, 1, 1), (1, 2, 3))


def test_an_epoch_has_each_sample_once_except_the_incomplete_batch():
    seen = [sample for batch in loader() for sample in batch.tolist()]

    assert len(seen) == len(set(seen)) == BATCHES * BATCH


def test_epochs_differ_in_order_and_a_seed_repeats_it():
    first, again, other = global_batches(8), global_batches(8), global_batches(8, seed=1)

    assert first == again
    assert first != other
    assert first[:BATCHES] != first[BATCHES : 2 * BATCHES]


def test_without_shuffling_the_order_is_the_datasets():
    assert global_batches(4, shuffle=False)[2:] == [list(range(12, 18)), list(range(6))]


def test_each_loop_is_an_epoch_and_the_next_loop_continues():
    of = loader()

    loops = [[batch.tolist() for batch in of] for _ in range(2)]

    assert loops[0] + loops[1] == global_batches(2 * BATCHES)
    assert (of.epoch, of.position, len(of)) == (2, 2 * BATCHES, BATCHES)


def test_a_loop_continues_after_an_early_exit():
    of = loader()
    for _ in of:
        break

    assert [batch.tolist() for batch in of] == global_batches(BATCHES)[1:]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("splits", [None, CHANGING], ids=["even", "changing"])
def test_the_ranks_together_have_each_global_batch_exactly(num_workers, splits):
    ranks = [
        batches(
            loader(rank=rank, world_size=3, num_workers=num_workers, splits=splits),
            2 * BATCHES,
        )
        for rank in range(3)
    ]

    assert together(ranks) == global_batches(2 * BATCHES)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_at_every_position_loses_and_repeats_no_sample(num_workers):
    whole = global_batches(2 * BATCHES)
    states = []
    saved = loader(num_workers=num_workers)
    for _ in range(2 * BATCHES):
        states.append(saved.state_dict())
        next(saved.forever())

    for position, state in enumerate(states):
        resumed = loader(num_workers=num_workers)
        resumed.load_state_dict(state)

        assert resumed.position == position
        assert batches(resumed, 2) == (whole + global_batches(9)[6:])[position : position + 2]


def test_a_run_can_resume_with_other_ranks_workers_and_splits():
    saved = loader(rank=1, world_size=3, num_workers=2, splits=CHANGING)
    batches(saved, 4)

    resumed = [loader(rank=rank, world_size=2) for rank in range(2)]
    for each in resumed:
        each.load_state_dict(saved.state_dict())

    assert together([batches(each, 3) for each in resumed]) == global_batches(7)[4:]


def test_a_loader_can_be_reset_while_workers_have_loaded_ahead():
    of = loader(num_workers=2)
    batches(of, 2)
    state = of.state_dict()
    batches(of, 3)

    of.load_state_dict(state)

    assert batches(of, 3) == global_batches(5)[2:]


def test_a_schedule_counts_the_batches_that_workers_load_ahead():
    schedule = SplitSchedule(BATCH, 2)
    of = loader(rank=0, world_size=2, num_workers=2, splits=schedule)

    batches(of, 1)

    assert schedule.next_index == 1 + 2 * 2  # two batches of each worker


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_a_new_size_start_after_the_last_sample_of_the_previous_size(num_workers):
    of = loader(Numbers(120), num_workers=num_workers)
    seen = batches(of, 2)
    of.resize(of.next_index, 2 * BATCH)
    ahead = of.next_index - 2
    seen += batches(of, ahead + 1)
    of.resize(of.next_index, BATCH)
    seen += [batch.tolist() for batch in of]

    sizes = [len(batch) for batch in seen]
    assert sizes[: 2 + ahead + 1] == [BATCH] * (2 + ahead) + [2 * BATCH]
    assert sizes[-1] == BATCH
    assert [*chain(*seen)] == [*chain(*batches(loader(Numbers(120)), 20))]
    assert (of.epoch, of.batch_samples, of.batch_ratio) == (1, BATCH, 1.0)


def test_resuming_at_every_position_works_while_sizes_change():
    def changing(rank: int = 0, world_size: int = 1):
        of = loader(Numbers(60), rank=rank, world_size=world_size)
        for index, times in ((2, 2), (4, 4), (7, 1)):
            of.resize(index, times * BATCH)
        return of

    whole = batches(changing(), 12)
    assert [len(batch) // BATCH for batch in whole] == [1, 1, 2, 2, 4, 4, 4, 1, 1, 1, 1, 1]
    for position in range(12):
        saved = changing(rank=1, world_size=2)
        batches(saved, position)
        resumed = [loader(Numbers(60), rank=rank, world_size=3) for rank in range(3)]
        for each in resumed:
            each.load_state_dict(saved.state_dict())

        assert together([batches(each, 12 - position) for each in resumed]) == whole[position:]


def test_an_epoch_ends_if_fewer_samples_than_the_new_size_are_left():
    of = loader(Numbers(28))
    seen = batches(of, 3)
    of.resize(3, 4 * BATCH)
    seen += batches(of, 2)

    assert [len(batch) for batch in seen] == [BATCH] * 3 + [4 * BATCH] * 2
    assert of.epoch == 3
    assert len(of) == 1
    assert all(len(set(batch)) == len(batch) for batch in seen)


def test_the_size_of_a_batch_that_was_loaded_cannot_change():
    of = loader(Numbers(60))
    batches(of, 3)

    with pytest.raises(ValueError, match="from batch 3 on its size can change"):
        of.resize(2, 2 * BATCH)
    with pytest.raises(ValueError, match="a batch of 61 cannot be made of 60 samples"):
        of.resize(3, 61)


def test_batch_sizes_are_multiples_within_an_epoch():
    assert loader(Numbers(60)).batch_sizes == (6, 12, 24)
    assert loader(Numbers(23)).batch_sizes == (6, 12)


def test_without_drop_last_an_incomplete_batch_is_divided_in_proportion():
    options = {"drop_last": False, "splits": ChangingSplits((4, 2))}

    ranks = [batches(loader(rank=rank, world_size=2, **options), BATCHES + 1) for rank in range(2)]

    assert [len(splits[-1]) for splits in ranks] == [3, 1]
    assert sorted(chain(*together(ranks))) == list(range(SAMPLES))


def test_loading_does_not_advance_the_scripts_random_numbers():
    before = torch.get_rng_state(), random.getstate()

    batches(loader(), 2)
    batches(loader(num_workers=1), 2)

    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_a_batch_that_failed_to_load_is_loaded_again():
    data = Breaking()
    of = loader(data)
    batches(of, 1)
    data.broken = True
    with pytest.raises(OSError, match="disk"):
        batches(of, 1)
    data.broken = False

    assert batches(of, 1) == global_batches(2)[1:]


def test_samples_are_collated_by_collate_fn():
    assert next(iter(loader(collate_fn=len))) == BATCH


def test_the_state_of_other_data_raises_with_the_differing_setting():
    with pytest.raises(CheckpointError, match="seed=3, and here it is 0"):
        loader().load_state_dict(loader(seed=3).state_dict())
    with pytest.raises(CheckpointError, match="num_samples=99, and here it is 22"):
        loader().load_state_dict(loader(Numbers(99)).state_dict())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"batch_samples": 2, "world_size": 3},
            "3 ranks with at least one for each, got 2",
        ),
        ({"batch_samples": 40}, "22 samples, .* 40"),
        ({"batch_samples": 7, "drop_last": False, "world_size": 2}, "last batch has 1 samples"),
        ({"batch_size": 4}, "batch_size"),
        ({"dataset": object()}, "__len__ and __getitem__.* got object"),
        *(({"seed": seed}, "seed must be a whole") for seed in ("x", -1, 1.5, None, True, 2**63)),
        ({"shuffle": "no"}, r"shuffle must be one of .*, got 'no'"),
        ({"drop_last": 1}, "drop_last must be one of .*, got 1"),
    ],
)
def test_invalid_options_raise(options, problem):
    with pytest.raises(ValueError, match=problem):
        loader(**options)


class Stream(IterableDataset[int]):
    """Stream of integers; workers yield them in turn."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        step, first = (worker.num_workers, worker.id) if worker else (1, 0)
        return iter(ResumableCount(range(first, self.length, step)))


class ResumableCount:
    """Iterator with state_dict and load_state_dict."""

    def __init__(self, numbers: range) -> None:
        self.numbers, self.place = numbers, 0

    def __iter__(self):
        return self

    def __next__(self) -> int:
        if self.place == len(self.numbers):
            raise StopIteration
        self.place += 1
        return self.numbers[self.place - 1]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_resumes_at_every_position(num_workers):
    whole = batches(loader(Stream(), batch_samples=3, num_workers=num_workers), 10)
    of = loader(Stream(), batch_samples=3, num_workers=num_workers)

    for position in range(8):
        resumed = loader(Stream(), batch_samples=3, num_workers=num_workers)
        resumed.load_state_dict(of.state_dict())

        assert resumed.position == position
        assert batches(resumed, 2) == whole[position : position + 2]
        batches(of, 1)


class Endless(IterableDataset[int]):
    """Stream without end with a state; each pass yields the next eight integers."""

    failing: int | None = None  # the sample that raises an error once

    def __init__(self) -> None:
        self.place = [0, 0]  # samples of the passes before, and of this pass

    def __iter__(self):
        while self.place[1] < 8:
            fail_once(self, sum(self.place))
            self.place[1] += 1
            yield sum(self.place) - 1
        self.place[:] = self.place[0] + 8, 0

    def state_dict(self):
        return {"place": list(self.place)}

    def load_state_dict(self, state):
        self.place = state["place"]


class SharedState(Endless):
    """Stream whose state is a list that the stream itself changes."""

    def state_dict(self):
        return {"place": self.place}


class LastIterator(IterableDataset[int]):
    """Stream with the state of its last iterator, which a loaded state replaces for all passes.

    Hugging Face's IterableDataset does so unless its epoch is set.
    """

    failing: int | None = None

    def __init__(self) -> None:
        self.state: dict[str, int] | None = None
        self.start: dict[str, int] | None = None

    def __iter__(self):
        self.state = dict(self.start or {"place": 0})
        while self.state["place"] < 8:
            fail_once(self, self.state["place"])
            self.state["place"] += 1
            yield self.state["place"] - 1

    def state_dict(self):
        return None if self.state is None else dict(self.state)

    def load_state_dict(self, state):
        self.start = state


class Plain(IterableDataset[int]):
    """Stream without a state."""

    failing: int | None = None

    def __iter__(self):
        for number in range(8):
            fail_once(self, number)
            yield number


class StatefulIterator(Plain):
    """Stream whose iterator has a state."""

    def __iter__(self):
        return FailingCount(self)


class FailingCount(ResumableCount):
    def __init__(self, stream: Plain) -> None:
        super().__init__(range(8))
        self.stream = stream

    def __next__(self) -> int:
        fail_once(self.stream, self.place)
        return super().__next__()


def fail_once(stream: Any, number: int) -> None:
    if stream.failing == number:
        stream.failing = None
        raise OSError("read timed out")


STREAMS = [Endless, LastIterator, Plain, StatefulIterator]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", STREAMS)
def test_a_stream_resumes_in_the_same_pass_and_between_passes(dataset, num_workers) -> None:
    options = {"batch_samples": 2, "num_workers": num_workers}
    per_pass = 4 * max(1, num_workers)  # each worker reads the whole stream
    whole = batches(loader(dataset(), **options), 3 * per_pass)
    for num in (1, per_pass, per_pass + 1):
        for is_at_end in (False, True):
            of = loader(dataset(), **options)
            passes = of.forever()
            seen = [next(passes).tolist() for _ in range(num)]
            if is_at_end:
                seen += [batch.tolist() for batch in of]
            state = deepcopy(of.state_dict())

            resumed = loader(dataset(), **options)
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            seen += batches(resumed, 3 * per_pass - len(seen))

            assert seen == whole


@pytest.mark.parametrize("failing", range(8))
@pytest.mark.parametrize("dataset", [*STREAMS, SharedState])
def test_after_an_error_of_a_stream_the_batch_is_read_again(dataset, failing: int) -> None:
    whole = batches(loader(dataset(), batch_samples=2), 8)
    stream = dataset()
    stream.failing = failing
    of = loader(stream, batch_samples=2)
    seen: list[list[int]] = []

    with pytest.raises(OSError, match="timed out"):
        seen += (batch.tolist() for batch in of)
    state = deepcopy(of.state_dict())
    rest = batches(of, 8 - len(seen))

    assert seen == whole[: failing // 2]
    assert seen + rest == whole
    resumed = loader(dataset(), batch_samples=2)
    resumed.load_state_dict(state)
    assert batches(resumed, 8 - len(seen)) == rest


def torchdata_loader(dataset: Any, **options: Any) -> StatefulDataLoader:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        return StatefulDataLoader(dataset, **options)


def resumed_at(dataset, cuts: Sequence[int], **options) -> list[list[int]]:
    """Return the batches up to the last cut, if a new loader continues after each of them."""
    seen: list[list[int]] = []
    state = None
    for cut in cuts:
        of = loader(dataset(), batch_samples=2, **options)
        if state is not None:
            of.load_state_dict(state)
        seen += batches(of, cut - len(seen))
        assert of.position == cut
        state = deepcopy(of.state_dict())
    return seen


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dataset", STREAMS)
def test_a_stream_resumes_several_times_in_one_pass(dataset, num_workers: int) -> None:
    per_pass = 4 * max(1, num_workers)
    whole = batches(loader(dataset(), batch_samples=2, num_workers=num_workers), 2 * per_pass)

    for first in (0, per_pass):
        cuts = [first + 1, first + 2, first + 3, 2 * per_pass]
        assert resumed_at(dataset, cuts, num_workers=num_workers) == whole


@pytest.mark.parametrize("dataset", STREAMS)
def test_a_stream_that_was_read_again_after_an_error_can_be_resumed(dataset) -> None:
    whole = batches(loader(dataset(), batch_samples=2), 8)
    stream = dataset()
    stream.failing = 2
    of = loader(stream, batch_samples=2)
    with pytest.raises(OSError, match="timed out"):
        list(of)
    batches(of, 2)

    resumed = loader(dataset(), batch_samples=2)
    resumed.load_state_dict(deepcopy(of.state_dict()))

    assert batches(resumed, 5) == whole[3:]


class Noisy(IterableDataset[float]):
    """Stream without a state, which draws random numbers."""

    def __iter__(self):
        for _ in range(8):
            yield (random.random() + torch.rand(())).item()


class OwnOrder(IterableDataset[int]):
    """Stream without a state, whose workers each have an order of their own."""

    def __iter__(self):
        return iter(torch.randperm(8).tolist())


def test_resuming_a_stream_without_a_state_leaves_the_random_generators_as_they_were() -> None:
    of = loader(Noisy(), batch_samples=2)
    batches(of, 2)
    state, rng = deepcopy(of.state_dict()), RngState.capture()
    rest = batches(of, 2)
    resumed = loader(Noisy(), batch_samples=2)
    resumed.load_state_dict(state)

    rng.restore()

    assert batches(resumed, 2) == rest


def test_an_error_while_a_stream_is_read_again_leaves_the_random_generators_as_they_were() -> None:
    class Failing(Noisy):
        failing: int | None = None

        def __iter__(self):
            for number, value in enumerate(super().__iter__()):
                fail_once(self, number)
                yield value

    stream = Failing()
    of = loader(stream, batch_samples=2)
    batches(of, 2)
    stream.failing = 3
    resumed = loader(stream, batch_samples=2)
    resumed.load_state_dict(deepcopy(of.state_dict()))
    before = torch.get_rng_state(), random.getstate()

    with pytest.raises(OSError, match="timed out"):
        next(iter(resumed))

    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_workers_have_the_seeds_of_their_pass_after_a_restart() -> None:
    options = {"num_workers": 2}
    whole = batches(loader(OwnOrder(), batch_samples=2, **options), 24)

    assert whole[:8] != whole[8:16]
    for cuts in ([5, 6, 24], [8, 24], [9, 11, 24]):
        assert resumed_at(OwnOrder, cuts, **options) == whole


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_stream_without_a_state_resumes_from_the_state_of_an_earlier_version(
    epoch: int, num_workers: int
) -> None:
    options = {"batch_samples": 2, "num_workers": num_workers}
    per_pass = 4 * max(1, num_workers)
    whole = batches(loader(Plain(), **options), 2 * per_pass)
    of = loader(Plain(), **options)
    former = torchdata_loader(Plain(), batch_size=2, num_workers=num_workers)
    read = iter(former)
    for _ in range(3):
        next(read)
    stream = deepcopy(former.state_dict())
    if epoch == 0:
        counts = stream["_snapshot"] if num_workers else stream
        counts["_snapshot_step" if num_workers else "_num_yielded"] = 6  # resumed after three

    of.load_state_dict(
        {
            **of.state_dict(),
            "position": epoch * per_pass + 3,
            "epoch": epoch,
            "stream": stream,
        }
    )

    assert of.is_within_epoch
    assert batches(of, 1) == whole[of.position - 1 :][:1]


def test_after_an_error_of_a_worker_the_batch_is_read_again() -> None:
    options = {"batch_samples": 2, "num_workers": 1}
    whole = batches(loader(Endless(), **options), 4)
    stream = Endless()
    stream.failing = 5
    of = loader(stream, **options)
    seen: list[list[int]] = []

    with pytest.raises(OSError, match="timed out"):
        seen += (batch.tolist() for batch in of)
    stream.failing = None  # in this process; the worker had a copy

    assert seen == whole[:2]
    assert seen + batches(of, 2) == whole


def test_a_stream_whose_state_is_slow_to_copy_is_read_again_from_an_earlier_batch() -> None:
    class Slow(Endless):
        copies = 0

        def state_dict(self):
            Slow.copies += 1
            time.sleep(0.02)
            return super().state_dict()

    stream = Slow()
    stream.failing = 7
    of = loader(stream, batch_samples=2)
    seen: list[list[int]] = []

    with pytest.raises(OSError, match="timed out"):
        seen += (batch.tolist() for batch in of)
    copies, state = Slow.copies, deepcopy(of.state_dict())

    assert copies <= 3  # of the first batch, and of the start of the pass
    assert state["skipped"] == 2
    assert seen + batches(of, 2) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    resumed = loader(Slow(), batch_samples=2)
    resumed.load_state_dict(state)
    assert batches(resumed, 2) == [[6, 7], [8, 9]]


def test_a_stateful_stream_that_has_ended_for_good_raises() -> None:
    stream = Endless()
    of = loader(stream, batch_samples=2)
    list(of)
    state = deepcopy(of.state_dict())
    resumed = loader(Ended(), batch_samples=2)
    resumed.load_state_dict(state)

    with pytest.raises(ValueError, match="fewer than 2 samples"):
        batches(resumed, 1)


class Ended(Endless):
    def __iter__(self):
        return iter(range(sum(self.place), 8))


def test_the_state_of_an_earlier_version_is_loaded() -> None:
    of = loader(Endless(), batch_samples=2)
    batches(of, 1)
    state = deepcopy(of.state_dict())
    del state["skipped"], state["dataset"]

    resumed = loader(Endless(), batch_samples=2)
    resumed.load_state_dict(state)

    assert batches(resumed, 1) == [[2, 3]]


def test_a_stream_is_read_in_passes_and_drops_its_incomplete_batch():
    of = loader(Stream(), batch_samples=3)

    passes = [[batch.tolist() for batch in of] for _ in range(2)]

    assert passes[0] == passes[1]
    assert (len(passes[0]), of.epoch, of.position) == (6, 2, 12)


def test_each_rank_reads_its_number_of_samples_from_a_stream():
    sizes = [
        len(next(iter(loader(Stream(), batch_samples=5, rank=rank, world_size=2))))
        for rank in range(2)
    ]

    assert sizes == [3, 2]


def test_a_streams_state_raises_on_another_rank_or_number_of_workers():
    state = loader(Stream(), rank=1, world_size=2).state_dict()

    with pytest.raises(CheckpointError, match="rank=1, and here it is 0"):
        loader(Stream(), rank=0, world_size=2).load_state_dict(state)


def test_a_stream_without_a_batch_raises():
    with pytest.raises(ValueError, match="fewer than 6 samples"):
        batches(loader(Stream(2)), 1)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"splits": CHANGING}, {"drop_last": False}])
def test_options_for_datasets_with_a_length_raise_for_a_stream(options):
    with pytest.raises(ValueError, match="an IterableDataset brings its own order"):
        loader(Stream(), **options)


def test_the_ratio_is_that_of_the_last_batch_yielded() -> None:
    of = loader(Numbers(120))
    assert (of.batch_ratio, of.is_resized, of.next_index) == (1.0, False, 0)
    batches(of, 1)
    of.resize(1, 3 * BATCH)
    ratios = []

    for _ in range(2):
        ratios.append(of.batch_ratio)
        batches(of, 1)

    assert [*ratios, of.batch_ratio] == [1.0, 3.0, 3.0]
    assert (of.is_resized, of.batch_samples, of.next_index) == (True, 18, 3)


def test_the_batches_made_ahead_count_as_made_and_a_loaded_position_too() -> None:
    of = loader(num_workers=1)
    batches(of, 1)
    assert of.next_index == 1 + 2

    other = loader()
    other.load_state_dict({**loader().state_dict(), "position": 7})

    assert (other.next_index, other.position, other.epoch) == (7, 7, 2)


def test_a_position_saved_without_sizes_has_the_initial_size() -> None:
    state = loader().state_dict()
    del state["sizes"]
    of = loader()

    of.load_state_dict(state)

    assert of.state_dict() == loader().state_dict()


@pytest.mark.parametrize("name", ["num_samples", "batch_samples", "seed", "shuffle", "drop_last"])
def test_a_position_in_another_order_raises(name: str) -> None:
    state = {**loader().state_dict(), name: "other"}

    with pytest.raises(CheckpointError, match=f"saved with {name}=other, and here it is "):
        loader().load_state_dict(state)


class NoBatches(list[Any]):
    """Loader without batches, and its torchdata state."""

    def state_dict(self) -> dict[str, Any]:
        return {"dataset_state": None, "fetcher_state": {"dataset_iter_state": None}}


class Factory:
    """Loader factory that records its options; its loaders yield nothing."""

    dataset: Any = ()

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def create(self, **options: Any) -> NoBatches:
        self.options.append(options)
        return NoBatches()

    @property
    def seeds(self) -> list[int]:
        return [options["generator"].initial_seed() for options in self.options]


def test_the_workers_of_each_rank_and_position_have_seeds_of_their_own() -> None:
    factory = Factory()
    for seed, rank, position in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)):
        sampler = GlobalBatchSampler(22, 6, seed=seed, shuffle=True, drop_last=True)
        of = ResumableLoader(factory, sampler, SplitSchedule(6, 2), rank)
        of.position = position
        with pytest.raises(RuntimeError):  # a generator that ends by StopIteration
            next(of.forever())

    assert factory.seeds[0] == factory.seeds[4]
    assert len(set(factory.seeds)) == 4


def test_a_stream_is_loaded_in_batches_of_this_ranks_samples() -> None:
    factory = Factory()
    identity = {"rank": 0, "world_size": 2, "num_workers": 0}
    of = StreamLoader(factory, samples=3, seed=7, identity=identity)

    assert list(of) == []

    (options,) = factory.options
    assert (options["batch_size"], options["drop_last"]) == (3, True)
    assert of.state_dict() == {
        "position": 0,
        "epoch": 1,
        "stream": None,
        "skipped": 0,
        "dataset": None,
        "samples": 3,
        **identity,
    }


def test_the_seed_and_the_pass_decide_on_the_seeds_of_a_streams_workers() -> None:
    factory = Factory()
    identity = {"rank": 0, "world_size": 2, "num_workers": 0}
    for seed, epoch in ((0, 0), (1, 0), (0, 1), (0, 0)):
        of = StreamLoader(factory, samples=3, seed=seed, identity=identity)
        of.epoch = epoch
        list(of)

    assert factory.seeds[0] == factory.seeds[3]
    assert len(set(factory.seeds)) == 3


@pytest.mark.parametrize("name", ["samples", "rank", "world_size", "num_workers"])
def test_the_position_of_another_stream_raises(name: str) -> None:
    state = {**loader(Stream()).state_dict(), name: 9}

    with pytest.raises(CheckpointError, match=f"saved with {name}=9, and here it is "):
        loader(Stream()).load_state_dict(state)


def test_a_stream_without_a_second_pass_raises_only_if_it_never_had_a_batch() -> None:
    stream = Stream(3)
    of = loader(stream, batch_samples=3)
    assert batches(of, 3) == [[0, 1, 2]] * 3
    assert of.epoch == 2

    resumed = loader(stream, batch_samples=3)
    resumed.load_state_dict(of.state_dict())
    assert (resumed.position, resumed.epoch) == (3, 2)
    resumed.close()
    assert batches(resumed, 1) == [[0, 1, 2]]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_samples": 3, "world_size": 3},
        {"batch_samples": np.int64(6), "seed": np.int64(5)},
        {"seed": 2**63 - 1},
        {"shuffle": None},
        {"batch_samples": 10, "drop_last": False, "world_size": 2},
        {"batch_samples": 22},
    ],
)
def test_options_at_their_limits_make_batches(options: dict[str, Any]) -> None:
    assert len(batches(loader(**options), 1)[0]) == -(
        -int(options.get("batch_samples", BATCH)) // options.get("world_size", 1)
    )


def test_batches_are_shuffled_unless_switched_off() -> None:
    assert global_batches(1) == global_batches(1, shuffle=None) == global_batches(1, shuffle=True)
    assert global_batches(1) != global_batches(1, shuffle=False)


def test_unknown_options_are_named_in_order() -> None:
    with pytest.raises(ValueError, match="a loader has no option batch_size, sampler; of torch's"):
        loader(sampler=SimpleNamespace(), batch_size=3)
