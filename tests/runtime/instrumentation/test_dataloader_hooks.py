"""Tests of `DataLoaderHooks`: the measured wait for data, with real loaders and a fake clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

import pytest
import torch
from deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from fakes.clock import FakeClock
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from zerowatch.metrics.catalog.labels import PHASES
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import DATA, PhaseTimer
from zerowatch.runtime.instrumentation.dataloader_hooks import DataLoaderHooks

NUM_SAMPLES = 6
SECONDS_PER_SAMPLE = 0.5
BATCH_SIZE = 2
SECONDS_PER_BATCH = BATCH_SIZE * SECONDS_PER_SAMPLE
TRAINING_SECONDS = 3.0


class ModelMode:
    """Stands in for the engine's hooks: whether batches are for training."""

    def __init__(self) -> None:
        self.loads_training_data = True


class SlowDataset(Dataset[torch.Tensor]):
    """Takes SECONDS_PER_SAMPLE for each of its samples."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self._clock.seconds += SECONDS_PER_SAMPLE
        return torch.tensor(index)


class SlowStream(IterableDataset[torch.Tensor]):
    """Takes as long for each sample, and has no length."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(NUM_SAMPLES):
            self._clock.seconds += SECONDS_PER_SAMPLE
            yield torch.tensor(index)


class Job:
    """A training thread with hooks on data loading.

    Attributes:
        clock: The clock of the phase timer.
        mode: Whether batches are for training.
        timer: The phases of this thread.
        fail_open: Counts hooks that failed.
        hooks: The hooks under test.
    """

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.mode = ModelMode()
        self.timer = PhaseTimer(lambda: round(self.clock() * 1e9))
        self.fail_open = FailOpen()
        self.hooks = DataLoaderHooks(self.timer, self.fail_open, self.mode)  # type: ignore[arg-type]

    def train(self, batches: Iterable[object]) -> int:
        """Iterate over the batches, and train for TRAINING_SECONDS on each; return their number."""
        num_batches = 0
        for _ in batches:
            self.clock.seconds += TRAINING_SECONDS
            num_batches += 1
        return num_batches

    def phase_seconds(self) -> dict[str, float]:
        """Return the seconds since the last call in each phase that has any."""
        return {PHASES[place]: ns / 1e9 for place, ns in enumerate(self.timer.drain()) if ns}


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.hooks.restore()


def test_the_wait_for_each_batch_of_a_loader_is_data_time(job: Job) -> None:
    loader = DataLoader(SlowDataset(job.clock), batch_size=BATCH_SIZE)

    num_batches = job.train(loader)

    assert num_batches == 3
    assert job.phase_seconds() == {
        "data": 3 * SECONDS_PER_BATCH,
        "other": 3 * TRAINING_SECONDS,
    }


def test_the_wait_for_an_iterable_dataset_without_a_length_is_data_time(job: Job) -> None:
    loader = DataLoader(SlowStream(job.clock), batch_size=BATCH_SIZE)
    with pytest.raises(TypeError):
        len(loader)

    num_batches = job.train(loader)

    assert num_batches == 3
    assert job.phase_seconds() == {
        "data": 3 * SECONDS_PER_BATCH,
        "other": 3 * TRAINING_SECONDS,
    }


def test_the_wait_for_a_generator_over_a_loader_is_data_time_except_its_own_work(job: Job) -> None:
    loader = DataLoader(SlowDataset(job.clock), batch_size=BATCH_SIZE)
    preprocessing_seconds = 0.25

    def preprocessed() -> Iterator[torch.Tensor]:
        for batch in loader:
            job.clock.seconds += preprocessing_seconds
            yield batch

    job.train(preprocessed())

    assert job.phase_seconds() == {
        "data": 3 * SECONDS_PER_BATCH,
        "other": 3 * (TRAINING_SECONDS + preprocessing_seconds),
    }


