"""Loads this rank's local batches from a dataset or a stream, from a position that can be saved."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate, count
from numbers import Integral
from time import perf_counter
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import Stateful, StatefulDataLoader

from ....errors import CheckpointError, shortened
from ..window.rng import RngState
from .batch_sampler import GlobalBatchSampler
from .batch_split import SplitSchedule, SplitSource, even_split, resized_split

_TORCH_OPTIONS = (
    "collate_fn",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
)
BATCH_MULTIPLES = (1, 2, 4)  # the learning rate rules are not known to hold for larger ones
# The order of samples depends on these values. A saved position is invalid if any of them differs.
_ORDER_KEYS = ("num_samples", "batch_samples", "seed", "shuffle", "drop_last")
_MAX_SEED = 2**63 - 1  # the largest seed of torch's generators
_END = object()  # marks the end of a stream
_OTHERWISE = (
    "To go on from the start of the data here, pass resume=False to TrainingRun.loader, or "
    "data=False to TrainingRun.load"
)
_MAX_COPY_RATIO = 0.01  # share of the time in which a stream's state is copied


def resumable_loader(
    dataset: Any,
    *,
    batch_samples: int,
    rank: int,
    world_size: int,
    seed: int = 0,
    shuffle: bool | None = None,
    drop_last: bool = True,
    splits: SplitSource | None = None,
    **options: Any,
) -> ResumableLoader | StreamLoader:
    """Return a loader of this rank's part of each global batch, based on torchdata's loader.

    Args:
        dataset: Dataset with `__len__` and `__getitem__`, or an IterableDataset (`StreamLoader`).
        batch_samples: Samples of a global batch, over all ranks.
        rank: Index of this rank among those that share the data.
        world_size: Number of ranks that share the data.
        seed: Seed of the order of samples, 0 or larger; the same on all ranks.
        shuffle: Whether each epoch is shuffled; by default yes.
        drop_last: Whether an incomplete batch at the end of an epoch is dropped. Otherwise the
            batch is smaller, with at least one sample per rank.
        splits: Source of each batch's split over the ranks; by default even.
        options: Further options of torch's DataLoader, such as collate_fn and num_workers.

    Raises:
        ValueError: No batches can be made; the message says why.
    """
    _check(options, batch_samples, world_size)
    _check_order(seed, shuffle, drop_last)
    factory = _TorchdataLoaders(dataset, options)
    if isinstance(dataset, IterableDataset):
        _check_stream(shuffle, splits, drop_last=drop_last)
        num_workers = options.get("num_workers", 0)
        return StreamLoader(
            factory,
            samples=even_split(batch_samples, world_size)[rank],
            seed=int(seed),
            identity={"rank": rank, "world_size": world_size, "num_workers": num_workers},
        )
    sampler = _sampler(dataset, batch_samples, int(seed), shuffle is not False, drop_last)
    _check_batches(sampler, world_size)
    return ResumableLoader(
        factory, sampler, splits or SplitSchedule(batch_samples, world_size), rank
    )


class LoaderFactory(Protocol):
    """Makes torch data loaders over one dataset."""

    @property
    def dataset(self) -> Any:
        """The dataset."""

    def create(self, **options: Any) -> Any:
        """Return a loader with these options of torch's DataLoader and the common options."""


