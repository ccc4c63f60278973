"""Defines the result of one training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of `TrainingRun.train_batch`: one global batch, one update. Stability: beta.

    Attributes:
        step: Number of this step, from 1; skipped steps count.
        loss: Weighted mean loss of the batch before the update, over all micro-batches and ranks;
            the same on all ranks. On a skipped step it may be nan or inf, if the forward passes
            overflowed too.
        samples: Samples of all ranks.
        weight: Sum of the weights of all ranks; equals `samples` if the loss returns no weight.
        micro_batches: Samples of each micro-batch on this rank.
        replays: Attempts that ran out of memory, on any rank, before the successful attempt.
        skipped: Whether no update was made, because fp16 gradients overflowed.
        seconds: Wall time of the call, replays included.

    Examples:
        >>> result = run.train_batch(batch)
        >>> print(f"step {result.step}: loss {result.loss:.3f} in {result.seconds:.2f} s")
    """

    step: int
    loss: float
    samples: int
    weight: float
    micro_batches: tuple[int, ...]
    replays: int
    skipped: bool
    seconds: float