def test_the_wait_for_a_generator_without_a_loader_is_other_time(job: Job) -> None:
    loader = DataLoader(SlowDataset(job.clock), batch_size=BATCH_SIZE)
    next(iter(loader))  # phases count from the first one on
    job.phase_seconds()

    job.train(iter(SlowStream(job.clock)))

    seconds = NUM_SAMPLES * (SECONDS_PER_SAMPLE + TRAINING_SECONDS)
    assert job.phase_seconds() == {"other": seconds}


def test_the_wait_for_a_worker_process_is_data_time() -> None:
    class Sleeping(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            time.sleep(0.05)
            return super().__getitem__(index)

    timer = PhaseTimer()
    hooks = DataLoaderHooks(timer, FailOpen(), ModelMode())  # type: ignore[arg-type]
    try:
        num_batches = len(list(DataLoader(Sleeping(torch.ones(4, 8)), num_workers=1)))
    finally:
        hooks.restore()

    assert num_batches == 4
    assert timer.drain()[DATA] / 1e9 >= 4 * 0.05


def test_a_batch_of_deepspeeds_loader_counts_once(job: Job) -> None:
    loader = DeepSpeedDataLoader(
        SlowDataset(job.clock),
        BATCH_SIZE,
        pin_memory=False,
        local_rank=0,
        tput_timer=None,
        num_local_io_workers=0,
        data_parallel_world_size=1,
        data_parallel_rank=0,
    )

    num_batches = job.train(loader)

    assert num_batches == 3
    assert job.phase_seconds()["data"] == 3 * SECONDS_PER_BATCH


def test_a_repeating_loader_is_measured_beyond_the_end_of_its_data(job: Job) -> None:
    batches = RepeatingLoader(DataLoader(SlowDataset(job.clock), batch_size=BATCH_SIZE))

    job.train(next(batches) for _ in range(4))

    assert job.phase_seconds()["data"] == 4 * SECONDS_PER_BATCH


def test_data_loaded_in_evaluation_mode_is_evaluation_time(job: Job) -> None:
    job.mode.loads_training_data = False

    job.train(DataLoader(SlowDataset(job.clock), batch_size=BATCH_SIZE))

    assert job.phase_seconds()["eval"] == 3 * SECONDS_PER_BATCH


def test_a_loader_that_raises_ends_its_data_time(job: Job) -> None:
    class Broken(SlowDataset):
        def __getitem__(self, index: int) -> torch.Tensor:
            super().__getitem__(index)
            raise ValueError("this sample is broken")

    with pytest.raises(ValueError, match="this sample is broken"):
        job.train(DataLoader(Broken(job.clock), batch_size=BATCH_SIZE))
    job.clock.seconds += TRAINING_SECONDS

    assert job.phase_seconds() == {"data": SECONDS_PER_SAMPLE, "other": TRAINING_SECONDS}


def test_a_loader_on_another_thread_is_not_measured(job: Job) -> None:
    next(iter(DataLoader(SlowDataset(job.clock))))
    job.phase_seconds()
    loader = DataLoader(SlowDataset(job.clock), batch_size=BATCH_SIZE)

    prefetcher = threading.Thread(target=lambda: list(loader))
    prefetcher.start()
    prefetcher.join()

    assert "data" not in job.phase_seconds()


def test_a_hook_that_fails_is_counted_and_the_batches_arrive(job: Job) -> None:
    del job.mode.loads_training_data

    num_batches = job.train(DataLoader(SlowDataset(job.clock), batch_size=BATCH_SIZE))

    assert num_batches == 3
    assert job.fail_open.failures["data"] >= 1


def test_restore_puts_the_original_methods_back() -> None:
    originals = _BaseDataLoaderIter.__next__, DeepSpeedDataLoader.__next__
    job = Job()
    wrappers = _BaseDataLoaderIter.__next__, DeepSpeedDataLoader.__next__

    job.hooks.restore()
    job.train(DataLoader(SlowDataset(job.clock), batch_size=BATCH_SIZE))

    assert not set(wrappers) & set(originals)
    assert (_BaseDataLoaderIter.__next__, DeepSpeedDataLoader.__next__) == originals
    assert "data" not in job.phase_seconds()