class ResumableLoader:
    """Loads this rank's part of each global batch, in an order that is the same on every rank.

    `for batch in loader` yields the rest of an epoch, and the next loop yields the next epoch.
    `forever()` continues over epochs. Random transforms in workers are not reproduced after a
    restart.

    Attributes:
        position: Global batches yielded so far, over all epochs. This is also the index of the next
            batch.
    """

    def __init__(
        self,
        factory: LoaderFactory,
        sampler: GlobalBatchSampler,
        splits: SplitSource,
        rank: int,
    ) -> None:
        self.position = 0
        self._factory = factory
        self._sampler = sampler
        self._splits = splits
        self._rank = rank
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self._sampler.batches_per_epoch

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._sampler.start_of(self.position).epoch

    @property
    def batch_samples(self) -> int:
        """Samples of a global batch after the last change; batches loaded before may differ."""
        return self._sampler.latest_samples

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Allowed batch sizes: multiples of the initial one, up to the size of the dataset."""
        initial, limit = self._sampler.batch_samples, self._sampler.num_samples
        return tuple(initial * times for times in BATCH_MULTIPLES if initial * times <= limit)

    @property
    def batch_ratio(self) -> float:
        """Size of the last batch yielded, divided by the initial batch size."""
        return (
            self._sampler.start_of(max(0, self.position - 1)).samples / self._sampler.batch_samples
        )

    @property
    def is_resized(self) -> bool:
        """Whether `batch_ratio` may differ from 1 for any batch."""
        return self._sampler.has_changed

    @property
    def next_index(self) -> int:
        """Index of the first batch that this rank has not made yet, not even ahead of its use."""
        return max(self.position, self._sampler.next_index)

    @property
    def order_settings(self) -> dict[str, Any]:
        """Values that the order of samples depends on, by name; the same on all ranks."""
        return {name: getattr(self._sampler, name) for name in _ORDER_KEYS}

    @property
    def is_within_epoch(self) -> bool:
        """Whether an epoch has begun, and batches of it are left."""
        return self.position > 0 and self._sampler.start_of(self.position - 1).epoch == self.epoch

    def resize(self, from_index: int, batch_samples: int) -> None:
        """Change the size of this batch and all later batches. All ranks must call this.

        Raises:
            ValueError: This rank has made the batch already, or the dataset has fewer samples.
        """
        self._sampler.resize(from_index, batch_samples)

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of this epoch's batches."""
        epoch = self.epoch
        while self.epoch == epoch:
            yield self._next()

    def forever(self) -> Iterator[Any]:
        """Yield batches without end."""
        while True:
            yield self._next()

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the number of batches yielded, without batches loaded ahead.

        The position is equal on all ranks. It is valid for other numbers of ranks and workers too.
        """
        return {
            "position": self.position,
            "sizes": self._sampler.state_dict(),
            **self.order_settings,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that a state is of the same data, in the same order.

        Raises:
            CheckpointError: The state is of other data, or of batches of another size.
        """
        for name, value in self.order_settings.items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the data's position was saved with {name}={state.get(name)}, and here it is "
                    f"{value}: samples would be lost or repeated. Use the same values. {_OTHERWISE}"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last batch that was yielded when the state was saved.

        Raises:
            CheckpointError: The state is of other data, or of batches of another size.
        """
        self.check_state_dict(state)
        self.close()
        self.position = int(state["position"])
        initial = [[0, 0, 0, self._sampler.batch_samples]]
        self._sampler.load_state_dict(state.get("sizes", initial), self.position)

    def close(self) -> None:
        """Stop the workers; the loader can still be used. Safe to call twice."""
        self._batches = None

    def _next(self) -> Any:
        batches = self._open() if self._batches is None else self._batches
        self._batches = None  # if loading fails, the next attempt loads this batch again
        batch = next(batches)
        self._batches = batches
        self.position += 1
        return batch

    def _open(self) -> Iterator[Any]:
        # A separate generator: the script's, which dropout draws from, is not advanced.
        seeds = np.random.SeedSequence((self._sampler.seed, self._rank, self.position))
        generator = torch.Generator().manual_seed(int(seeds.generate_state(1)[0]))
        # Workers stop when the last reference to their iterator is dropped. The generator must not
        # refer to this object: in a reference cycle the workers would stop only at a garbage
        # collection, which may happen in a forked process.
        samples = _samples_of_rank(self._rank, self._sampler, self._splits, self.position)
        loader = self._factory.create(batch_sampler=samples, generator=generator)
        batches: Iterator[Any] = iter(loader)
        return batches


class StreamLoader:
    """Loads batches of this rank's own stream, from a position that can be saved.

    If the dataset or its iterator has `state_dict` and `load_state_dict`, torchdata restores the
    position directly. Otherwise the pass is read again up to the position, which leaves the
    script's random generators as they were. The dataset decides which rank and which worker reads
    which samples, and must yield the same number of batches on all ranks. An incomplete batch at
    the end of the stream is dropped. With workers this may be one batch per worker.

    `for batch in loader` yields the rest of a pass through the stream. `forever()` starts again at
    the end of the stream. Without workers, a dataset with `state_dict` may continue in the next
    pass where the last one ended: its state is saved between two passes too.

    If the stream raises an error, the next attempt reads it again from the last batch yielded, as
    after a restart. A stream that is read in this process and has a state is therefore copied after
    a batch, for at most 1 % of the time.

    Attributes:
        position: Batches yielded so far.
        epoch: Completed passes through the stream.
    """

    def __init__(
        self,
        factory: LoaderFactory,
        *,
        samples: int,
        seed: int,
        identity: Mapping[str, int],
    ) -> None:
        """Create the loader; it opens the stream at the first batch.

        Args:
            factory: Factory of torch data loaders over the dataset.
            samples: Samples of this rank's batches.
            seed: Seed of the workers.
            identity: Values that must be the same when a saved position is loaded.
        """
        self.position = self.epoch = 0
        self._factory, self._seed = factory, seed
        self._identity = {"samples": samples, **identity}
        self._is_in_process, dataset = not identity["num_workers"], factory.dataset
        # Workers start each pass with a new copy of the dataset.
        is_kept = self._is_in_process and isinstance(dataset, Stateful)
        self._dataset: Any = dataset if is_kept else None
        # Whether the next pass of the dataset depends on its state.
        self._has_own_state: bool | None = None
        self._dataset_state: Any = None  # between two passes
        self._opened: tuple[Any, Iterator[Any]] | None = None
        # Where a loader that is opened starts: torchdata's state, None for a new pass, and the
        # batches to skip from there. A stream without a state is read from the start of the pass:
        # torchdata would read up to a later position itself, and count these batches twice.
        self._stream: Any = None
        self._skipped = 0
        self._is_loaded = False  # whether the pass started from a loaded state
        self._next_copy = 0.0

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of this pass through the stream."""
        while True:
            batch = self._next()
            if batch is _END:
                return
            self.position += 1
            yield batch

    def forever(self) -> Iterator[Any]:
        """Yield batches without end.

        Raises:
            ValueError: The stream has no batches.
        """
        while True:
            is_whole_pass, before = not self.is_within_epoch, self.position
            yield from self
            if is_whole_pass and self.position == before:
                samples = self._identity["samples"]
                raise ValueError(f"the dataset yields fewer than {samples} samples to this rank")

    @property
    def is_within_epoch(self) -> bool:
        """Whether a pass through the stream has begun, and its end was not reached."""
        return self._opened is not None or self._stream is not None

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position in its stream, after the last batch yielded."""
        stream, skipped = self._stream, self._skipped
        if self._opened is not None:
            state = self._opened[0].state_dict()
            if _has_position(state):
                stream, skipped = state, 0
        return {
            "position": self.position,
            "epoch": self.epoch,
            "stream": stream,
            "skipped": skipped,
            "dataset": self._dataset_state,
            **self._identity,
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that a state is of this rank's stream.

        Raises:
            CheckpointError: The state was saved on another rank, or with another number of ranks or
                workers or another batch size.
        """
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the stream's position was saved with {name}={state.get(name)}, and here it "
                    f"is {value}. A stream can only be resumed unchanged; use a dataset with a "
                    f"length if that may change. {_OTHERWISE}"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last batch that was yielded when the state was saved.

        Raises:
            CheckpointError: The state was saved on another rank, or with another number of ranks or
                workers or another batch size.
        """
        self.check_state_dict(state)
        self.close()
        self.position, self.epoch = int(state["position"]), int(state["epoch"])
        # Checkpoints of earlier versions lack the last two.
        self._stream, self._skipped = state["stream"], state.get("skipped", 0)
        num_yielded = _num_yielded(self._stream) if self._stream is not None else 0
        if num_yielded and not _has_position(self._stream):
            # Earlier versions counted batches twice that torchdata had read again.
            is_first_pass = self.epoch == 0
            self._skipped = self.position if is_first_pass else self._skipped + num_yielded
            self._stream = _start_of_pass(self._stream)
        self._dataset_state = state.get("dataset")
        if self._dataset is not None and self._dataset_state is not None:
            self._dataset.load_state_dict(self._dataset_state)

    def close(self) -> None:
        """Stop the workers; if the loader is used again, the stream starts from its beginning."""
        self._opened = self._stream = None
        self._skipped = 0

    def _next(self) -> Any:
        """Return the next batch, or _END; if that fails, the next call reads the batch again."""
        loader, batches = self._opened or self._open()
        self._opened = None  # after an error of the stream, its iterator only ends
        batch = next(batches, _END)
        if batch is _END:
            self._end_pass()
        else:
            self._keep_place(loader)
            self._opened = loader, batches
        return batch

    def _open(self) -> tuple[Any, Iterator[Any]]:
        with ExitStack() as undo:
            if self._stream is not None:  # the stream may draw numbers that it has drawn before
                undo.callback(RngState.capture().restore)
            return self._open_at_position()

    def _open_at_position(self) -> tuple[Any, Iterator[Any]]:
        loader = self._factory.create(
            batch_size=self._identity["samples"], drop_last=True, generator=self._generator()
        )
        if self._stream is not None:
            loader.load_state_dict(deepcopy(self._stream))  # the dataset may change what it gets
            self._is_loaded = True
        batches = iter(loader)
        if self._dataset is not None and self._has_own_state is None:
            # A dataset that has only the state of its last iterator, as Hugging Face's, has none
            # before the first one. It starts each pass at its beginning, or at a loaded state.
            self._has_own_state = self._dataset.state_dict() is not None
        if self._stream is None:
            state = loader.state_dict()
            if self._has_own_state or not _has_position(state):
                self._stream = deepcopy(state)
        for _ in range(self._skipped):
            next(batches, _END)
        self._next_copy, self._dataset_state = 0.0, None
        return loader, batches

    def _generator(self) -> torch.Generator:
        """Return a generator for this pass, from which torch draws the seed of the workers.

        It is a separate one: the script's, which dropout draws from, is not advanced.
        """
        seeds = np.random.SeedSequence((self._seed, self.epoch))
        return torch.Generator().manual_seed(int(seeds.generate_state(1)[0]))

    def _keep_place(self, loader: Any) -> None:
        """Set the place after the batch just read as the one where an opened loader starts."""
        began = perf_counter()
        if began < self._next_copy:
            self._skipped += 1
            return
        state = loader.state_dict()  # of workers: their own copy
        if not _has_position(state):
            self._skipped += 1
            return
        self._stream, self._skipped = deepcopy(state) if self._is_in_process else state, 0
        ended = perf_counter()
        if self._is_in_process:
            self._next_copy = ended + (ended - began) / _MAX_COPY_RATIO

    def _end_pass(self) -> None:
        if self._has_own_state and self._dataset is not None:
            self._dataset_state = deepcopy(self._dataset.state_dict())
        elif self._dataset is not None and self._is_loaded:
            self._dataset.load_state_dict(None)  # otherwise later passes would start there too
        self._stream, self._skipped, self._is_loaded = None, 0, False
        self.epoch += 1


def _has_position(state: Mapping[str, Any]) -> bool:
    """Return whether torchdata's state has the state of the dataset or its iterator.

    As in torchdata, the first worker decides.
    """
    snapshot = state.get("_snapshot")
    first = state if snapshot is None else snapshot["_worker_snapshots"]["worker_0"]
    states = first["dataset_state"], first["fetcher_state"]["dataset_iter_state"]
    return any(each is not None for each in states)


def _num_yielded(state: Mapping[str, Any]) -> int:
    """Return the number of batches that torchdata would read again."""
    snapshot = state.get("_snapshot")
    if snapshot is None:
        return int(state["_num_yielded"])
    return int(snapshot["_snapshot_step"]) + int(state["_steps_since_snapshot"])


def _start_of_pass(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return torchdata's state at the start of the pass, with the same seed of the workers."""
    snapshot = state.get("_snapshot")
    if snapshot is None:
        return {**state, "_num_yielded": 0}
    last_worker = len(snapshot["_worker_snapshots"]) - 1
    start = {**snapshot, "_snapshot_step": 0, "_last_yielded_worker_id": last_worker}
    return {**state, "_snapshot": start, "_steps_since_snapshot": 0}


