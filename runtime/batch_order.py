"""In which order a dataset's samples make global batches: a function of seed and epoch alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


class BatchOrder:
    """The samples of each global batch, by its index over all epochs.

    Ranks, shares and workers have no part in it, so that a run that goes on with others of them
    trains on the same batches.

    Args:
        num_samples: Of the dataset.
        batch_samples: Of a global batch.
        seed: From 0 on.
        shuffle: Whether each epoch has an order of its own; else it is the dataset's.
        drop_last: Whether an epoch's last batch is left out where it is incomplete; else it is
            smaller. The next epoch has other samples last.
    """

    def __init__(
        self, num_samples: int, batch_samples: int, *, seed: int, shuffle: bool, drop_last: bool
    ) -> None:
        self.num_samples, self.batch_samples = num_samples, batch_samples
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.arange(num_samples)

    @property
    def batches_per_epoch(self) -> int:
        """How many batches make an epoch."""
        whole, rest = divmod(self.num_samples, self.batch_samples)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def least_samples(self) -> int:
        """How many samples the smallest batch has."""
        rest = self.num_samples % self.batch_samples
        return self.batch_samples if self.drop_last or not rest else rest

    def samples(self, index: int) -> list[int]:
        """Return the places in the dataset of a batch's samples."""
        epoch, number = divmod(index, self.batches_per_epoch)
        if self.shuffle and epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(self.num_samples)
            self._epoch = epoch
        first = number * self.batch_samples
        samples: list[int] = self._order[first : first + self.batch_samples].tolist()
        return samples
