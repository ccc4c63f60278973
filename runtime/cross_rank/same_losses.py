"""Finds out whether all ranks are fed the same data: their losses are then equal to the last digit.

A loss over the batches of all ranks is equal, too, whatever the data. The log line names this case.

Each rank computes a hash of its losses over a window of steps, and sends it with its figures. Rank
0 compares the hashes. The windows begin at 32, 64, 128 and so on steps, so that all ranks have the
same last window for a while, however rarely they report.
"""

from __future__ import annotations

import logging
import math
import struct
import zlib
from collections.abc import Mapping
from itertools import pairwise

from ...metrics.catalog.across_ranks import RANKS_SAME_LOSS
from ...metrics.recorder import Recorder
from .rank_figures import LOSS_HASH, LOSS_WINDOW, Figures

logger = logging.getLogger(__name__)

WINDOW_STEPS = 32
# A loss that hardly changes, such as 0 or a loss of low precision, is equal on all ranks by chance.
MIN_CHANGES = 16
_HASH_MASK = 2**24 - 1  # a larger integer is no exact float32


class LossWindows:
    """Hashes the losses of this rank over windows of steps. `add` runs on the watch thread.

    Attributes:
        last: Number of the last whole window, and the hash of its losses. The hash is NaN if a loss
            was missing, or if the losses hardly changed. Any thread may read it.
    """

    def __init__(self) -> None:
        self.last = math.nan, math.nan
        self._first_step: int | None = None
        self._losses: list[float] = []

    def add(self, step: int, loss: float | None) -> None:
        """Add a step.

        Args:
            step: Number of the step; the first one is the same on all ranks.
            loss: The loss of this rank; None if it is unknown.
        """
        if self._first_step is None:
            self._first_step = step
        window, at = _window_at(step - self._first_step)
        if window is None:
            return
        if at == 0:
            self._losses = []
        self._losses.append(math.nan if loss is None else loss)
        if at == WINDOW_STEPS - 1:
            self.last = float(window), self._hash()

    def _hash(self) -> float:
        losses = self._losses
        changes = sum(before != after for before, after in pairwise(losses))
        is_known = len(losses) == WINDOW_STEPS and all(map(math.isfinite, losses))
        if not is_known or changes < MIN_CHANGES:
            return math.nan
        return float(zlib.crc32(struct.pack(f"{len(losses)}d", *losses)) & _HASH_MASK)


class SameLosses:
    """Compares the hashes of all ranks, on rank 0; publishes and logs that they are equal.

    Args:
        recorder: Receives the metric.
        world_size: Number of ranks of the job; nothing is said unless all of them have reported.
    """

    def __init__(self, recorder: Recorder, world_size: int) -> None:
        self._recorder, self._world_size = recorder, world_size
        self._is_logged = False

    def publish(self, figures: Mapping[int, Figures]) -> None:
        """Compare the last windows of all ranks, if they are the same window.

        Args:
            figures: The figures by rank.
        """
        if self._world_size < 2 or len(figures) < self._world_size:
            return
        marks = {(float(each[LOSS_WINDOW]), float(each[LOSS_HASH])) for each in figures.values()}
        windows = {window for window, _ in marks}
        if len(windows) > 1 or any(math.isnan(value) for mark in marks for value in mark):
            return
        is_same = len(marks) == 1
        self._recorder.set(RANKS_SAME_LOSS, is_same)
        if is_same and not self._is_logged:
            self._is_logged = True
            logger.warning(
                "the losses of all %d data-parallel ranks are equal to the last digit over %d "
                "steps, so the ranks are probably fed the same samples. Give each rank its own "
                "part of the data, such as by DistributedSampler. Ignore this if the loss is that "
                "of all ranks together, as a contrastive loss over gathered features, or in a test "
                "that trains on one batch.",
                self._world_size,
                WINDOW_STEPS,
            )


def _window_at(steps: int) -> tuple[int | None, int]:
    """Return the window that a step is in, and its place there; None between two windows.

    Args:
        steps: Steps since the first step.
    """
    if steps < WINDOW_STEPS:
        return None, 0
    window = (steps // WINDOW_STEPS).bit_length() - 1
    at = steps - (WINDOW_STEPS << window)
    return (window, at) if at < WINDOW_STEPS else (None, 0)
