"""The weights and losses of a window, added up over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from ....errors import BatchError, NonFiniteLossError
from ...common.host_group import HostGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Of one rank's micro-batches, or of all: sum of weights, and of weight times mean loss."""

    weight: float
    weighted_loss: float

    @property
    def mean_loss(self) -> float:
        """The weighted mean."""
        return self.weighted_loss / self.weight

    def over_ranks(self, host_group: HostGroup) -> Sums:
        """Return the sums of all ranks; every one must call this.

        Raises:
            BatchError: Nothing in the batch has a weight; raised on all ranks.
        """
        told = host_group.all_gather([self.weight, self.weighted_loss]).sum(axis=0)
        weight = float(told[0])
        if not weight > 0 and isfinite(weight):
            raise BatchError(
                f"the weights of this batch add up to {weight}, so nothing can be learned from it; "
                "drop batches without targets"
            )
        return Sums(weight=weight, weighted_loss=float(told[1]))

    def check_finite(self, step: int, *, overflow_is_skipped: bool = False) -> None:
        """Refuse an update that would spoil the weights.

        Args:
            step: The number of the update.
            overflow_is_skipped: Whether the engine itself leaves out an update by a loss that is
                not finite, as fp16's dynamic loss scale does.

        Raises:
            NonFiniteLossError: The loss or a weight is nan or inf.
        """
        is_usable = overflow_is_skipped or isfinite(self.weighted_loss)
        if not is_usable or not isfinite(self.weight):
            raise NonFiniteLossError(
                f"the loss of step {step} is {self.mean_loss}; no update was made and the weights "
                "are as before. Look at this batch (a mean over no targets is nan) and at the "
                "learning rate, or call train_batch with the next one"
            )
