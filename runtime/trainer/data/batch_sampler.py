"""Samples global batches, in an order that depends on seed and epoch only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# Number of size changes to keep. Between the batch of a checkpoint and a batch that is loaded ahead
# there are always fewer changes.
MAX_RESIZES = 64


class BatchStart(NamedTuple):
    """Position at which a batch starts.

    Attributes:
        batch: Index of the batch over all epochs.
        epoch: Index of the epoch.
        first: Number of samples of the epoch before the batch.
        samples: Number of samples of the batch.
    """

    batch: int
    epoch: int
    first: int
    samples: int


class GlobalBatchSampler:
    """Samples of each global batch, by its index over all epochs.

    The batch size can change. Each batch starts after the last sample of the previous batch. The
    order does not depend on the number of ranks, the split or the workers. So a run that is resumed
    with another number of ranks or workers trains on the same batches.

    Args:
        num_samples: Samples of the dataset.
        batch_samples: Initial samples of a global batch.
        seed: 0 or larger.
        shuffle: Whether each epoch is shuffled; otherwise samples come in the order of the dataset.
        drop_last: Whether an incomplete last batch of an epoch is dropped; otherwise the last batch
            may be smaller.

    Attributes:
        next_index: First batch whose samples this rank has not read yet.
    """

    def __init__(
        self, num_samples: int, batch_samples: int, *, seed: int, shuffle: bool, drop_last: bool
    ) -> None:
        self.num_samples, self.batch_samples = num_samples, batch_samples
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.next_index = 0
        self._starts = [BatchStart(0, 0, 0, batch_samples)]
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.arange(num_samples)

    @property
    def latest_samples(self) -> int:
        """Batch size of the last change, even if it is not in effect yet."""
        return self._starts[-1].samples

    @property
    def has_changed(self) -> bool:
        """Whether the batch size was changed."""
        return len(self._starts) > 1

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in an epoch, at the last batch size."""
        return self._batches_in(self.num_samples, self.latest_samples)

    @property
    def smallest_batch_samples(self) -> int:
        """Size of the smallest batch, before any change."""
        rest = self.num_samples % self.batch_samples
        return self.batch_samples if self.drop_last or not rest else rest

    def samples(self, index: int) -> list[int]:
        """Return the dataset indices of a batch. After this call they cannot change."""
        self.next_index = max(self.next_index, index + 1)
        _, epoch, first, size = self.start_of(index)
        if self.shuffle and epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)
            self._epoch = epoch
        samples: list[int] = self._order[first : first + size].tolist()
        return samples

    def start_of(self, index: int) -> BatchStart:
        """Return the start of a batch; the last batch of an epoch may be smaller than others."""
        start = self._starts[max(0, bisect_right(self._starts, index, key=itemgetter(0)) - 1)]
        number, size = index - start.batch, start.samples
        in_this_epoch = self._batches_in(self.num_samples - start.first, size)
        if number < in_this_epoch:
            return BatchStart(index, start.epoch, start.first + number * size, size)
        further, number = divmod(number - in_this_epoch, self._batches_in(self.num_samples, size))
        return BatchStart(index, start.epoch + 1 + further, number * size, size)

    def resize(self, from_index: int, batch_samples: int) -> None:
        """Change the size of a batch and all later batches. The start of this batch stays the same.

        Raises:
            ValueError: The batch was read already, or is larger than an epoch.
        """
        if from_index < self.next_index:
            raise ValueError(
                f"batch {from_index} is made already; from batch {self.next_index} on its size "
                "can change"
            )
        if not 0 < batch_samples <= self.num_samples:
            raise ValueError(
                f"a batch of {batch_samples} cannot be made of {self.num_samples} samples"
            )
        while len(self._starts) > 1 and self._starts[-1].batch >= from_index:
            self._starts.pop()
        self._starts.append(self.start_of(from_index)._replace(samples=batch_samples))
        del self._starts[:-MAX_RESIZES]

    def state_dict(self) -> list[list[int]]:
        """Return the size changes, to be loaded with a position."""
        return [list(start) for start in self._starts]

    def load_state_dict(self, state: Iterable[Iterable[int]], position: int) -> None:
        """Load size changes. Batches from this position on count as not read yet."""
        self._starts = [BatchStart(*map(int, each)) for each in state]
        self.next_index = position

    def _batches_in(self, num_samples: int, size: int) -> int:
        whole, rest = divmod(num_samples, size)
        return whole + (rest > 0 and not self.drop_last)