def _samples_of_rank(
    rank: int, sampler: GlobalBatchSampler, splits: SplitSource, first_index: int
) -> Iterator[list[int]]:
    """Yield the dataset indices of a rank's samples, batch by batch."""
    for index in count(first_index):
        samples = sampler.samples(index)
        ends = list(accumulate(resized_split(splits.split_at(index), len(samples)), initial=0))
        yield samples[ends[rank] : ends[rank + 1]]


@dataclass(frozen=True, slots=True)
class _TorchdataLoaders:
    """Factory of torchdata's loaders over one dataset."""

    dataset: Any
    options: Mapping[str, Any]

    def create(self, **options: Any) -> Any:
        with warnings.catch_warnings():
            # torchdata 0.11 calls a function that torch 2.13 deprecates.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
            return StatefulDataLoader(self.dataset, **self.options, **options)


def _check(options: Mapping[str, Any], batch_samples: int, world_size: int) -> None:
    unknown = options.keys() - set(_TORCH_OPTIONS)
    if unknown:
        raise ValueError(
            f"a loader has no option {', '.join(sorted(unknown))}; of torch's options it has "
            f"{', '.join(_TORCH_OPTIONS)}"
        )
    check_batch_samples(batch_samples, world_size)


def _check_order(seed: Any, shuffle: object, drop_last: object) -> None:
    is_number = isinstance(seed, Integral) and not isinstance(seed, bool)
    if not is_number or not 0 <= seed <= _MAX_SEED:
        raise ValueError(
            f"seed must be a whole number from 0 to {_MAX_SEED}, the same on all ranks, got "
            f"{shortened(seed)}"
        )
    for name, value, allowed in (
        ("shuffle", shuffle, (True, False, None)),
        ("drop_last", drop_last, (True, False)),
    ):
        if not any(value is each for each in allowed):
            raise ValueError(f"{name} must be one of {allowed}, got {shortened(value)}")


