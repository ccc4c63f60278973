"""What became of one global batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """What became of one global batch.

    Attributes:
        step: The number of this step, from 1.
        loss: The weighted mean over all ranks.
        samples: Samples of all ranks.
        weight: Sum of weights over all ranks; the samples where the loss gave none.
        micro_batches: Samples of each micro-batch on this rank.
        replays: How often the window was begun anew after memory ran out.
        skipped: Whether no update was made, because fp16 gradients overflowed.
        seconds: Wall time of the call.
    """

    step: int
    loss: float
    samples: int
    weight: float
    micro_batches: tuple[int, ...]
    replays: int
    skipped: bool
    seconds: float
