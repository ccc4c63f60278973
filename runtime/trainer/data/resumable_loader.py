"""A data loader that can be put back to any batch: this rank's share of each global batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ....errors import CheckpointError
from .batch_sampler import GlobalBatchSampler
from .shares import even_shares, resized
from .stream_loader import StreamLoader

SharesAt = Callable[[int], Sequence[int]]
_TORCHS_OPTIONS = (
    "collate_fn",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
)
BATCH_MULTIPLES = (1, 2, 4)  # beyond, no rule for the learning rate is known to hold
# What the order of the samples depends on: a position means nothing where one of these differs.
_ORDER_KEYS = ("num_samples", "batch_samples", "seed", "shuffle", "drop_last")


def resumable_loader(
    dataset: Any,
    *,
    batch_samples: int,
    rank: int,
    world_size: int,
    seed: int = 0,
    shuffle: bool | None = None,
    drop_last: bool = True,
    shares_at: SharesAt | None = None,
    **options: Any,
) -> ResumableLoader | StreamLoader:
    """Return a loader of this rank's share of each global batch, in torchdata's loader.

    Args:
        dataset: With `__len__` and `__getitem__`; or an IterableDataset, see `StreamLoader`.
        batch_samples: Samples of a global batch, over all ranks.
        rank: This rank, among those that share the data.
        world_size: How many those are.
        seed: Of the order, from 0 on; the same on all ranks.
        shuffle: Whether each epoch has an order of its own; by default yes.
        drop_last: Whether the incomplete batch at an epoch's end is left out; else it is smaller,
            and has at least a sample for each rank.
        shares_at: Tells of a batch, by its index, the samples of each rank; by default all alike.
        options: Further ones of torch's DataLoader, such as collate_fn and num_workers.

    Raises:
        ValueError: These do not make batches; the text says why.
    """
    _check(options, batch_samples, world_size)
    make_loader = partial(_torchdata_loader, dataset, **options)
    if isinstance(dataset, IterableDataset):
        _check_stream(shuffle, shares_at, drop_last=drop_last)
        whose = {"rank": rank, "world_size": world_size}
        return _stream(make_loader, options, even_shares(batch_samples, world_size), seed, whose)
    order = _order(dataset, batch_samples, seed, shuffle is not False, drop_last)
    _check_order(order, world_size)
    shares_at = shares_at or (lambda index: even_shares(batch_samples, world_size))
    return ResumableLoader(make_loader, order, shares_at, rank)


class ResumableLoader:
    """Loads this rank's share of each global batch, in an order that is the same on every rank.

    `for batch in loader` yields the rest of an epoch, and the next time the next one; `forever()`
    goes on over epochs. Random transforms in workers are not repeated alike after a restart.

    Attributes:
        position: Global batches handed out so far, over all epochs: the index of the next.
    """

    def __init__(
        self,
        make_loader: Callable[..., Any],
        order: GlobalBatchSampler,
        shares_at: SharesAt,
        rank: int,
    ) -> None:
        self.position = 0
        self._make_loader = make_loader
        self._order = order
        self._shares_at = shares_at
        self._rank = rank
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Return how many batches make an epoch."""
        return self._order.batches_per_epoch

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._order.place(self.position).epoch

    @property
    def batch_samples(self) -> int:
        """Samples of a global batch, as asked for last; those loaded ahead may be of another."""
        return self._order.latest_samples

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """What it may be changed to: multiples of what it began with, as far as samples go."""
        first, most = self._order.batch_samples, self._order.num_samples
        return tuple(first * times for times in BATCH_MULTIPLES if first * times <= most)

    @property
    def batch_ratio(self) -> float:
        """The size of the batch that was handed out last, over what it began with."""
        return self._order.place(max(0, self.position - 1)).samples / self._order.batch_samples

    @property
    def is_resized(self) -> bool:
        """Whether that may be another ratio than 1 for any batch."""
        return self._order.has_changed

    @property
    def next_index(self) -> int:
        """The first batch that was not made yet on this rank, as ones loaded ahead are."""
        return max(self.position, self._order.next_index)

    def resize(self, from_index: int, batch_samples: int) -> None:
        """Make batches of another size from one on that no rank has made yet, on all ranks alike.

        Raises:
            ValueError: This rank has, or there are not so many samples.
        """
        self._order.resize(from_index, batch_samples)

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
        """Return the position: the batches handed out, not those that workers loaded ahead.

        It is the same on all ranks, and holds for other numbers of ranks and workers too.
        """
        return {"position": self.position, "sizes": self._order.state_dict(), **self._facts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the batch that was handed out last when the state was taken.

        Raises:
            CheckpointError: The state is that of other data, or of batches of another size.
        """
        for name, value in self._facts().items():
            if state.get(name) != value:
                raise CheckpointError(
                    f"the data's position was saved with {name}={state.get(name)}, and here it is "
                    f"{value}: samples would be lost or repeated. Give the loader what it had, or "
                    "begin without its state"
                )
        self.close()
        self.position = int(state["position"])
        begun = [[0, 0, 0, self._order.batch_samples]]
        self._order.load_state_dict(state.get("sizes", begun), self.position)

    def close(self) -> None:
        """End the workers; the loader can still be used. Safe to call twice."""
        self._batches = None

    def _next(self) -> Any:
        batches = self._open() if self._batches is None else self._batches
        self._batches = None  # where loading fails, the next attempt is at this batch again
        batch = next(batches)
        self._batches = batches
        self.position += 1
        return batch

    def _open(self) -> Iterator[Any]:
        # A generator of its own: the script's, which dropout draws from, stays as it is.
        seeds = np.random.SeedSequence((self._order.seed, self._rank, self.position))
        generator = torch.Generator().manual_seed(int(seeds.generate_state(1)[0]))
        # It does not refer to this object: workers end as the last reference to their iterator
        # goes, and in a cycle that would be whenever garbage is collected, in a fork maybe.
        samples = _of_rank(self._rank, self._order, self._shares_at, self.position)
        loader = self._make_loader(batch_sampler=samples, generator=generator)
        batches: Iterator[Any] = iter(loader)
        return batches

    def _facts(self) -> dict[str, Any]:
        return {name: getattr(self._order, name) for name in _ORDER_KEYS}


def _of_rank(
    rank: int, order: GlobalBatchSampler, shares_at: SharesAt, first_index: int
) -> Iterator[list[int]]:
    """Yield the places in the dataset of a rank's samples, batch by batch."""
    for index in count(first_index):
        samples = order.samples(index)
        ends = list(accumulate(resized(shares_at(index), len(samples)), initial=0))
        yield samples[ends[rank] : ends[rank + 1]]


def _torchdata_loader(dataset: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        # torchdata 0.11 calls what torch 2.13 deprecates.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        return StatefulDataLoader(dataset, **options)


def _check(options: Mapping[str, Any], batch_samples: int, world_size: int) -> None:
    unknown = options.keys() - set(_TORCHS_OPTIONS)
    if unknown:
        raise ValueError(
            f"a loader takes no {', '.join(sorted(unknown))}; of torch's options it takes "
            f"{', '.join(_TORCHS_OPTIONS)}"
        )
    if batch_samples < world_size:
        raise ValueError(
            f"batch_samples is {batch_samples} over all {world_size} ranks; each needs one at least"
        )


def _check_stream(shuffle: bool | None, shares_at: SharesAt | None, *, drop_last: bool) -> None:
    if shuffle or shares_at is not None or not drop_last:
        raise ValueError(
            "shuffle, shares and drop_last=False are for datasets with a length; an "
            "IterableDataset brings its own order, and each rank reads a stream of its own"
        )


def _stream(
    make_loader: Callable[..., Any],
    options: Mapping[str, Any],
    shares: Sequence[int],
    seed: int,
    whose: dict[str, int],
) -> StreamLoader:
    whose["num_workers"] = options.get("num_workers", 0)
    return StreamLoader(make_loader, samples=shares[whose["rank"]], seed=seed, whose=whose)


def _order(
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


def _check_order(order: GlobalBatchSampler, world_size: int) -> None:
    if not order.batches_per_epoch:
        raise ValueError(
            f"the dataset has {order.num_samples} samples, less than one batch of "
            f"{order.batch_samples}; make batches smaller or pass drop_last=False"
        )
    if order.least_samples < world_size:
        raise ValueError(
            f"an epoch's last batch has {order.least_samples} samples, less than one for each of "
            f"{world_size} ranks; pass drop_last=True"
        )
