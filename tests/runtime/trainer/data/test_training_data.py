"""Tests of a run's data: its loader, changes of batch size and split, and its saved position."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakes.rank_threads import FakeHostGroup, on_ranks
from fakes.steps import step as a_step
from torch.utils.data import IterableDataset

from zerowatch.errors import CheckpointError, PeerFailedError
from zerowatch.metrics.step_record import StepRecord
from zerowatch.runtime.trainer.data import training_data
from zerowatch.runtime.trainer.data.training_data import (
    BatchLearningRate,
    DataStart,
    TrainingData,
    scaling_exponent,
)
from zerowatch.runtime.trainer.engine_change import EngineChange

SAMPLES = list(range(240))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(24))


class SGD:
    """Optimizer whose learning rate scales linearly with the batch."""


class Holder:
    """Engine holder with a watch, which records attachments."""

    def __init__(
        self, optimizer: object = None, *, is_open: bool = True, world_size: int = 2
    ) -> None:
        self.publish: Callable[[StepRecord], None] | None = None
        watch = SimpleNamespace(is_open=is_open, subscribe_internal=self._subscribe)
        self.engine = SimpleNamespace(
            watch=watch,
            basic_optimizer=optimizer or SGD(),
            seq_dp_world_size=world_size,
            sequence_parallel_size=1,
        )
        self.attachments: list[tuple[EngineChange, Any]] = []

    def _subscribe(self, listener: Callable[[StepRecord], None]) -> None:
        self.publish = listener

    def attached(self, change: EngineChange) -> Any:
        return dict(self.attachments).get(change)

    def attach(self, change: EngineChange, attachment: Any) -> None:
        self.attachments.append((change, attachment))


class Ranks:
    """Host group of rank 0, whose peer has the same values or sends others."""

    def __init__(self, world_size: int = 2, peer: Callable[[Any], Any] | None = None) -> None:
        self.rank, self.world_size, self.sent = 0, world_size, list[list[float]]()
        self._peer = peer or (lambda values: values)

    def all_gather(self, values: Sequence[float]) -> np.ndarray:
        self.sent.append(list(values))
        return np.array([values, self._peer(values)][: self.world_size], dtype=float)

    def all_gather_text(self, text: str) -> list[str]:
        return [text] * self.world_size


def data_of(ranks: Any = None, holder: Any = None, *, balance: bool = False) -> TrainingData:
    return TrainingData(ranks or Ranks(), holder or Holder(), balance=balance)


def end_window(data: TrainingData, step: int = 0, *, seconds: float | None = 0.6) -> None:
    data.on_window_end(step=step, num_samples=6, seconds=seconds, collectives_inside=False)


def test_the_split_can_follow_the_speeds_of_several_ranks_with_a_loader() -> None:
    alone = data_of(Ranks(1), Holder(world_size=1))
    data, streamed = data_of(), data_of()
    before = data.unsupported_balance_reason()
    alone.loader(SAMPLES, batch_samples=12)
    data.loader(SAMPLES, batch_samples=12)
    streamed.loader(Stream(), batch_samples=12)

    assert alone.unsupported_balance_reason() == "there is only one rank"
    assert before == "batches do not come from TrainingRun.loader"
    assert data.unsupported_balance_reason() is None
    assert streamed.unsupported_balance_reason() == "each rank reads a stream"


def test_the_batch_size_can_change_with_a_loader_and_a_rule_for_the_learning_rate() -> None:
    data, unknown = data_of(), data_of(holder=Holder(object()))
    before = data.unsupported_resize_reason(), data.batch_sizes()
    data.loader(list(range(50)), batch_samples=12)
    unknown.loader(SAMPLES, batch_samples=12)

    assert before == ("batches do not come from TrainingRun.loader", ())
    assert (data.unsupported_resize_reason(), data.batch_sizes()) == (None, (12, 24, 48))
    assert unknown.unsupported_resize_reason() == (
        "no rule scales the learning rate of object with the batch size"
    )


def test_a_stream_has_a_fixed_batch_size_and_no_split() -> None:
    data = data_of()
    loader = data.loader(Stream(), batch_samples=6)

    assert data.unsupported_resize_reason() == "each rank reads a stream"
    assert data.batch_sizes() == ()
    assert (data.batch_ratio, data.batch_samples) == (1.0, 6)
    assert next(iter(loader)).tolist() == [0, 1, 2]
    end_window(data)
    assert data.state_dict()["shares"] is None
    assert data.state_dict()["data"]["position"] == 1


def test_a_batch_that_was_not_trained_when_the_run_was_saved_comes_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = data_of()
    batches = iter(data.loader(SAMPLES, batch_samples=12, shuffle=False))
    first = next(batches)
    end_window(data)
    after_first = data.state_dict()
    second = next(batches)
    with_second_in_hand = data.state_dict()
    for _ in range(3):  # a script that reads ahead, or leaves out batches
        next(batches)
    far_ahead = data.state_dict()
    resumed = data_of()
    resumed.load_state_dict(with_second_in_hand)
    again = next(iter(resumed.loader(SAMPLES, batch_samples=12, shuffle=False)))

    assert first.tolist() == [0, 1, 2, 3, 4, 5]
    assert again.tolist() == second.tolist()
    assert with_second_in_hand == after_first
    assert far_ahead["data"]["position"] == 5
    assert "stream" not in caplog.text


def test_a_batch_whose_window_failed_is_left_out_if_the_script_reads_the_next_one() -> None:
    data = data_of()
    batches = iter(data.loader(SAMPLES, batch_samples=12, shuffle=False))
    next(batches)
    end_window(data)
    next(batches)  # its window fails
    after_failure = data.state_dict()["data"]["position"]
    next(batches)
    with_next_in_hand = data.state_dict()["data"]["position"]
    end_window(data)

    assert (after_failure, with_next_in_hand) == (1, 3)
    assert data.state_dict()["data"]["position"] == 3


def test_a_batch_of_a_stream_that_was_not_trained_when_the_run_was_saved_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = data_of()
    batches = iter(data.loader(Stream(), batch_samples=6))
    next(batches)
    end_window(data)
    data.state_dict()
    before = caplog.text
    next(batches)

    assert data.state_dict()["data"]["position"] == 2
    assert before == "" and "call `save` after `train_batch`" in caplog.text


@pytest.mark.parametrize(
    ("options", "ahead"),
    [({}, 0), ({"num_workers": 3}, 6), ({"num_workers": 2, "prefetch_factor": 5}, 10)],
)
def test_the_batches_that_workers_load_ahead_are_known(options: dict[str, int], ahead: int) -> None:
    data = data_of()
    data.loader(SAMPLES, batch_samples=12, **options)

    assert data.batches_ahead == ahead


@pytest.mark.parametrize("sizes", [{"seq_dp_world_size": 1}, {"sequence_parallel_size": 2}])
def test_ranks_of_one_copy_of_the_model_cannot_divide_its_samples(sizes: dict[str, int]) -> None:
    holder = Holder()
    vars(holder.engine).update(sizes)
    data = data_of(holder=holder)

    with pytest.raises(ValueError, match="need the same samples"):
        data.loader(SAMPLES, batch_samples=12)
    data.loader(Stream(), batch_samples=12)  # it chooses the samples of each rank itself


def test_balancing_a_stream_raises() -> None:
    with pytest.raises(ValueError, match="an IterableDataset brings its own order"):
        data_of(balance=True).loader(Stream(), batch_samples=6)


@pytest.mark.parametrize(
    ("world_size", "balance", "is_open", "is_warned"),
    [(2, True, False, True), (2, True, True, False), (2, False, False, False), (1, True, False, 0)],
)
def test_balancing_without_monitoring_is_warned_of(
    caplog: pytest.LogCaptureFixture, world_size: int, balance: bool, is_open: bool, is_warned: bool
) -> None:
    holder = Holder(is_open=is_open)

    data = data_of(Ranks(world_size), holder, balance=balance)

    assert ("balance=True without monitoring" in caplog.text) is bool(is_warned)
    assert data.balances is (balance and world_size > 1)
    assert (holder.publish is not None) is (world_size > 1)


def test_data_without_a_loader_has_no_state() -> None:
    data = data_of()

    end_window(data)
    data.close()

    assert data.state_dict() == {}
    assert (data.batch_samples, data.batch_ratio) == (0, 1.0)


def test_the_state_has_the_position_the_split_and_the_requested_size() -> None:
    data = data_of()
    loader = data.loader(SAMPLES, batch_samples=12, seed=5)
    next(iter(loader))
    end_window(data)

    assert data.state_dict() == {
        "data": {
            "position": 1,
            "sizes": [[0, 0, 0, 12]],
            "num_samples": 240,
            "batch_samples": 12,
            "seed": 5,
            "shuffle": True,
            "drop_last": True,
        },
        "shares": {"changes": [[0, [6, 6]]], "sample_seconds": []},
        "batch_samples": 12,
    }


def saved_state(*, resized: bool = False) -> dict[str, Any]:
    """Return the state after three batches, with a split of 8 and 4 and maybe other sizes."""
    data = data_of(balance=True)
    loader: Any = data.loader(SAMPLES, batch_samples=12)
    if resized:
        loader.resize(2, 48)
        data.batch_samples = 48
    for _ in range(3):
        next(loader.forever())
    shares = {"changes": [[0, [8, 4]]], "sample_seconds": [0.1, 0.2]}
    return {**data.state_dict(), "shares": shares}


def test_a_position_that_is_loaded_before_the_loader_is_made_is_set_once() -> None:
    data = data_of(balance=True)
    state = saved_state()
    data.load_state_dict(state)

    loader = data.loader(SAMPLES, batch_samples=12)

    assert data.state_dict() == state
    assert loader.position == 3
    assert data.loader(SAMPLES, batch_samples=12).position == 0


def test_a_loader_of_other_data_or_within_an_epoch_replaces_the_first_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    within, other, streamed = data_of(), data_of(), data_of()
    next(iter(within.loader(SAMPLES, batch_samples=12)))
    within.loader(SAMPLES, batch_samples=24)
    assert caplog.text.count("TrainingRun.loader replaces the first loader") == 1
    other.loader(SAMPLES, batch_samples=12)
    assert len(caplog.messages) == 1

    for _ in range(3):
        other.loader(list(range(24)), batch_samples=12)
    assert len(caplog.messages) == 2

    stream = Stream()
    next(iter(streamed.loader(stream, batch_samples=12)))
    streamed.loader(stream, batch_samples=12)
    assert len(caplog.messages) == 3
    assert "torch's DataLoader" in caplog.messages[-1]


def test_a_loader_of_the_same_data_replaces_one_between_two_epochs_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data, streamed, stream = data_of(), data_of(), Stream()

    list(data.loader(SAMPLES, batch_samples=12))
    list(data.loader(SAMPLES, batch_samples=24))
    data.loader(SAMPLES, batch_samples=24)
    list(streamed.loader(stream, batch_samples=12))
    streamed.loader(stream, batch_samples=24)

    assert caplog.messages == []
    assert data.batch_samples == 24


def test_a_position_that_another_loader_cannot_load_is_kept_for_the_next_loader() -> None:
    data = data_of()
    data.load_state_dict(saved_state())

    with pytest.raises(CheckpointError, match="seed=0, and here it is 7"):
        data.loader(SAMPLES, batch_samples=12, seed=7)

    assert data.loader(SAMPLES, batch_samples=12).position == 3


def test_a_loader_without_resume_drops_the_loaded_position_and_takes_other_data() -> None:
    data = data_of()
    data.load_state_dict(saved_state())

    with pytest.raises(CheckpointError, match="pass resume=False to TrainingRun"):
        data.loader(SAMPLES * 2, batch_samples=12)
    loader = data.loader(SAMPLES * 2, batch_samples=12, resume=False)

    assert (loader.position, data.state_dict()["data"]["num_samples"]) == (0, 480)
    with pytest.raises(ValueError, match="resume must be True or False, got 0"):
        data.loader(SAMPLES, batch_samples=12, resume=0)


@pytest.mark.parametrize(("samples", "is_same"), [(SAMPLES, True), (SAMPLES * 2, False)])
def test_a_position_of_other_data_is_refused_before_it_is_loaded(
    samples: list[int], is_same: bool
) -> None:
    data, without_loader = data_of(), data_of()
    loader = data.loader(samples, batch_samples=12)
    next(iter(loader))

    with nullcontext() if is_same else pytest.raises(CheckpointError, match="num_samples=240"):
        data.position_to_load(saved_state(), DataStart())
    without_loader.position_to_load(saved_state(), DataStart())
    data.position_to_load({}, DataStart())

    assert loader.position == 1


def loaded_by(
    data: TrainingData, samples: list[int], order: str, *, resume: bool, start: DataStart
) -> Any:
    """Return the loader of a run that makes it before or after it loads a position."""
    loader = data.loader(samples, batch_samples=12, resume=resume) if order == "first" else None
    position = data.position_to_load(saved_state(), start)
    data.load_state_dict(position, start)
    return loader or data.loader(samples, batch_samples=12, resume=resume)


@pytest.mark.parametrize("order", ["first", "second"])
@pytest.mark.parametrize("by", ["data", "resume"])
@pytest.mark.parametrize(("samples", "is_same"), [(SAMPLES, True), (SAMPLES * 2, False)])
@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_position_is_dropped_once_and_a_restarted_run_goes_on_in_the_same_data(
    order: str,
    by: str,
    samples: list[int],
    is_same: bool,
    is_repeated: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = data_of()
    start = DataStart(is_requested=by == "data", is_repeated=is_repeated)

    loader = loaded_by(data, samples, order, resume=by != "resume", start=start)

    assert loader.position == (3 if is_same and is_repeated else 0)
    assert data.state_dict()["data"]["num_samples"] == len(samples)
    assert data.starts_at_beginning
    assert len(caplog.messages) == 1
    assert ("this run was restarted" in caplog.text) == (is_same and is_repeated)


def test_a_position_that_was_dropped_is_not_saved_again() -> None:
    data, start = data_of(), DataStart(is_requested=True)

    data.load_state_dict(data.position_to_load(saved_state(), start), start)

    assert data.state_dict() == {}


def test_a_run_that_never_asks_for_it_does_not_start_at_the_beginning() -> None:
    data = data_of()
    loader = loaded_by(data, SAMPLES, "first", resume=True, start=DataStart())

    assert (loader.position, data.starts_at_beginning) == (3, False)


def test_a_loader_that_has_started_at_the_beginning_goes_back_to_a_checkpoint() -> None:
    data = data_of()
    loader = data.loader(SAMPLES, batch_samples=12, resume=False)
    next(iter(loader))

    position = data.position_to_load(saved_state(), DataStart())
    data.load_state_dict(position, DataStart())

    assert (loader.position, data.starts_at_beginning) == (3, True)


@pytest.mark.parametrize("start", [DataStart(is_requested=True), DataStart(is_repeated=True)])
def test_a_run_that_goes_back_to_its_checkpoint_stays_one_that_started_at_the_beginning(
    start: DataStart,
) -> None:
    data = data_of()
    loader = loaded_by(data, SAMPLES, "second", resume=True, start=start)
    next(iter(loader))
    end_window(data)

    data.load_state_dict(data.position_to_load(saved_state(), DataStart()), DataStart())
    gone_back = data.starts_at_beginning
    data.set_start(DataStart())  # there was no checkpoint

    assert loader.position == 3
    assert gone_back and data.starts_at_beginning


def test_a_restarted_run_that_looks_at_a_batch_before_it_loads_goes_on_in_the_same_data() -> None:
    data, start = data_of(), DataStart(is_requested=True, is_repeated=True)
    loader = data.loader(SAMPLES, batch_samples=12)
    next(iter(loader))

    data.load_state_dict(data.position_to_load(saved_state(), start), start)

    assert (loader.position, data.starts_at_beginning) == (3, True)


@pytest.mark.parametrize("is_repeated", [False, True])
def test_batches_that_were_read_since_a_checkpoint_can_be_left_out(
    is_repeated: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data = data_of()
    loader = loaded_by(data, SAMPLES, "second", resume=True, start=DataStart())
    batches = iter(loader)
    for step in range(4):
        next(batches)
        end_window(data, step)
    start = DataStart(is_requested=True, is_repeated=is_repeated)

    data.load_state_dict(data.position_to_load(saved_state(), start), start)

    assert loader.position == 7
    assert "after the 7 batches" in caplog.text and "beginning" not in caplog.text
    assert not data.starts_at_beginning


@pytest.mark.parametrize("has_loader", [False, True])
@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_run_that_trains_batches_of_its_own_before_it_loads_has_not_begun_its_data(
    has_loader: bool, is_repeated: bool
) -> None:
    data, start = data_of(), DataStart(is_requested=True, is_repeated=is_repeated)
    before = data.loader(SAMPLES, batch_samples=12) if has_loader else None
    end_window(data)  # a warm-up

    data.load_state_dict(data.position_to_load(saved_state(), start), start)

    loader = before or data.loader(SAMPLES, batch_samples=12)
    assert loader.position == (3 if is_repeated else 0)
    assert data.starts_at_beginning


@pytest.mark.parametrize("is_requested", [True, False])
def test_ranks_of_which_one_has_used_a_batch_of_its_stream_load_alike(is_requested: bool) -> None:
    def has_position(host_group: FakeHostGroup) -> bool:
        data = data_of(host_group)
        loader = data.loader(Stream(), batch_samples=12, resume=False)
        saved = data.state_dict()
        if host_group.rank == 0:
            next(iter(loader))
        end_window(data)
        return bool(data.position_to_load(saved, DataStart(is_requested=is_requested)))

    assert on_ranks(2, has_position) == 2 * [not is_requested]


def test_a_request_before_there_is_a_checkpoint_holds_for_a_restart() -> None:
    by_load, by_loader = data_of(), data_of()
    by_load.set_start(DataStart(is_requested=True))
    by_loader.loader(SAMPLES, batch_samples=12, resume=False)
    by_loader.set_start(DataStart())

    assert by_load.starts_at_beginning and by_loader.starts_at_beginning


def test_a_loader_that_does_not_fit_the_loaded_position_leaves_the_one_before_it() -> None:
    data = data_of()
    first = data.loader(SAMPLES, batch_samples=12)
    data._loaded = saved_state()

    with pytest.raises(CheckpointError, match="num_samples=240"):
        data.loader(SAMPLES * 2, batch_samples=24)

    assert (data._loader, data.batch_samples) == (first, 12)


def test_a_stream_of_another_size_names_how_to_start_without_the_position() -> None:
    saved, data = data_of(), data_of()
    saved.loader(Stream(), batch_samples=12)
    data.loader(Stream(), batch_samples=24)

    with pytest.raises(CheckpointError, match="data=False to TrainingRun"):
        data.position_to_load(saved.state_dict(), DataStart())


def test_a_loaded_position_that_no_loader_has_yet_is_saved_again() -> None:
    data, state = data_of(), saved_state()
    data.load_state_dict(state)
    before = data.state_dict()

    with pytest.raises(CheckpointError, match="seed=0, and here it is 7"):
        data.loader(SAMPLES, batch_samples=12, seed=7)

    assert (before, data.state_dict()) == (state, state)


def test_without_balancing_a_loaded_run_continues_with_an_even_split() -> None:
    data = data_of()
    data.loader(SAMPLES, batch_samples=12)

    data.load_state_dict(saved_state())

    assert data.state_dict()["shares"] == {"changes": [[0, [6, 6]]], "sample_seconds": []}


def test_a_loaded_batch_size_scales_the_learning_rate_once() -> None:
    holder = Holder()
    data = data_of(holder=holder)
    data.loader(SAMPLES, batch_samples=12)

    for _ in range(2):
        data.load_state_dict(saved_state(resized=True))

    assert (data.batch_samples, data.batch_ratio) == (48, 4.0)
    assert [change for change, _ in holder.attachments] == [EngineChange.LEARNING_RATE]


def test_a_state_of_an_earlier_version_has_the_size_of_its_last_change_as_requested_size() -> None:
    data, state = data_of(), saved_state(resized=True)
    data.loader(SAMPLES, batch_samples=12)

    data.load_state_dict({name: state[name] for name in ("data", "shares")})

    assert data.batch_samples == 48


def next_sizes(data: TrainingData, batches: Any, count: int = 4) -> list[int]:
    """Train on some batches, and return the samples of each on this rank."""
    sizes = []
    for _ in range(count):
        sizes.append(len(next(batches)))
        end_window(data)
    return sizes


@pytest.mark.parametrize("num_windows", [1, 3], ids=["before its first batch", "in use"])
def test_a_size_that_was_rolled_back_is_not_requested_in_a_resumed_run(num_windows: int) -> None:
    data, resumed = data_of(), data_of()
    batches = data.loader(SAMPLES, batch_samples=12).forever()
    data.batch_samples = 24
    next_sizes(data, batches, num_windows)
    data.batch_samples = 12

    resumed.load_state_dict(data.state_dict())
    again = resumed.loader(SAMPLES, batch_samples=12).forever()

    assert resumed.batch_samples == 12
    assert next_sizes(resumed, again) == next_sizes(data, batches)
    assert (resumed.batch_ratio, next_sizes(resumed, again)) == (1.0, [6] * 4)


def test_a_requested_size_that_no_batch_has_yet_applies_in_a_resumed_run() -> None:
    data, resumed = data_of(), data_of()
    next_sizes(data, data.loader(SAMPLES, batch_samples=12).forever(), 1)
    data.batch_samples = 24

    resumed.load_state_dict(data.state_dict())
    batches = resumed.loader(SAMPLES, batch_samples=12).forever()

    assert next_sizes(resumed, batches) == [6, 12, 12, 12]


def test_a_loaded_position_without_another_size_leaves_the_learning_rate() -> None:
    holder = Holder()
    data = data_of(holder=holder)
    data.loader(SAMPLES, batch_samples=12)

    data.load_state_dict(saved_state())

    assert (data.batch_samples, holder.attachments) == (12, [])


def test_a_requested_batch_size_applies_from_the_first_batch_that_no_rank_has_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    holder, ranks = Holder(), Ranks(peer=lambda values: [5.0])
    data = data_of(ranks, holder)
    batches = data.loader(SAMPLES, batch_samples=12).forever()
    next(batches)

    data.batch_samples = 24
    end_window(data)
    sizes = [len(next(batches)) for _ in range(6)]

    assert ranks.sent == [[1]]
    assert sizes == [6, 6, 6, 6, 12, 12]
    assert "batch size changes at batch 5: 24 samples" in caplog.text
    assert [change for change, _ in holder.attachments] == [EngineChange.LEARNING_RATE]
    end_window(data)
    assert len(ranks.sent) == 1


def test_a_batch_size_that_stays_the_same_is_not_exchanged() -> None:
    ranks = Ranks()
    data = data_of(ranks)
    data.loader(SAMPLES, batch_samples=12)

    end_window(data)

    assert ranks.sent == []


def balanced_by(
    *, balance: bool, windows: int, peer: Callable[[Any], Any]
) -> tuple[TrainingData, list[list[int]]]:
    """Train on even batches; return the data and the split of the last change by window."""
    data = data_of(Ranks(peer=peer), balance=balance)
    batches = data.loader(SAMPLES, batch_samples=12).forever()
    splits = []
    for step in range(windows):
        next(batches)
        end_window(data, step)
        splits.append(data.state_dict()["shares"]["changes"][-1][1])
    return data, splits


def slower_peer(values: Any) -> Any:
    return [2 * values[0], *values[1:]]


def test_the_split_follows_the_speeds_after_eight_windows_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    _, splits = balanced_by(balance=True, windows=8, peer=slower_peer)

    assert splits == [[6, 6]] * 7 + [[8, 4]]
    assert "shares change within the next batches: [8, 4] samples by rank" in caplog.text


def test_balancing_that_is_switched_on_and_off_changes_the_split_at_once() -> None:
    data, splits = balanced_by(balance=False, windows=12, peer=slower_peer)
    assert splits == [[6, 6]] * 12
    shares = []

    for balances in (True, False, False):
        data.balances = balances
        end_window(data)
        shares.append(data.state_dict()["shares"]["changes"][-1][1])

    assert shares == [[8, 4], [6, 6], [6, 6]]


@pytest.mark.parametrize("change", [{"batch_samples": 24}, {"balances": True}])
def test_a_change_is_in_use_once_a_window_has_a_batch_that_no_rank_had_loaded(
    change: dict[str, Any],
) -> None:
    def ahead(values: list[float]) -> list[float]:
        """A peer with the same speed or half of it, whose workers have loaded 3 batches more."""
        return [*(2 * speed for speed in values[:-1]), values[-1] + 3]

    data = data_of(Ranks(peer=ahead))
    loader = data.loader(SAMPLES, batch_samples=12)
    batches = loader.forever()
    for step in range(6):
        next(batches)
        end_window(data, step)
    before, sizes, is_in_use = data.has_requested_batch, [], []

    vars(data).update(change)
    for step in range(6, 12):
        sizes.append(len(next(batches)))
        end_window(data, step)
        is_in_use.append(data.has_requested_batch)

    assert before
    assert is_in_use == [size != 6 for size in sizes] == [False] * 4 + [True] * 2


def test_batches_before_a_change_are_the_requested_ones_after_a_load_or_with_a_new_loader() -> None:
    data = data_of()
    batches = data.loader(SAMPLES, batch_samples=12).forever()
    saved = data.state_dict()
    for _ in range(3):
        next(batches)
    data.batch_samples = 24
    end_window(data)
    changed = data.has_requested_batch

    data.load_state_dict(saved)
    next(batches)
    end_window(data)
    loaded = data.has_requested_batch
    data.batch_samples = 24
    end_window(data)
    next(data.loader(SAMPLES, batch_samples=12).forever())
    end_window(data)

    assert (changed, loaded, data.has_requested_batch) == (False, True, True)


def test_without_a_loader_each_batch_is_the_requested_one() -> None:
    data = data_of()
    end_window(data)

    assert data.has_requested_batch


def test_windows_without_a_time_are_not_measured() -> None:
    sent = Ranks()
    data = data_of(sent, balance=True)
    batches = data.loader(SAMPLES, batch_samples=12).forever()

    for step in range(8):
        next(batches)
        end_window(data, step, seconds=None if step % 2 else 1.2)

    assert sent.sent[0][0] == pytest.approx(0.2)


def test_the_wall_time_of_windows_is_from_the_end_of_one_to_the_end_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([10.0, *(10.0 + 3.5 * (1 + step) for step in range(8))])
    monkeypatch.setattr(training_data, "perf_counter", clock.__next__)
    ranks = Ranks()
    data = data_of(ranks, balance=True)
    batches = data.loader(SAMPLES, batch_samples=12).forever()

    for step in range(8):
        next(batches)
        end_window(data, step)

    assert ranks.sent == [[pytest.approx(0.1), 8, np.inf, 3.5]]


def test_the_time_in_which_collectives_blocked_both_passes_is_not_the_ranks_own() -> None:
    holder, ranks = Holder(), Ranks()
    data = data_of(ranks, holder, balance=True)
    batches = data.loader(SAMPLES, batch_samples=12).forever()
    assert holder.publish is not None

    for step in range(8):
        next(batches)
        blocked = {"forward": 0.06, "backward": 0.12, "step": 9.0}
        holder.publish(replace(a_step(step), comm_exposed_phase_seconds=blocked))
        data.on_window_end(step=step, num_samples=6, seconds=0.6, collectives_inside=True)

    assert ranks.sent[0][0] == pytest.approx((0.6 - 0.06 - 0.12) / 6)


def test_records_without_a_loader_are_ignored() -> None:
    holder = Holder()
    data_of(holder=holder)
    assert holder.publish is not None

    holder.publish(a_step(1))


@pytest.mark.parametrize(
    ("of_rank_1", "difference"),
    [
        ({"dataset": list(range(36))}, "num_samples is 240 on rank 0 and 36 on rank 1"),
        ({"dataset": Stream()}, "dataset is one with a length on rank 0 and an IterableDataset on"),
        ({"batch_samples": 24}, "batch_samples is 12 on rank 0 and 24 on rank 1"),
        ({"seed": 3}, "seed is 0 on rank 0 and 3 on rank 1"),
        ({"drop_last": False}, "drop_last is True on rank 0 and False on rank 1"),
        ({"balance": True}, "balance is False on rank 0 and True on rank 1"),
        ({"resume": False}, "resume is True on rank 0 and False on rank 1"),
    ],
)
def test_loaders_that_differ_between_the_ranks_raise_on_all(
    of_rank_1: dict[str, Any], difference: str
) -> None:
    def problem(host_group: FakeHostGroup) -> str:
        options: dict[str, Any] = {"dataset": SAMPLES, "batch_samples": 12, "balance": False}
        options |= of_rank_1 if host_group.rank == 1 else {}
        data = data_of(host_group, balance=options.pop("balance"))
        with pytest.raises(ValueError, match="the loaders of the ranks differ") as raised:
            data.loader(options.pop("dataset"), **options)
        return str(raised.value)

    assert all(difference in each for each in on_ranks(2, problem))


def test_a_loader_that_one_rank_cannot_make_raises_on_all() -> None:
    def raised(host_group: FakeHostGroup) -> type:
        with pytest.raises(Exception) as error:
            data_of(host_group).loader(SAMPLES, batch_samples=12 if host_group.rank else 0)
        return error.type

    assert on_ranks(2, raised) == [ValueError, PeerFailedError]


@pytest.mark.parametrize(
    ("state_of_rank_1", "message"),
    [
        ({"position": 4}, "differs between the ranks: position is 3 on rank 0 and 4 on rank 1"),
        ({"seed": 9}, "seed=9, and here it is 0"),
        ({"position": "x"}, "cannot load the position in the data: ValueError"),
    ],
)
def test_a_position_that_one_rank_cannot_load_raises_on_all(
    state_of_rank_1: dict[str, Any], message: str
) -> None:
    state = saved_state()

    def problem(host_group: FakeHostGroup) -> str:
        data = data_of(host_group)
        data.loader(SAMPLES, batch_samples=12)
        own = state_of_rank_1 if host_group.rank == 1 else {}
        with pytest.raises(CheckpointError) as raised:
            data.load_state_dict({**state, "data": {**state["data"], **own}})
        return str(raised.value)

    first, second = on_ranks(2, problem)

    assert message in second
    assert "position in the data" in first


class Steps:
    """Optimizer that records its learning rates at each step, and returns its arguments."""

    def __init__(self) -> None:
        self.param_groups = [{"lr": 0.5}, {"lr": 3.0}]
        self.rates: list[list[float]] = []
        self.fails = False

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.rates.append([group["lr"] for group in self.param_groups])
        if self.fails:
            raise RuntimeError("the step failed")
        return args, kwargs


class SGDSteps(Steps):
    pass


def test_all_learning_rates_are_scaled_during_an_update_and_restored_also_if_it_fails() -> None:
    optimizer: Any = SGDSteps()
    rate = BatchLearningRate(SimpleNamespace(batch_ratio=2.0))
    rate.attach(SimpleNamespace(basic_optimizer=optimizer))

    assert optimizer.step(3, closure=5) == ((3,), {"closure": 5})
    optimizer.fails = True
    with pytest.raises(RuntimeError):
        optimizer.step()

    assert optimizer.rates == [[1.0, 6.0]] * 2
    assert optimizer.param_groups == [{"lr": 0.5}, {"lr": 3.0}]


def test_a_wrapper_that_stays_below_another_scales_no_more() -> None:
    optimizer: Any = SGDSteps()
    rate = BatchLearningRate(SimpleNamespace(batch_ratio=2.0))
    undo = rate.attach(SimpleNamespace(basic_optimizer=optimizer))
    below = optimizer.step
    optimizer.step = lambda: below()

    undo()
    optimizer.step()

    assert optimizer.rates == [[0.5, 3.0]]


def test_an_optimizer_without_a_rule_keeps_its_rates() -> None:
    optimizer: Any = Steps()
    rate = BatchLearningRate(SimpleNamespace(batch_ratio=4.0))
    rate.attach(SimpleNamespace(basic_optimizer=optimizer))

    optimizer.step()

    assert optimizer.rates == [[0.5, 3.0]]


@pytest.mark.parametrize(
    ("name", "exponent"),
    [
        ("SGD", 1.0),
        ("AdamW", 0.5),
        ("DeepSpeedCPUAdam", 0.5),
        ("FusedLamb", 0.5),
        ("RMSprop", 0.5),
        ("DeepSpeedCPUAdagrad", 0.5),
        ("FusedLion", None),
    ],
)
def test_the_rate_scales_linearly_for_sgd_and_by_the_square_root_for_adam(
    name: str, exponent: float | None
) -> None:
    assert scaling_exponent(type(name, (), {})()) == exponent


def test_close_stops_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    data, closed = data_of(), list[str]()
    loader = data.loader(SAMPLES, batch_samples=12)
    monkeypatch.setattr(loader, "close", lambda: closed.append("loader"))

    data.close()

    assert closed == ["loader"]
