"""What one rank saw of the micro-batches since the last step."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..common.device_scalar import Number
from .batch_shape import BatchShape


@dataclass(slots=True)
class StepCounts:
    """The micro-batches since the last step, as this rank saw them.

    `losses_are_shares` says that they were divided by the number of micro-batches before backward,
    as Hugging Face's Trainer does; `skipped` that the step made no update.
    """

    micro_batches: int = 0
    samples: int | None = None
    tokens: int | None = None
    sequence_length: int | None = None
    losses: list[Number] = field(default_factory=list)
    losses_are_shares: bool = False
    skipped: bool = False

    def add(self, shapes: list[BatchShape], loss: Number) -> None:
        """Count one micro-batch, of one or more forwards."""
        self.micro_batches += 1
        for shape in shapes:
            if shape.samples is not None:
                self.samples = (self.samples or 0) + shape.samples
            if shape.tokens is not None:
                self.tokens = (self.tokens or 0) + shape.tokens
                self.sequence_length = shape.sequence_length
        self.losses.append(loss)