def check_batch_samples(batch_samples: int, world_size: int) -> None:
    """Check the samples of a global batch.

    Raises:
        ValueError: The number is not a whole number, or is smaller than the number of ranks.
    """
    is_count = isinstance(batch_samples, Integral) and not isinstance(batch_samples, bool)
    if not is_count or batch_samples < world_size:
        raise ValueError(
            "batch_samples must be a whole number, the samples of a batch over all "
            f"{world_size} ranks with at least one for each, got {shortened(batch_samples)}"
        )


def _check_stream(shuffle: bool | None, splits: SplitSource | None, *, drop_last: bool) -> None:
    if shuffle or splits is not None or not drop_last:
        raise ValueError(
            "shuffle, shares and drop_last=False are for datasets with a length; an "
            "IterableDataset brings its own order, and each rank reads its own stream"
        )


def _sampler(
    dataset: Any, batch_samples: int, seed: int, shuffle: bool, drop_last: bool
) -> GlobalBatchSampler:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ValueError(
            f"a dataset has __len__ and __getitem__, or is an IterableDataset; got "
            f"{type(dataset).__name__}"
        )
    return GlobalBatchSampler(
        len(dataset), batch_samples, seed=seed, shuffle=shuffle, drop_last=drop_last
    )


def _check_batches(sampler: GlobalBatchSampler, world_size: int) -> None:
    if not sampler.batches_per_epoch:
        raise ValueError(
            f"the dataset has {sampler.num_samples} samples, fewer than one batch of "
            f"{sampler.batch_samples}; make batches smaller or pass drop_last=False"
        )
    if sampler.smallest_batch_samples < world_size:
        raise ValueError(
            f"an epoch's last batch has {sampler.smallest_batch_samples} samples, fewer than one "
            f"for each of {world_size} ranks; pass drop_last=True"
        )
