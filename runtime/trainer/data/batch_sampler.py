"""In which order a dataset's samples make global batches: a function of seed and epoch alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# Changes of the size that are remembered: more than lie between a batch that is loaded ahead and
# one of which the state was saved.
MAX_CUTS = 64


class BatchStart(NamedTuple):
    """Where a batch begins: its index, its epoch, the samples of that before it; and its size."""

    batch: int
    epoch: int
    first: int
    samples: int


class GlobalBatchSampler:
    """The samples of each global batch, by its index over all epochs.

    Its size can change on the way: the next batch begins behind the last sample of the one before.
    Ranks, shares and workers have no part in it, so that a run that goes on with others of them
    trains on the same batches.

    Args:
        num_samples: Of the dataset.
        batch_samples: Of a global batch, to begin with.
        seed: From 0 on.
        shuffle: Whether each epoch has an order of its own; else it is the dataset's.
        drop_last: Whether an epoch's last batch is left out where it is incomplete; else it is
            smaller. The next epoch has other samples last.

    Attributes:
        next_index: The first batch that was not asked for yet, on this rank.
    """

    def __init__(
        self, num_samples: int, batch_samples: int, *, seed: int, shuffle: bool, drop_last: bool
    ) -> None:
        self.num_samples, self.batch_samples = num_samples, batch_samples
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.next_index = 0
        self._cuts = [BatchStart(0, 0, 0, batch_samples)]
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.arange(num_samples)

    @property
    def latest_samples(self) -> int:
        """What batches hold by the change that was made last, whether it holds yet or not."""
        return self._cuts[-1].samples

    @property
    def has_changed(self) -> bool:
        """Whether there are batches of more than one size."""
        return len(self._cuts) > 1

    @property
    def batches_per_epoch(self) -> int:
        """How many batches make an epoch, of the size that was asked for last."""
        return self._batches_in(self.num_samples, self.latest_samples)

    @property
    def least_samples(self) -> int:
        """How many samples the smallest batch has, before any change."""
        rest = self.num_samples % self.batch_samples
        return self.batch_samples if self.drop_last or not rest else rest

    def samples(self, index: int) -> list[int]:
        """Return the places in the dataset of a batch's samples, which are settled from now on."""
        self.next_index = max(self.next_index, index + 1)
        _, epoch, first, size = self.place(index)
        if self.shuffle and epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)
            self._epoch = epoch
        samples: list[int] = self._order[first : first + size].tolist()
        return samples

    def place(self, index: int) -> BatchStart:
        """Return where a batch begins, and its size; an epoch's last one may fall short of it."""
        cut = self._cuts[max(0, bisect_right(self._cuts, index, key=itemgetter(0)) - 1)]
        number, size = index - cut.batch, cut.samples
        in_this_epoch = self._batches_in(self.num_samples - cut.first, size)
        if number < in_this_epoch:
            return BatchStart(index, cut.epoch, cut.first + number * size, size)
        further, number = divmod(number - in_this_epoch, self._batches_in(self.num_samples, size))
        return BatchStart(index, cut.epoch + 1 + further, number * size, size)

    def resize(self, from_index: int, batch_samples: int) -> None:
        """Make batches of another size from one on, which begins where it would have begun.

        Raises:
            ValueError: The batch was asked for already, or an epoch has not that many samples.
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
        while len(self._cuts) > 1 and self._cuts[-1].batch >= from_index:
            self._cuts.pop()
        self._cuts.append(self.place(from_index)._replace(samples=batch_samples))
        del self._cuts[:-MAX_CUTS]

    def state_dict(self) -> list[list[int]]:
        """Return the sizes, to be loaded with a position."""
        return [list(cut) for cut in self._cuts]

    def load_state_dict(self, state: Iterable[Iterable[int]], position: int) -> None:
        """Go on with these sizes; nothing from that position on was made yet."""
        self._cuts = [BatchStart(*map(int, each)) for each in state]
        self.next_index = position

    def _batches_in(self, num_samples: int, size: int) -> int:
        whole, rest = divmod(num_samples, size)
        return whole + (rest > 0 and not self.drop_last)
